//go:build linux

package guestd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/guest/slice"
	"github.com/agentlab-vm/agentlab/internal/version"
)

// Names of files, below Config.Root. Only runDir belongs to AgentLab alone.
const (
	runDir        = "/run/agentlab"
	bootstrapFile = runDir + "/bootstrap.json"
	bootstrapLink = "/etc/agentlab/bootstrap.json"
	uidFile       = "/var/lib/agentlab/uid" // of the last identity; on the disk
	bootUIDFile   = runDir + "/uid"         // of the identity set in this boot
	machineIDFile = "/etc/machine-id"
	hostnameFile  = "/etc/hostname"
	hostsFile     = "/etc/hosts"
	gitConfigFile = "/etc/gitconfig"
	freshFile     = runDir + "/machine-id.new" // initd made the machine-id in this boot
	keysDir       = runDir + "/ssh/authorized_keys.d"
	runnerLock    = runDir + "/runner.lock"
	runnerLog     = runDir + "/runner.log"
	runnerDone    = runDir + "/runner.done"
	secretsDir    = runDir + "/secrets" // directory of the runner's own state
	bootstrapDoc  = "bootstrap.json"    // a file in it: the answer to the runner's token
	runnerProgram = runDir + "/bin/agent-runner"
)

// maxBody is the maximum size of a request's body, in bytes.
const maxBody = 4 << 20

// Config has the paths and users of the server. The zero value is right for a
// guest.
type Config struct {
	Root    string        // prefix of every file name; "" in a guest
	Kernel  Kernel        // nil: the real one
	User    string        // user of commands when a request names none; default "agent"
	Runner  []string      // command of the runner; default agent-runner run
	Logger  *slog.Logger  // nil: silent
	Backoff time.Duration // first pause before a crashed runner is started again; default 1 s
	// StagedWait is how long commands and terminals wait for the secrets after the start
	// of the runner. They then start without. Default 10 s.
	StagedWait time.Duration
	Grace      time.Duration // between SIGHUP and SIGTERM, and SIGKILL, to a command whose client has disconnected; default 2 s
	SSHD       string        // address where sshd answers; default 127.0.0.1:22
	Limits     bool          // limit what is started, with agentlab.slice
	// KeepAfter is how long after an identity the disk gets the UID that makes its files
	// valid for the next boot; 0 is before the answer. A copy that starts has more
	// important work, mostly where its processor is emulated.
	KeepAfter time.Duration
	// Answered, if not nil, is called with the path of each answered request.
	Answered func(path string)
}

// Server answers guest control requests.
type Server struct {
	cfg   Config
	log   *slog.Logger
	http  *http.Server
	slice *slice.Slice // nil: nothing is limited

	idMu     sync.Mutex        // one identity at a time
	prepared bool              // a template that has no identity yet; guarded by idMu
	network  *guestapi.Network // that this server has configured; guarded by idMu
	disk     int64             // bytes of the disk that the root file system fills; 0: not known; guarded by idMu

	keyMu  sync.Mutex // one writer of authorized_keys at a time
	workMu sync.Mutex // one change of the workspace at a time
	frozen *freeze    // of the workspace; nil if it is not frozen; guarded by workMu

	runner runnerState
	system systemState
	terms  terminals

	ctx    context.Context // ends with the server
	cancel context.CancelFunc
	wg     sync.WaitGroup
}

// New returns a Server. The caller calls Serve, then Close.
func New(cfg Config) *Server {
	if cfg.Kernel == nil {
		cfg.Kernel = linuxKernel{}
	}
	if cfg.User == "" {
		cfg.User = "agent"
	}
	if len(cfg.Runner) == 0 {
		cfg.Runner = []string{runnerProgram, "run"}
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	if cfg.Grace == 0 {
		cfg.Grace = 2 * time.Second
	}
	if cfg.SSHD == "" {
		cfg.SSHD = "127.0.0.1:22"
	}
	if cfg.StagedWait == 0 {
		cfg.StagedWait = 10 * time.Second
	}
	if cfg.Backoff == 0 {
		cfg.Backoff = time.Second
	}
	s := &Server{cfg: cfg, log: cfg.Logger}
	if cfg.Limits {
		s.slice = slice.Open(cfg.Root, cfg.Logger)
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.terms.open = make(map[string]*terminal)
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+guestapi.PathHealth, s.handleHealth)
	mux.HandleFunc("POST "+guestapi.PathPrepare, s.handlePrepare)
	mux.HandleFunc("PUT "+guestapi.PathIdentity, s.handleIdentity)
	mux.HandleFunc("PUT "+guestapi.PathWorkspace, s.handleMount)
	mux.HandleFunc("DELETE "+guestapi.PathWorkspace, s.handleUnmount)
	mux.HandleFunc("PUT "+guestapi.PathFreeze, s.handleFreeze)
	mux.HandleFunc("DELETE "+guestapi.PathFreeze, s.handleThaw)
	mux.HandleFunc("POST "+guestapi.PathSync, s.handleSync)
	mux.HandleFunc("POST "+guestapi.PathExec, s.handleExec)
	mux.HandleFunc("POST "+guestapi.PathAttach, s.handleAttach)
	mux.HandleFunc("POST "+guestapi.PathSSHKey, s.handleSSHKey)
	mux.HandleFunc("POST "+guestapi.PathPower, s.handlePower)
	mux.HandleFunc("POST "+guestapi.PathListeners, s.handleListeners)
	mux.HandleFunc("POST "+guestapi.PathDial, s.handleDial)
	var handler http.Handler = mux
	if cfg.Answered != nil {
		handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			mux.ServeHTTP(w, r)
			cfg.Answered(r.URL.Path)
		})
	}
	s.http = &http.Server{
		Handler:           handler,
		ReadHeaderTimeout: 30 * time.Second,
		MaxHeaderBytes:    64 << 10,
		ErrorLog:          slog.NewLogLogger(cfg.Logger.Handler(), slog.LevelDebug),
	}
	return s
}

// Serve serves connections of l until l fails or Close is called. It also
// supervises a runner that an earlier guestd of this boot has started.
func (s *Server) Serve(l net.Listener) error {
	s.resumeRunner()
	if s.cfg.KeepAfter > 0 && s.line(bootUIDFile) != "" { // of an earlier server, which may not have kept it
		s.keepLater()
	}
	s.wg.Go(s.thawLeft)
	if s.line(nestedFile) == string(agentlab.NestedWorks) { // of an earlier server of this boot
		s.slice.WatchVMs(kvmModule())
	}
	err := s.http.Serve(l)
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// Close ends the server and every command and terminal that it started, and
// waits for them. The runner continues.
func (s *Server) Close() error {
	s.cancel()
	err := s.http.Close()
	s.workMu.Lock()
	s.thaw()
	s.workMu.Unlock()
	s.wg.Wait()
	s.unparkRunner()
	return err
}

// path returns name below the configured root.
func (s *Server) path(name string) string { return filepath.Join("/", s.cfg.Root, name) }

func (s *Server) handleHealth(w http.ResponseWriter, _ *http.Request) {
	reply(w, s.health())
}

func (s *Server) health() guestapi.Health {
	return guestapi.Health{
		Version:  version.Get().Version,
		BootID:   s.line("/proc/sys/kernel/random/boot_id"),
		Uptime:   s.cfg.Kernel.Uptime(),
		Identity: s.line(bootUIDFile),
		System:   s.systemStatus(),

		Bootstrapped: s.bootstrapped(),
		Nested:       s.line(nestedFile),
	}
}

// line returns the first line of a small file, "" if there is none.
func (s *Server) line(name string) string {
	b, err := s.readFile(name)
	if err != nil {
		return ""
	}
	first, _, _ := strings.Cut(string(b), "\n")
	return strings.TrimSpace(first)
}

// maxSmallFile limits the files of the system that the server reads, in bytes.
const maxSmallFile = 1 << 20

// readFile reads a small file. Root of the guest may have replaced it: a pipe would block
// the server without limit.
func (s *Server) readFile(name string) ([]byte, error) {
	f, err := os.OpenFile(s.path(name), os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	if fi, err := f.Stat(); err != nil || !fi.Mode().IsRegular() {
		return nil, errors.Join(err, fmt.Errorf("%s is not a regular file", name))
	}
	return io.ReadAll(io.LimitReader(f, maxSmallFile))
}

// decode reads the JSON body of r into v. After an error it has answered the
// request.
func decode(w http.ResponseWriter, r *http.Request, v any) bool {
	b, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err == nil {
		err = json.Unmarshal(b, v)
	}
	if err != nil {
		fail(w, agentlab.Errorf(agentlab.CodeInvalid, "the request cannot be read: %w", err))
		return false
	}
	return true
}

func reply(w http.ResponseWriter, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		fail(w, err)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header()["Date"] = nil // none: the clock may be wrong, and a date takes long under emulation
	_, _ = w.Write(b)
}

func fail(w http.ResponseWriter, err error) {
	status := http.StatusInternalServerError
	code := agentlab.CodeOf(err)
	switch code {
	case agentlab.CodeInvalid:
		status = http.StatusBadRequest
	case agentlab.CodeNotFound:
		status = http.StatusNotFound
	case agentlab.CodeBusy, agentlab.CodeUnavailable:
		status = http.StatusServiceUnavailable
	case agentlab.CodeConflict:
		status = http.StatusConflict
	case agentlab.CodeLimit:
		status = http.StatusTooManyRequests
	}
	b, _ := json.Marshal(guestapi.ErrorBody{Code: string(code), Message: err.Error()})
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(b)
}

package pve

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// ShellOptions configures how Proxmox's programs are run.
type ShellOptions struct {
	// Bin is the directory of pvesh, pvesm and qm; "" means /usr/bin or, if
	// they are not there, PATH.
	Bin string
	// Prefix is a command that runs the rest of its arguments, with this
	// process's streams and exit code (Unconfined).
	Prefix []string
	// Snippets is the storage of Root's snippets; "" means "local".
	Snippets string
	// ReadTimeout limits a read-only call; 0 means 60 s. Other calls are
	// never interrupted.
	ReadTimeout time.Duration
}

// shell is the Transport that runs pvesh on the node, which must be this
// machine.
//
// pvesh does the work of a call itself and runs until it is done. If it were
// killed, it would leave partial disks and locks, so a call that changes
// something is never killed: when ctx ends, the call continues and its outcome
// is unknown. It runs in its own session, so that no signal to this process's
// group reaches it, and writes to files, so that it does not fail with a
// broken pipe when this process ends. The unit of the daemon must not kill it
// either (KillMode=process).
type shell struct {
	o             ShellOptions
	reads, writes chan struct{}
	calls         atomic.Int64
	snippets      snippets
	ended         endedTasks
}

// How many pvesh run at once: each needs about 100 MB and almost a second of
// CPU time to start. Stopping a VM never waits for others.
const (
	maxReads  = 4
	maxWrites = 12
)

// NewShell returns the transport that runs pvesh on this machine, as root.
// Preflight checks whether it can work here.
func NewShell(o ShellOptions) Transport {
	if o.Snippets == "" {
		o.Snippets = "local"
	}
	if o.ReadTimeout == 0 {
		o.ReadTimeout = 60 * time.Second
	}
	s := &shell{o: o, reads: make(chan struct{}, maxReads), writes: make(chan struct{}, maxWrites)}
	s.snippets.shell = s
	return s
}

// Calls implements Transport: it returns the number of programs that were run.
func (s *shell) Calls() int64 { return s.calls.Load() }

// Root implements Transport.
func (s *shell) Root() Root { return s }

// Close implements Transport. Running programs continue.
func (s *shell) Close() error { return nil }

var pveshVerb = map[Method]string{Get: "get", Post: "create", Put: "set", Delete: "delete"}

// Call implements Transport.
func (s *shell) Call(ctx context.Context, m Method, path string, params url.Values) (json.RawMessage, error) {
	verb, ok := pveshVerb[m]
	if !ok {
		return nil, agentlab.Errorf(agentlab.CodeInternal, "%q is not a method of the API", m)
	}
	plain, err := plainPath(path)
	if err != nil {
		return nil, err
	}
	args := []string{verb, plain}
	for _, key := range slices.Sorted(maps.Keys(params)) {
		for _, v := range params[key] {
			if strings.ContainsRune(v, 0) {
				return nil, agentlab.Errorf(agentlab.CodeInvalid, "a value must not contain a NUL byte").WithField(key)
			}
			args = append(args, "--"+key, v)
		}
	}
	args = append(args, "--output-format", "json")
	release, err := s.acquireSlot(ctx, m, path)
	if err != nil {
		return nil, err
	}
	out, diag, err := s.run(ctx, m == Get, release, "pvesh", args...)
	if err != nil {
		return nil, err
	}
	data := lastLine(out)
	if m != Get {
		if upid := relayed.FindSubmatch(data); upid != nil {
			data = append(append([]byte{'"'}, upid[1]...), '"')
		} else if len(diag) == 0 {
			s.ended.note(data, out)
		}
	}
	if json.Valid(data) {
		return data, nil
	}
	if m == Get {
		return nil, agentlab.Errorf(agentlab.CodeInternal, "the output of pvesh is not JSON: %q", agentlab.OneLine(string(data), 200))
	}
	return json.RawMessage("null"), nil // a call without a result prints only log lines
}

// relayed matches the output of pvesh for a task on another node: pvesh runs
// pvesh there by ssh, and prints the log and the UPID, without newlines, as
// one JSON string.
var relayed = regexp.MustCompile(`\\"(UPID:[^\\"\s]+:)\\"(?:\\n)*"$`)

// pathSegment matches valid path segments. For a call to another node pvesh
// inserts the path unquoted into a shell command.
var pathSegment = regexp.MustCompile(`^[A-Za-z0-9._:@!+=,~-]*$`)

// plainPath decodes the escapes of a path, because pvesh does not. It rejects
// segments that would change the path.
func plainPath(path string) (string, error) {
	segments := strings.Split(path, "/")
	for i, seg := range segments {
		p, err := url.PathUnescape(seg)
		if err != nil || !pathSegment.MatchString(p) || p == ".." || p == "." {
			return "", agentlab.Errorf(agentlab.CodeInvalid, "%q is not allowed in the path of an API call", agentlab.OneLine(seg, 80))
		}
		segments[i] = p
	}
	return strings.Join(segments, "/"), nil
}

// acquireSlot waits until another program may run, and returns a function that
// releases the slot.
func (s *shell) acquireSlot(ctx context.Context, m Method, path string) (func(), error) {
	slots := s.writes
	if m == Get {
		slots = s.reads
	} else if strings.HasSuffix(path, "/status/stop") {
		return func() {}, nil
	}
	select {
	case slots <- struct{}{}:
		return func() { <-slots }, nil
	case <-ctx.Done():
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "too many calls of pvesh are running: %w", context.Cause(ctx))
	}
}

// run runs a program of Proxmox to its end and returns what it printed. With
// read it is killed when ctx ends, otherwise it continues. release is called
// after the program has ended. diag is what a program that succeeded printed as
// errors.
func (s *shell) run(ctx context.Context, read bool, release func(), name string, args ...string) (out, diag []byte, err error) {
	if ctx.Err() != nil {
		release()
		return nil, nil, agentlab.Errorf(agentlab.CodeUnavailable, "%s was not run: %w", name, context.Cause(ctx))
	}
	if read {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, s.o.ReadTimeout)
		defer cancel()
	}
	stdout, stderr, err := outputFiles()
	if err != nil {
		release()
		return nil, nil, err
	}
	argv := s.command(name, args)
	cmd := exec.Command(argv[0], argv[1:]...) //nolint:noctx // a program of the node; a context would kill it, see the type
	cmd.Stdout, cmd.Stderr = stdout, stderr
	cmd.Dir = "/"
	cmd.Env = slices.Clone(programEnv)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Credential: rootCredential(os.Geteuid(), os.Getegid())}
	s.calls.Add(1)
	if err := cmd.Start(); err != nil {
		release()
		_, _ = stdout.Close(), stderr.Close()
		return nil, nil, agentlab.Errorf(agentlab.CodeUnavailable, "cannot run %s: %w", name, err).WithHint("proxmox.transport: shell works only on a node of Proxmox VE; on other machines use proxmox.transport: rest")
	}
	type end struct {
		out, diag []byte
		err       error
	}
	ended := make(chan end, 1)
	go func() {
		defer release()
		defer func() { _, _ = stdout.Close(), stderr.Close() }()
		err := cmd.Wait()
		out, oerr := output(stdout)
		diag, derr := output(stderr)
		if oerr = errors.Join(oerr, derr); err != nil || oerr != nil {
			err = programError(name, read, err, oerr, diag)
		}
		ended <- end{out, diag, err}
	}()
	select {
	case e := <-ended:
		return e.out, e.diag, e.err
	case <-ctx.Done():
		if !read {
			return nil, nil, agentlab.Errorf(agentlab.CodeUnknownOutcome, "stopped waiting for %s: %w", name, context.Cause(ctx)).WithHint("the command continues to run; check its result before trying again")
		}
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		return nil, nil, agentlab.Errorf(agentlab.CodeUnavailable, "%s did not end in time: %w", name, context.Cause(ctx))
	}
}

// programError returns the error of a failed program. The value of a non-zero exit
// code has no meaning.
func programError(name string, read bool, err, readErr error, diag []byte) error {
	lost := agentlab.CodeUnknownOutcome
	if read {
		lost = agentlab.CodeUnavailable
	}
	if err == nil {
		return agentlab.Errorf(lost, "cannot read the output of %s: %w", name, readErr)
	}
	exit, ok := errors.AsType[*exec.ExitError](err)
	if !ok || !exit.Exited() {
		return agentlab.Errorf(lost, "%s was killed: %w", name, err)
	}
	if f := parseDiagnosis(string(diag)); f != nil {
		return f
	}
	return agentlab.Errorf(lost, "%s failed without an error message", name)
}

// programEnv is the environment of Proxmox's programs.
var programEnv = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LC_ALL=C.UTF-8"}

// command returns the complete command line of a program. With systemd-run,
// process 1 would expand variables in it, which a doubled "$" prevents.
func (s *shell) command(name string, args []string) []string {
	line := append([]string{s.program(name)}, args...)
	if len(s.o.Prefix) > 0 && filepath.Base(s.o.Prefix[0]) == "systemd-run" {
		for i, a := range line {
			line[i] = strings.ReplaceAll(a, "$", "$$")
		}
	}
	return append(slices.Clone(s.o.Prefix), line...)
}

// program returns the path of a program of Proxmox.
func (s *shell) program(name string) string {
	if s.o.Bin != "" {
		return filepath.Join(s.o.Bin, name)
	}
	path := filepath.Join("/usr/bin", name)
	if _, err := os.Stat(path); err != nil {
		return name // exec finds it or returns an error
	}
	return path
}

// rootCredential returns the identity with which programs run. The cluster file
// system of a node accepts root only with root's group, and the daemon may
// have another group. nil means the identity of this process.
func rootCredential(uid, gid int) *syscall.Credential {
	if uid != 0 || gid == 0 {
		return nil
	}
	return &syscall.Credential{Uid: 0, Gid: 0}
}

// outputFiles creates two files for the output of a program. They have no
// name, and are deleted when the last process closes them.
func outputFiles() (stdout, stderr *os.File, err error) {
	files := make([]*os.File, 2)
	for i := range files {
		f, ferr := os.CreateTemp("", "agentlab-pvesh-*")
		if ferr == nil {
			ferr = os.Remove(f.Name())
		}
		if ferr != nil {
			if files[0] != nil {
				_ = files[0].Close()
			}
			return nil, nil, agentlab.Errorf(agentlab.CodeUnavailable, "cannot create a file for the output of pvesh: %w", ferr)
		}
		files[i] = f
	}
	return files[0], files[1], nil
}

func output(f *os.File) ([]byte, error) {
	b, err := io.ReadAll(io.NewSectionReader(f, 0, maxAnswer+1))
	if err == nil && len(b) > maxAnswer {
		err = errors.New("the output is too long")
	}
	return b, err
}

// lastLine returns the last line of pvesh's output, which is the result: the
// lines before it are the log of the task.
func lastLine(out []byte) []byte {
	out = bytes.TrimRight(out, "\n")
	return bytes.TrimSpace(out[bytes.LastIndexByte(out, '\n')+1:])
}

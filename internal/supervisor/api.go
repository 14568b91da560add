package supervisor

import (
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/control"
	"github.com/agentlab-vm/agentlab/internal/stream"
)

// The supervisor's API: HTTP on shim.sock, whose permissions are its access control.
const (
	pathStatus   = "/v1/status"   // GET ?wait=1 → status; with wait: once the start has ended; with wait=identity: once the guest has its identity
	pathStop     = "/v1/stop"     // POST ?grace=DURATION → status, when the VM has ended
	pathControl  = "/v1/control"  // POST Upgrade: streamUpgrade → a stream to the guest control server
	pathNetwork  = "/v1/network"  // PUT agentlab.Network → status, once it is stored and enforced
	pathDeadline = "/v1/deadline" // PUT backend.Deadline → status
	pathSuspend  = "/v1/suspend"  // POST → status, once the guest's CPUs are stopped
	pathResume   = "/v1/resume"   // POST → status, once they run, or only the host keeps them paused
	pathSave     = "/v1/save"     // POST SaveTo → status, once the guest is saved; and has ended, if it does not continue
	pathVolume   = "/v1/volume"   // POST VolumeTo → status, once the VM has the volume, or it is saved
	pathEgress   = "/v1/egress"   // POST agentlab.EgressRecord → status, once it is in the egress log
	pathDial     = "/v1/dial"     // POST ?port=N Upgrade: streamUpgrade → a TCP stream to the guest

	streamUpgrade = "agentlab-tcp"

	waitStarted  = "1"
	waitIdentity = "identity"
)

// status is the state of a supervisor's VM.
type status struct {
	State  runState `json:"state"`
	Paused string   `json:"paused,omitempty"` // why the guest's CPUs are stopped
}

// apiError is the body of an error response.
type apiError struct {
	Code    agentlab.Code `json:"code"`
	Message string        `json:"message"`
	Hint    string        `json:"hint,omitempty"`
}

func (s *supervisor) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+pathStatus, s.serveStatus)
	mux.HandleFunc("POST "+pathStop, s.serveStop)
	mux.HandleFunc("PUT "+pathNetwork, s.serveNetwork)
	mux.HandleFunc("PUT "+pathDeadline, s.serveDeadline)
	mux.HandleFunc("POST "+pathEgress, s.serveEgress)
	mux.HandleFunc("POST "+pathSave, s.serveSave)
	mux.HandleFunc("POST "+pathVolume, s.serveVolume)
	mux.HandleFunc("POST "+pathSuspend, s.serveSuspend(true))
	mux.HandleFunc("POST "+pathResume, s.serveSuspend(false))
	mux.HandleFunc("POST "+pathControl, func(w http.ResponseWriter, r *http.Request) {
		s.serveStream(w, r, s.dialControl)
	})
	mux.HandleFunc("POST "+pathDial, func(w http.ResponseWriter, r *http.Request) {
		port, err := strconv.ParseUint(r.URL.Query().Get("port"), 10, 16)
		if err != nil || port == 0 {
			writeFault(w, agentlab.Errorf(agentlab.CodeInvalid, "port is not between 1 and 65535"))
			return
		}
		s.serveStream(w, r, func(ctx context.Context) (net.Conn, error) { return s.dialPort(ctx, uint16(port)) })
	})
	return mux
}

func (s *supervisor) serveStatus(w http.ResponseWriter, r *http.Request) {
	wait := r.URL.Query().Get("wait")
	if wait != "" {
		_ = s.await(r.Context(), runState.started)
	}
	if wait == waitIdentity && s.identity != nil {
		select {
		case <-s.identity.confirmed():
		case <-s.vm.Done():
		case <-r.Context().Done():
		}
	}
	writeJSONBody(w, http.StatusOK, s.status())
}

func (s *supervisor) status() status {
	s.mu.Lock()
	defer s.mu.Unlock()
	return status{State: s.state, Paused: s.paused}
}

// await waits until want accepts the state.
func (s *supervisor) await(ctx context.Context, want func(runState) bool) error {
	for {
		s.mu.Lock()
		st, changed := s.state, s.changed
		s.mu.Unlock()
		if want(st) {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func (s *supervisor) serveStop(w http.ResponseWriter, r *http.Request) {
	grace, err := time.ParseDuration(r.URL.Query().Get("grace"))
	if err != nil || grace < 0 {
		writeFault(w, agentlab.Errorf(agentlab.CodeInvalid, "grace is not a duration"))
		return
	}
	if err := s.await(r.Context(), runState.started); err != nil {
		return
	}
	s.stop(grace, "")
	if s.await(r.Context(), runState.ended) == nil {
		writeJSONBody(w, http.StatusOK, s.status())
	}
}

// stop starts to stop the VM, or shortens the grace of a stop that has started.
// why is "" for a request of the driver. A suspended guest cannot be asked.
func (s *supervisor) stop(grace time.Duration, why string) {
	s.mu.Lock()
	if s.state.Suspended {
		grace = 0
	}
	cutAt := time.Now().Add(grace)
	begun := !s.cutAt.IsZero()
	if !begun || cutAt.Before(s.cutAt) {
		s.cutAt = cutAt
	}
	over := s.state.Phase != phaseRunning && !begun
	s.mu.Unlock()
	if over {
		return
	}
	if begun {
		select {
		case s.stopSooner <- struct{}{}:
		default:
		}
		return
	}
	if err := s.setPhase(phaseStopping, why); err != nil {
		s.log.Error("stopping", "err", err) // the VM is stopped anyway
	}
	s.log.Info("stopping", "grace", grace.String())
	go s.powerOff(grace > 0)
}

// powerOff asks the guest to power off. When the grace has passed it ends the
// VM, and kills it if that fails.
func (s *supervisor) powerOff(ask bool) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	if ask {
		go s.askGuest(ctx)
	}
	for {
		s.mu.Lock()
		left := time.Until(s.cutAt)
		s.mu.Unlock()
		if left <= 0 {
			break
		}
		select {
		case <-s.vm.Done():
			return
		case <-s.stopSooner:
		case <-time.After(left):
		}
	}
	qctx, qcancel := context.WithTimeout(ctx, 2*time.Second)
	defer qcancel()
	if err := s.vm.Quit(qctx); err == nil {
		select {
		case <-s.vm.Done():
			return
		case <-qctx.Done():
		}
	}
	s.vm.Kill()
}

// askGuest asks agent-runner to power off. If that fails it presses the power
// button, to which the distribution's init may react.
func (s *supervisor) askGuest(ctx context.Context) {
	err := s.askRunner(ctx)
	if err == nil {
		return
	}
	s.log.Info("agent-runner did not accept the request to power off", "err", err)
	if err := s.vm.PowerButton(ctx); err != nil {
		s.log.Warn("power button", "err", err)
	}
}

func (s *supervisor) askRunner(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	return control.New(s.dialLink).Power(ctx, "poweroff")
}

func (s *supervisor) dialControl(ctx context.Context) (net.Conn, error) {
	if err := s.running(); err != nil {
		return nil, err
	}
	if s.link != nil {
		wctx, cancel := context.WithTimeout(ctx, linkPatience)
		defer cancel()
		if err := s.link.WaitUp(wctx); err != nil { // a guest that starts
			return nil, err
		}
	}
	guest, err := s.dialLink(ctx)
	if err == nil && s.identity != nil {
		guest = s.identity.watch(guest)
	}
	return guest, err
}

// linkPatience limits how long a request waits for a guest that does not answer
// yet. Its client then looks whether the VM still runs.
const linkPatience = time.Second

func (s *supervisor) dialLink(ctx context.Context) (net.Conn, error) {
	if s.link == nil {
		return nil, agentlab.Errorf(agentlab.CodeUnsupported, "the VM has no control port")
	}
	return s.link.Dial(ctx)
}

func (s *supervisor) dialPort(ctx context.Context, port uint16) (net.Conn, error) {
	if err := s.running(); err != nil {
		return nil, err
	}
	if s.net == nil {
		return nil, agentlab.Errorf(agentlab.CodeUnsupported, "the supervisor does not manage the VM's network")
	}
	ctx, cancel := context.WithTimeout(ctx, dialPatience)
	defer cancel()
	return s.net.DialGuest(ctx, port)
}

// dialPatience limits a connection to a guest whose network may be down.
const dialPatience = 20 * time.Second

func (s *supervisor) running() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p := s.state.Phase; p != phaseRunning && p != phaseStopping {
		return agentlab.Errorf(agentlab.CodeUnavailable, "the sandbox is %s", p)
	}
	if s.state.Suspended {
		return agentlab.Errorf(agentlab.CodeUnavailable, "the sandbox is suspended")
	}
	return nil
}

// serveStream dials and then turns the HTTP connection into the stream.
func (s *supervisor) serveStream(w http.ResponseWriter, r *http.Request, dial func(context.Context) (net.Conn, error)) {
	if r.Header.Get("Upgrade") != streamUpgrade {
		writeFault(w, agentlab.Errorf(agentlab.CodeInvalid, "this needs Upgrade: %s", streamUpgrade))
		return
	}
	guest, err := dial(r.Context())
	if err != nil {
		writeFault(w, err)
		return
	}
	host, rw, err := http.NewResponseController(w).Hijack()
	if err != nil {
		_ = guest.Close()
		writeFault(w, agentlab.Errorf(agentlab.CodeInternal, "no stream: %w", err))
		return
	}
	_ = host.SetDeadline(time.Time{})
	if _, err := io.WriteString(host, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: "+streamUpgrade+"\r\n\r\n"); err != nil {
		_ = guest.Close()
		_ = host.Close()
		return
	}
	stream.Splice(stream.Unread(host, rw.Reader), guest)
}

func writeFault(w http.ResponseWriter, err error) {
	code := agentlab.CodeOf(err)
	status := http.StatusInternalServerError
	if code == agentlab.CodeInvalid {
		status = http.StatusBadRequest
	}
	writeJSONBody(w, status, apiError{Code: code, Message: err.Error(), Hint: agentlab.HintOf(err)})
}

func writeJSONBody(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v)
}

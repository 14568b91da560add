//go:build linux

package guestd

import (
	"cmp"
	"context"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
)

const (
	statusFresh   = 2 * time.Second
	statusSettled = time.Minute // of a system that has booted
	statusTimeout = 10 * time.Second
	// powerWait is how long the distribution's init may take to stop the
	// machine.
	powerWait = 90 * time.Second
)

// systemState caches the state of systemd: a query needs a process, and health
// must answer at once.
type systemState struct {
	mu     sync.Mutex
	status string
	at     time.Time
	asking bool
}

// fresh returns how long the status is valid.
func (st *systemState) fresh() time.Duration {
	if st.status == "running" || st.status == "degraded" {
		return statusSettled
	}
	return statusFresh
}

// systemdWanted reports whether the distribution's init is systemd.
func (s *Server) systemdWanted() bool {
	to, err := os.Readlink(s.path("/sbin/init"))
	return err == nil && strings.HasSuffix(to, "systemd")
}

// systemdRuns reports whether systemd accepts connections of systemctl.
func (s *Server) systemdRuns() bool {
	_, err := os.Stat(s.path("/run/systemd/private"))
	return err == nil
}

func (s *Server) systemctl(ctx context.Context, args ...string) error {
	return exec.CommandContext(ctx, "systemctl", args...).Run() //nolint:gosec // our own arguments
}

// systemStatus returns the last known state and updates it in the background
// if it is old.
func (s *Server) systemStatus() string {
	st := &s.system
	st.mu.Lock()
	defer st.mu.Unlock()
	switch {
	case !s.systemdRuns():
		st.status = "unknown"
		if s.systemdWanted() {
			st.status = "starting"
		}
	case !st.asking && time.Since(st.at) > st.fresh():
		st.asking = true
		s.wg.Go(s.askSystemd)
	}
	return st.status
}

func (s *Server) askSystemd() {
	ctx, cancel := context.WithTimeout(s.ctx, statusTimeout)
	defer cancel()
	out, _ := exec.CommandContext(ctx, "systemctl", "is-system-running").Output() // exits 1 unless "running"
	status := strings.TrimSpace(string(out))
	s.system.mu.Lock()
	defer s.system.mu.Unlock()
	switch status {
	case "running", "degraded":
	case "initializing", "starting":
		status = "starting"
	case "", "unknown", "offline": // systemd did not answer, as on a busy host: nothing shows that it has booted
		status = cmp.Or(s.system.status, "starting")
	default:
		status = "unknown"
	}
	s.system.status, s.system.at, s.system.asking = status, time.Now(), false
}

func (s *Server) handlePower(w http.ResponseWriter, r *http.Request) {
	var req guestapi.PowerRequest
	if !decode(w, r, &req) {
		return
	}
	if req.Action != "poweroff" && req.Action != "reboot" {
		fail(w, agentlab.Errorf(agentlab.CodeInvalid, "unknown action %q", req.Action).WithField("action"))
		return
	}
	reply(w, struct{}{})
	_ = http.NewResponseController(w).Flush()
	s.wg.Go(func() { s.power(req.Action) })
}

// power shuts the machine down or, if that is not possible or takes too long,
// stops it at once.
func (s *Server) power(action string) {
	s.keepNow()
	if s.systemdRuns() && s.systemctl(s.ctx, "--no-block", action) == nil {
		select {
		case <-time.After(powerWait):
		case <-s.ctx.Done():
			return
		}
	}
	if err := s.cfg.Kernel.Reboot(action); err != nil {
		s.log.Error("the machine does not stop", "action", action, "err", err)
	}
}

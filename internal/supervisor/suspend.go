package supervisor

import (
	"context"
	"errors"
	"net/http"
	"path/filepath"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/durable"
)

// A guest's CPUs run unless its user has suspended it, or the host's disk is
// nearly full (space.go). The two are independent: a guest that was suspended
// while the disk was full continues when both have ended.

// serveSuspend returns the handler that suspends or resumes the guest.
func (s *supervisor) serveSuspend(want bool) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if err := s.await(r.Context(), runState.started); err != nil {
			return
		}
		if err := s.suspend(r.Context(), want); err != nil {
			s.log.Error("the guest's CPUs were not switched", "suspend", want, "err", err)
			writeFault(w, err)
			return
		}
		writeJSONBody(w, http.StatusOK, s.status())
	}
}

// suspend stops the guest's CPUs until the next call with false. A suspension
// that cannot be stored does not take place.
func (s *supervisor) suspend(ctx context.Context, want bool) error {
	s.cpuMu.Lock()
	defer s.cpuMu.Unlock()
	s.mu.Lock()
	st, paused := s.state, s.paused
	s.mu.Unlock()
	if st.Phase != phaseRunning {
		return agentlab.Errorf(agentlab.CodeConflict, "the sandbox is %s", st.Phase)
	}
	if want {
		if err := s.noteSuspended(true); err != nil {
			return err
		}
		if err := s.vm.Pause(ctx); err != nil {
			return agentlab.Errorf(agentlab.CodeInternal, "pausing the guest: %w", errors.Join(err, s.noteSuspended(false)))
		}
		return nil
	}
	if paused == "" {
		if err := s.vm.Continue(ctx); err != nil {
			return agentlab.Errorf(agentlab.CodeInternal, "continuing the guest: %w", err)
		}
	}
	return s.noteSuspended(false)
}

// noteSuspended stores in state.json whether the guest is suspended.
func (s *supervisor) noteSuspended(now bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.state.Suspended == now || s.state.Phase != phaseRunning {
		return nil
	}
	st := s.state
	st.Suspended, st.Changed = now, time.Now().UTC()
	if err := durable.ReplaceJSON(filepath.Join(s.dir, fileState), st, durable.None); err != nil {
		return fault(err, "cannot write %s", fileState)
	}
	s.state = st
	return nil
}

// Suspend implements backend.Power.Suspend.
func (d Dir) Suspend(ctx context.Context) error { return d.switchCPUs(ctx, pathSuspend) }

// Resume implements backend.Power.Resume.
func (d Dir) Resume(ctx context.Context) error { return d.switchCPUs(ctx, pathResume) }

func (d Dir) switchCPUs(ctx context.Context, path string) error {
	return d.change(ctx, "power state", func() error {
		return agentlab.Errorf(agentlab.CodeConflict, "sandbox %d does not run", d.VMID).WithHint("start it with 'agentlab sandbox start %d'", d.VMID)
	}, func(ctx context.Context, c client) error {
		_, err := c.call(ctx, http.MethodPost, path, nil)
		return err
	})
}

package supervisor

import (
	"context"
	"encoding/json"
	"net/http"
	"path/filepath"

	"github.com/agentlab-vm/agentlab"
)

// Saver is implemented by VMs whose memory can be saved.
type Saver interface {
	// Save writes the memory and the devices of a guest to a directory, together
	// with its disk at that time if the directory is not the VM's own. After an
	// error the guest runs as before.
	Save(ctx context.Context, to SaveTo) error
}

// Continuer is implemented by VMs that can continue from a saved memory.
type Continuer interface {
	// Continued is called when the guest has the identity of Start.Identity.
	Continued() error
}

// SaveTo says what is saved and what happens then.
type SaveTo struct {
	Dir string `json:"dir"` // absolute path; it exists
	// Continue means that the guest continues. Otherwise the caller ends the VM,
	// whose CPUs are stopped.
	Continue bool `json:"continue"`
	// Running means that the guest's CPUs run now: it is not suspended.
	Running bool `json:"-"`
	// Durable means that the files are synced to disk.
	Durable bool `json:"durable"`
}

// serveSave saves the guest. With Continue false it ends the VM.
func (s *supervisor) serveSave(w http.ResponseWriter, r *http.Request) {
	var to SaveTo
	err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxSave)).Decode(&to)
	if err != nil || !filepath.IsAbs(to.Dir) {
		writeFault(w, agentlab.Errorf(agentlab.CodeInvalid, "invalid request to save the guest (%v)", err))
		return
	}
	if err := s.await(r.Context(), runState.started); err != nil {
		return
	}
	if err := s.save(r.Context(), to); err != nil {
		s.log.Error("the guest was not saved", "dir", to.Dir, "err", err)
		writeFault(w, err)
		return
	}
	s.log.Info("the guest was saved", "dir", to.Dir, "continues", to.Continue)
	if !to.Continue && s.await(r.Context(), runState.ended) != nil {
		return
	}
	writeJSONBody(w, http.StatusOK, s.status())
}

// maxSave is the maximum size of a request to save the guest, in bytes.
const maxSave = 16 << 10

func (s *supervisor) save(ctx context.Context, to SaveTo) error {
	saver, ok := s.vm.(Saver)
	if !ok {
		return agentlab.Errorf(agentlab.CodeUnsupported, "this VM cannot be saved")
	}
	s.cpuMu.Lock()
	defer s.cpuMu.Unlock()
	s.mu.Lock()
	st, paused := s.state, s.paused
	s.mu.Unlock()
	if st.Phase != phaseRunning {
		return agentlab.Errorf(agentlab.CodeConflict, "the sandbox is %s", st.Phase)
	}
	to.Running = !st.Suspended && paused == ""
	if err := saver.Save(ctx, to); err != nil {
		return err
	}
	if !to.Continue {
		s.stop(0, "")
	}
	return nil
}

// Save saves the guest, which runs or is suspended. If it does not continue, its
// VM and its supervisor have ended when Save returns.
func (d Dir) Save(ctx context.Context, to SaveTo) error {
	err := poll(ctx, func() (bool, error) {
		held, err := lockHeld(d.file(fileLock))
		if err != nil {
			return true, fault(err, "cannot check the supervisor's lock")
		}
		if !held {
			return true, agentlab.Errorf(agentlab.CodeConflict, "sandbox %d does not run", d.VMID)
		}
		_, err = client(d.Path).status(ctx, waitStarted)
		return err == nil, nil // it may be about to open its socket, or about to end
	})
	if ctx.Err() != nil {
		return agentlab.Errorf(agentlab.CodeUnavailable, "saving sandbox %d: %w", d.VMID, context.Cause(ctx))
	}
	if err != nil {
		return err
	}
	_, err = client(d.Path).call(ctx, http.MethodPost, pathSave, to)
	if err == nil && !to.Continue {
		if err = waitFree(ctx, d.file(fileLock)); err != nil {
			err = agentlab.Errorf(agentlab.CodeUnavailable, "waiting for the end of the VM: %w", err)
		}
	}
	return err
}

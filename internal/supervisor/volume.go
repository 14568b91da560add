package supervisor

import (
	"context"
	"encoding/json"
	"net/http"
	"path/filepath"

	"github.com/agentlab-vm/agentlab"
)

// VolumeHolder is implemented by VMs to which a volume can be attached.
type VolumeHolder interface {
	// SetVolume makes the volume in a directory the one of the guest; "" takes it
	// away. If nothing has to be done it succeeds.
	SetVolume(ctx context.Context, dir string) error
	// SaveVolume saves the volume of the guest, which is in a directory, in another
	// one. The guest continues to use the volume.
	SaveVolume(ctx context.Context, dir, to string) error
}

// VolumeTo says what is done with the volume in Dir. With Save it is saved there,
// otherwise it becomes the volume of the guest. All are absolute paths; Dir is "" if
// the guest gets no volume.
type VolumeTo struct {
	Dir  string `json:"dir"`
	Save string `json:"save,omitempty"`
}

// serveVolume attaches, detaches or saves the volume of the VM.
func (s *supervisor) serveVolume(w http.ResponseWriter, r *http.Request) {
	var to VolumeTo
	err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxSave)).Decode(&to)
	if err != nil || to.Dir != "" && !filepath.IsAbs(to.Dir) || to.Save != "" && (!filepath.IsAbs(to.Save) || to.Dir == "") {
		writeFault(w, agentlab.Errorf(agentlab.CodeInvalid, "invalid request for a volume (%v)", err))
		return
	}
	if err := s.await(r.Context(), runState.started); err != nil {
		return
	}
	if err := s.setVolume(r.Context(), to); err != nil {
		s.log.Error("the volume", "dir", to.Dir, "save", to.Save, "err", err)
		writeFault(w, err)
		return
	}
	s.log.Info("the volume", "dir", to.Dir, "save", to.Save)
	writeJSONBody(w, http.StatusOK, s.status())
}

func (s *supervisor) setVolume(ctx context.Context, to VolumeTo) error {
	vm, ok := s.vm.(VolumeHolder)
	if !ok {
		return agentlab.Errorf(agentlab.CodeUnsupported, "this VM has no volumes")
	}
	s.cpuMu.Lock() // the guest is not saved, and stays as it is
	defer s.cpuMu.Unlock()
	s.mu.Lock()
	st := s.state
	s.mu.Unlock()
	switch {
	case st.Phase != phaseRunning: // the caller tries again until the VM has ended
		return agentlab.Errorf(agentlab.CodeUnavailable, "the sandbox is %s", st.Phase)
	case to.Save != "":
		return vm.SaveVolume(ctx, to.Dir, to.Save)
	case st.Suspended:
		return agentlab.Errorf(agentlab.CodeConflict, "the sandbox is suspended").WithHint("resume or stop the sandbox first")
	}
	return vm.SetVolume(ctx, to.Dir)
}

// Volume attaches, detaches or saves the volume of the VM. If there is no VM it calls
// stopped; none is started until that returns.
func (d Dir) Volume(ctx context.Context, to VolumeTo, stopped func() error) error {
	return d.change(ctx, "volume", stopped, func(ctx context.Context, c client) error {
		_, err := c.call(ctx, http.MethodPost, pathVolume, to)
		return err
	})
}

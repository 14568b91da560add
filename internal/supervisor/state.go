package supervisor

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/egress/gate"
	"github.com/agentlab-vm/agentlab/internal/fsfault"
)

// startVersion is the version of the format of start.json.
const startVersion = 1

// Start is the part of start.json that is the same for every driver. Dir.Start
// sets Version and RunID.
type Start struct {
	Version int    `json:"version"`
	RunID   string `json:"run_id"` // of this start; state.json repeats it
	// Backend is the name of the driver whose VM runs. It is "" in files of
	// older versions of AgentLab.
	Backend string `json:"backend,omitempty"`
	// PauseBelow is the free space on the host's disk, in bytes, below which a
	// guest that writes is paused; below half of it every guest is paused. 0
	// means that the supervisor pauses no guest.
	PauseBelow uint64   `json:"pause_below,omitempty"`
	Reserved   []uint16 `json:"reserved,omitempty"` // ports of the host that no policy can allow
	// Identity is set for a guest that continues from a saved memory: its network
	// drops all frames until it has this identity (guestapi.Health.Identity).
	// Until then its random values may be those of another guest.
	Identity string `json:"identity,omitempty"`
	// Own means that the memory is the sandbox's own, and that only one guest
	// continues from it, once: the guest has the identity.
	Own bool `json:"own,omitempty"`
	// Detached means that the end of the context of Dir.Start does not end the
	// start, because the guest's saved memory would be lost. The next Dir.Start
	// waits for it.
	Detached bool `json:"-"`
	// UpstreamProxy is the proxy that the guest's connections use; nil means
	// that they are dialled directly.
	UpstreamProxy *gate.ProxyConfig `json:"upstream_proxy,omitempty"`
}

// Config is the content of start.json: a pointer to a struct that embeds Start
// and has the settings of the driver's VM. The driver examines the host, so that
// the supervisor does not need to.
type Config interface{ common() *Start }

func (s *Start) common() *Start { return s }

// ReadStart reads start.json of the VM in dir.
func ReadStart(dir string, c Config) error {
	if err := durable.ReadJSON(filepath.Join(dir, fileStart), c); err != nil {
		return fault(err, "cannot read %s", fileStart)
	}
	if v := c.common().Version; v != startVersion {
		return agentlab.Errorf(agentlab.CodeUnsupported, "%s has format %d", fileStart, v)
	}
	return nil
}

// Phases of a run.
const (
	phaseStarting = "starting"
	phaseRunning  = "running"
	phaseStopping = "stopping"
	phaseStopped  = "stopped"  // as asked, or by the guest
	phaseRebooted = "rebooted" // by the guest
	phaseCrashed  = "crashed"  // without a request; Reason has the cause
)

// runState is state.json.
type runState struct {
	RunID   string `json:"run_id"`
	Phase   string `json:"phase"`
	Reason  string `json:"reason,omitempty"`
	Expired bool   `json:"expired,omitempty"` // stopped, or being stopped, because its deadline passed
	Paused  string `json:"paused,omitempty"`  // why the guest's CPUs are stopped
	// Suspended means that the guest's CPUs are stopped because its user asked
	// for it.
	Suspended bool      `json:"suspended,omitempty"`
	Boot      string    `json:"boot"` // boot id of the host
	Changed   time.Time `json:"changed"`
}

// started reports whether the start is over, also if it failed.
func (st runState) started() bool { return st.Phase != phaseStarting }

// ended reports whether the VM has ended.
func (st runState) ended() bool {
	return st.Phase == phaseStopped || st.Phase == phaseRebooted || st.Phase == phaseCrashed
}

// hostRestarted is the reason of a run that ended by a restart of the host.
const hostRestarted = "the host was restarted"

// endOf returns the result of a run whose supervisor has ended.
func endOf(st runState) (backend.PowerState, string) {
	switch {
	case st.Phase == "", st.Phase == phaseStopped, st.Expired:
		return backend.PowerStopped, ""
	case st.Phase == phaseCrashed, st.Phase == phaseRebooted:
		return backend.PowerCrashed, st.Reason
	case st.Phase == phaseStopping && st.Reason == "" && st.Boot == BootID(): // the requested stop has happened anyway
		return backend.PowerStopped, ""
	case st.Boot != BootID():
		return backend.PowerCrashed, hostRestarted
	}
	return backend.PowerCrashed, "its supervisor process was killed, and the VM with it"
}

// readState reads state.json; a sandbox that never ran has none of it.
func readState(dir string) (runState, error) {
	var st runState
	path := filepath.Join(dir, fileState)
	if info, err := os.Stat(path); err == nil && info.Size() == 0 {
		return runState{Phase: phaseRunning}, nil // a power cut lost data that was not yet on the disk
	}
	err := durable.ReadJSON(path, &st)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return st, fault(err, "cannot read %s", fileState)
	}
	return st, nil
}

// fault adds the code to an error of the operating system.
func fault(err error, format string, args ...any) *agentlab.Error {
	return fsfault.Own(err, "free disk space, or destroy sandboxes that are no longer needed", format, args...)
}

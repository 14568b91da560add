package qemu

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/egress/gate"
	"github.com/agentlab-vm/agentlab/internal/fsfault"
)

// handleVersion is the format of config.json and start.json. A driver refuses
// a newer one, and reads every older one.
const handleVersion = 1

// handle is config.json: what the sandbox is.
type handle struct {
	Version int          `json:"version"`
	Spec    backend.Spec `json:"spec"`
	Image   ImageFiles   `json:"image"`
	Created time.Time    `json:"created"`
}

// startConfig is start.json: everything that the shim needs to know beyond
// the handle. The driver looks at the host, so that the shim need not.
type startConfig struct {
	Start
	QEMU     string `json:"qemu"`  // absolute path
	Accel    Accel  `json:"accel"` // "kvm" or "tcg"
	TSCKHz   int    `json:"tsc_khz,omitempty"`
	TSCFixed bool   `json:"tsc_fixed,omitempty"` // the host's TSC never changes its rate
	Initrd   string `json:"initrd"`              // absolute path
}

// Start is the part of start.json that the supervisor reads.
type Start struct {
	Version int    `json:"version"`
	RunID   string `json:"run_id"` // of this start; state.json repeats it
	// PauseBelow is the free space on the host's disk, in bytes, below which the
	// guest is paused if it writes, and below half of it anyway; 0 leaves that to QEMU, which does it when none is left.
	PauseBelow uint64   `json:"pause_below,omitempty"`
	Reserved   []uint16 `json:"reserved,omitempty"` // ports of the host that no policy opens
	// UpstreamProxy is what the guest's connections go through; nil means that
	// they are dialled directly.
	UpstreamProxy *gate.ProxyConfig `json:"upstream_proxy,omitempty"`
	DialUnix      string            `json:"dial_unix,omitempty"` // tests: the network behind this socket is the guest's internet
}

// Phases of a run.
const (
	phaseStarting = "starting"
	phaseRunning  = "running"
	phaseStopping = "stopping"
	phaseStopped  = "stopped" // as asked
	phaseCrashed  = "crashed" // not asked; Reason tells why
)

// runState is state.json.
type runState struct {
	RunID   string    `json:"run_id"`
	Phase   string    `json:"phase"`
	Reason  string    `json:"reason,omitempty"`
	Expired bool      `json:"expired,omitempty"` // stopped, or being stopped, because its deadline passed
	Paused  string    `json:"paused,omitempty"`  // why the guest's CPUs are stopped
	Boot    string    `json:"boot"`              // boot id of the host
	Changed time.Time `json:"changed"`
}

// sandboxName is the directory of a sandbox: number and mark.
var sandboxName = regexp.MustCompile(`^([1-9][0-9]{0,9})-([a-z2-9]{26})$`)

func dirName(ref backend.Ref) string { return strconv.Itoa(ref.VMID) + "-" + ref.UID }

func parseDirName(name string) (backend.Ref, bool) {
	m := sandboxName.FindStringSubmatch(name)
	if m == nil {
		return backend.Ref{}, false
	}
	vmid, err := strconv.Atoi(m[1])
	return backend.Ref{VMID: vmid, UID: m[2]}, err == nil
}

// validRef keeps anything but a proper mark from becoming a path.
func validRef(ref backend.Ref) error {
	if _, ok := parseDirName(dirName(ref)); !ok {
		return agentlab.Errorf(agentlab.CodeInvalid, "%d-%q does not name a sandbox", ref.VMID, ref.UID)
	}
	return nil
}

// readHandle reads config.json. Its absence is fs.ErrNotExist.
func readHandle(dir string) (handle, error) {
	var h handle
	if err := readJSON(filepath.Join(dir, fileConfig), &h); err != nil {
		return h, err
	}
	if h.Version < 1 || h.Version > handleVersion {
		return h, agentlab.Errorf(agentlab.CodeUnsupported, "%s has format %d, and this program knows up to %d",
			filepath.Join(dir, fileConfig), h.Version, handleVersion).WithHint("use the newer AgentLab that made it")
	}
	return h, nil
}

func readJSON(path string, v any) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	dec := json.NewDecoder(bytes.NewReader(b))
	if err := dec.Decode(v); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

// writeJSON replaces path in one step and on the disk, so that neither a
// crash nor a power cut leaves half of it.
func writeJSON(path string, v any) error { return durable.ReplaceJSON(path, v, durable.Content) }

// noteJSON replaces path in one step, for what a power cut makes worthless
// anyway. It saves the wait for the disk, on the way of every start.
func noteJSON(path string, v any) error { return durable.ReplaceJSON(path, v, durable.None) }

// fault gives an error of the operating system its code.
func fault(err error, format string, args ...any) *agentlab.Error {
	return fsfault.Own(err, "free disk space, or destroy sandboxes that are no longer needed", format, args...)
}

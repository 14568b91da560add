package qemu

import (
	"path/filepath"
	"regexp"
	"strconv"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/fsfault"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
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

// startConfig is start.json: what machine needs besides the handle.
type startConfig struct {
	supervisor.Start
	QEMU     string `json:"qemu"`  // absolute path
	Accel    Accel  `json:"accel"` // "kvm" or "tcg"
	TSCKHz   int    `json:"tsc_khz,omitempty"`
	TSCFixed bool   `json:"tsc_fixed,omitempty"` // the host's TSC never changes its rate
	Initrd   string `json:"initrd"`              // absolute path
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
	if err := durable.ReadJSON(filepath.Join(dir, fileConfig), &h); err != nil {
		return h, err
	}
	if h.Version < 1 || h.Version > handleVersion {
		return h, agentlab.Errorf(agentlab.CodeUnsupported, "%s has format %d, and this program knows up to %d",
			filepath.Join(dir, fileConfig), h.Version, handleVersion).WithHint("use the newer AgentLab that made it")
	}
	return h, nil
}

// fault gives an error of the operating system its code.
func fault(err error, format string, args ...any) *agentlab.Error {
	return fsfault.Own(err, "free disk space, or destroy sandboxes that are no longer needed", format, args...)
}

package qemu

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/fsfault"
	"github.com/agentlab-vm/agentlab/internal/lazyre"
	"github.com/agentlab-vm/agentlab/internal/qemuvm"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
)

// handleVersion is the format of config.json. The driver reads every older
// format and rejects a newer one.
const handleVersion = 1

// handle is config.json: the sandbox's specification and image.
type handle struct {
	Version int          `json:"version"`
	Spec    backend.Spec `json:"spec"`
	Image   ImageFiles   `json:"image"`
	Created time.Time    `json:"created"`
}

// startConfig is the content of start.json: what machine needs in addition to
// the handle.
type startConfig struct {
	supervisor.Start
	QEMU    string `json:"qemu"`               // absolute path
	QEMUImg string `json:"qemu_img,omitempty"` // absolute path
	Machine string `json:"machine,omitempty"`  // machineKey
	// Background gives the VM the least of the host's CPU time.
	Background bool         `json:"background,omitempty"`
	Load       bool         `json:"load,omitempty"`   // load the guest's memory from the sandbox's directory; it does not boot
	Accel      qemuvm.Accel `json:"accel"`            // "kvm" or "tcg"
	Nested     bool         `json:"nested,omitempty"` // the CPUs have virtualization
	TSCKHz     int          `json:"tsc_khz,omitempty"`
	TSCFixed   bool         `json:"tsc_fixed,omitempty"` // the host's TSC never changes its rate
	Initrd     string       `json:"initrd"`              // absolute path
}

// sandboxName matches the directory name of a sandbox: number and UID.
var sandboxName = lazyre.New(`^([1-9][0-9]{0,9})-([a-z2-9]{26})$`)

func dirName(vmid int, uid string) string { return strconv.Itoa(vmid) + "-" + uid }

func parseDirName(name string) (vmid int, uid string, ok bool) {
	m := sandboxName.FindStringSubmatch(name)
	if m == nil {
		return 0, "", false
	}
	vmid, err := strconv.Atoi(m[1])
	return vmid, m[2], err == nil
}

// found is a sandbox in the state directory.
type found struct {
	vmid  int // as the directory's name has it
	uid   string
	dir   string // "" means that there is none
	trash string // the rest of an interrupted Destroy; "" means none
	handle
	err error // of reading the handle
}

// find looks for the sandbox with a uid. A directory whose config.json is that
// of another sandbox is skipped.
func (d *Driver) find(uid string) (found, error) {
	if uid == "" {
		return found{}, nil
	}
	all, err := d.findAll(uid)
	if err != nil || len(all) == 0 {
		return found{}, err
	}
	return all[0], nil
}

// findAll returns the sandbox with a uid, or all sandboxes if uid is "". Each has
// a directory, or only its trash.
func (d *Driver) findAll(uid string) ([]found, error) {
	entries, err := os.ReadDir(d.sandboxes())
	if err != nil {
		return nil, fault(err, "cannot read %s", d.sandboxes())
	}
	var all []found
	for _, e := range entries { // trash comes first: its names begin with a dot
		name, trashed := strings.CutPrefix(e.Name(), trashPrefix)
		var f found
		var ok bool
		if f.vmid, f.uid, ok = parseDirName(name); !ok || !e.IsDir() || uid != "" && f.uid != uid {
			continue
		}
		path := filepath.Join(d.sandboxes(), e.Name())
		if trashed {
			f.trash = path
			all = append(all, f)
			continue
		}
		f.dir = path
		if f.handle, f.err = readHandle(path); f.err == nil && dirName(f.Spec.VMID, f.Spec.UID) != name {
			continue
		}
		i := slices.IndexFunc(all, func(o found) bool { return o.uid == f.uid && o.dir == "" })
		if i < 0 {
			all = append(all, f)
			continue
		}
		f.trash = all[i].trash
		all[i] = f
	}
	return all, nil
}

// readHandle reads config.json. If there is none the error is fs.ErrNotExist.
func readHandle(dir string) (handle, error) {
	var h handle
	h.Spec.Resources.Nested = agentlab.NestedAuto // of handles that are older than the setting
	if err := durable.ReadJSON(filepath.Join(dir, fileConfig), &h); err != nil {
		return h, err
	}
	if h.Version < 1 || h.Version > handleVersion {
		return h, agentlab.Errorf(agentlab.CodeUnsupported, "%s has format %d; this program supports formats up to %d",
			filepath.Join(dir, fileConfig), h.Version, handleVersion).WithHint("use the newer version of AgentLab that wrote it")
	}
	return h, nil
}

// fault adds the code to an error of the operating system.
func fault(err error, format string, args ...any) *agentlab.Error {
	return fsfault.Own(err, "free disk space, or destroy sandboxes that are no longer needed", format, args...)
}

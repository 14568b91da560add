package proxmox

import (
	"cmp"
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/fsfault"
	"github.com/agentlab-vm/agentlab/internal/hostnet"
	"github.com/agentlab-vm/agentlab/internal/lazyre"
)

// handleVersion is the newest version of the handle format. A driver rejects
// newer versions and reads all older ones. In version 1 the VM has the number
// of its sandbox; in version 2 it may have another one. Version 3 has the
// interrupted restore of a snapshot, and the unfinished creation from one. The
// version is the lowest that describes the sandbox, so that an older driver reads
// all that it understands.
const handleVersion = 3

// phase is the phase of the creation or destruction of a sandbox.
type phase string

const (
	phaseCloning    phase = "cloning"    // the VM may or may not exist
	phaseSetting    phase = "setting"    // cloned; its inherited options are being replaced
	phaseCreated    phase = "created"    // complete
	phaseDestroying phase = "destroying" // being destroyed
)

// power is the requested power state of a VM, which is compared with the
// actual one.
type power string

const (
	powerOff       power = "off"
	powerStarting  power = "starting" // a start was sent; it may not have arrived
	powerOn        power = "on"       // it was running
	powerStopping  power = "stopping" // a stop was sent; it may not have arrived
	powerSuspended power = "suspended"
)

// vmID identifies a virtual machine by its number and the UID of its sandbox.
type vmID = hostnet.ID

// handle is the stored state of a sandbox, from before its first call until it
// is deleted completely. It is one file, StateDir/<number>-<uid>.json.
type handle struct {
	Version int          `json:"version"`
	Spec    backend.Spec `json:"spec"`
	options options      // of Spec
	VMID    int          `json:"vmid,omitempty"` // of its VM; 0 means that of Spec
	// Network is the policy that UpdateNetwork set; nil means that of Spec.
	Network *agentlab.Network `json:"network,omitempty"`

	Phase    phase     `json:"phase"`
	Made     bool      `json:"made,omitempty"`    // of one that is being destroyed: its VM existed and had the mark
	Adopted  bool      `json:"adopted,omitempty"` // its VM is older than this handle: an earlier handle was lost
	Created  time.Time `json:"created"`
	Node     string    `json:"node"`
	Template int       `json:"template"`
	Source   string    `json:"source"`         // node of the template
	Full     bool      `json:"full,omitempty"` // its disk is a copy
	MAC      string    `json:"mac"`
	Port     string    `json:"port"`
	CPU      string    `json:"cpu,omitempty"`    // type of its CPUs; "" means that of the template
	SMBIOS   string    `json:"smbios,omitempty"` // option smbios1 of its VM, which is unique

	CloneSent   bool      `json:"clone_sent,omitempty"`   // a clone was sent, and its result is not known
	CloneAt     time.Time `json:"clone_at,omitzero"`      // when
	CloneTask   string    `json:"clone_task,omitempty"`   // its UPID, once known
	DestroyTask string    `json:"destroy_task,omitempty"` // UPID of its destruction, once known
	DestroySent bool      `json:"destroy_sent,omitempty"` // the VM was proved to be the sandbox's and is being destroyed

	Snippet       string   `json:"snippet,omitempty"` // file name
	SnippetVolume string   `json:"snippet_volume,omitempty"`
	Volumes       []string `json:"volumes,omitempty"` // IDs of its own volumes in its configuration
	// Storages are the storages of its volumes, if no volume there had its
	// number before its creation: all volumes there with its number are its
	// own.
	Storages []string `json:"storages,omitempty"`

	Power     power     `json:"power,omitempty"`
	PowerFrom time.Time `json:"power_from,omitzero"` // when Power last changed
	Boot      string    `json:"boot,omitempty"`      // boot ID of its node at its last start
	Seeded    bool      `json:"seeded,omitempty"`    // the guest has its ControlConfig
	// ControlUID is the UID of the sandbox whose ControlConfig the guest has: its
	// disk is a copy of that sandbox's. "" is the sandbox itself.
	ControlUID string `json:"control_uid,omitempty"`

	Snapshots []savedSnapshot `json:"snapshots,omitempty"`
	Change    *snapshotChange `json:"snapshot_change,omitempty"` // it was sent, and its result is not known
	Restoring string          `json:"restoring,omitempty"`       // the snapshot to which a rollback began and did not succeed
}

// id returns the ID of the sandbox's VM.
func (h *handle) id() vmID { return vmID{VMID: cmp.Or(h.VMID, h.Spec.VMID), UID: h.Spec.UID} }

// moveTo records that the VM is on a node. Whose volumes another node had
// before is not known.
func (h *handle) moveTo(node string) {
	if node != h.Node {
		h.Node, h.Storages = node, nil
	}
}

// incomplete reports whether a call for the sandbox was interrupted.
func (h *handle) incomplete() bool { return h.Phase != phaseCreated || h.Restoring != "" }

// network returns the current policy.
func (h *handle) network() agentlab.Network {
	if h.Network != nil {
		return *h.Network
	}
	return h.Spec.Network
}

// existed reports whether the VM existed and had the mark.
func (h *handle) existed() bool { return h.Made || h.Phase == phaseSetting || h.Phase == phaseCreated }

// guest returns the sandbox as a guest of its node's network.
func (h *handle) guest(dhcp bool) (hostnet.Guest, error) {
	mac, err := net.ParseMAC(h.MAC)
	if err != nil {
		return hostnet.Guest{}, agentlab.Errorf(agentlab.CodeInternal, "the handle of sandbox %d: %w", h.Spec.VMID, err)
	}
	return hostnet.Guest{
		ID: h.id(), MAC: mac, Port: h.Port, IPv4: h.Spec.IPv4, IPv6: h.Spec.IPv6,
		DHCP: dhcp, Network: h.network(),
	}, nil
}

// handleName matches the file name of a handle: number and UID of its sandbox.
var handleName = lazyre.New(`^[1-9][0-9]{2,8}-([a-z2-9]{26})\.json$`)

// validUID returns an error unless the UID is valid, because it becomes part
// of paths and tags.
func validUID(uid string) error {
	if !uidForm.MatchString(uid) {
		return agentlab.Errorf(agentlab.CodeInvalid, "%q is not a sandbox ID", uid)
	}
	return nil
}

// handleFiles returns the names of the handles of a sandbox, or, with "", of
// all.
func (d *Driver) handleFiles(uid string) ([]string, error) {
	entries, err := os.ReadDir(d.dir)
	if err != nil {
		return nil, fault(err, "cannot read %s", d.dir)
	}
	var names []string
	for _, e := range entries {
		if m := handleName.FindStringSubmatch(e.Name()); m != nil && (uid == "" || uid == m[1]) {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// readHandle returns the handle of a sandbox, nil when there is none. It has
// one, unless files of the directory were restored manually: then it is the one
// with the number of ref, otherwise the first that is not being destroyed.
func (d *Driver) readHandle(ref backend.Ref) (*handle, error) {
	all, err := d.handlesOf(ref.UID)
	if err != nil || len(all) == 0 {
		return nil, err
	}
	i := slices.IndexFunc(all, func(h *handle) bool { return refOf(h.id()) == ref })
	if i < 0 {
		i = max(0, slices.IndexFunc(all, func(h *handle) bool { return h.Phase != phaseDestroying }))
	}
	return all[i], nil
}

// handlesOf returns all handles of a sandbox.
func (d *Driver) handlesOf(uid string) ([]*handle, error) {
	if err := validUID(uid); err != nil {
		return nil, err
	}
	return d.readHandles(uid)
}

func (d *Driver) readFile(name string) (*handle, error) {
	path := filepath.Join(d.dir, name)
	var h handle
	err := durable.ReadJSON(path, &h)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fault(err, "cannot read %s", path)
	}
	if err := h.Spec.Options.Decode(&h.options); err != nil {
		return nil, fault(err, "%s cannot be read", path)
	}
	switch {
	case h.Version < 1 || h.Version > handleVersion:
		return nil, agentlab.Errorf(agentlab.CodeUnsupported, "%s has format version %d, and this program supports versions up to %d", path, h.Version, handleVersion).
			WithHint("use the newer version of AgentLab that wrote the file")
	case h.file() != name:
		return nil, agentlab.Errorf(agentlab.CodeInternal, "%s belongs to another sandbox", path)
	}
	return &h, nil
}

// handles returns all handles.
func (d *Driver) handles() ([]*handle, error) { return d.readHandles("") }

// readHandles returns the handles of a sandbox, or, with "", of all.
func (d *Driver) readHandles(uid string) ([]*handle, error) {
	names, err := d.handleFiles(uid)
	if err != nil {
		return nil, err
	}
	var out []*handle
	for _, name := range names {
		h, err := d.readFile(name)
		if err != nil {
			return nil, err
		}
		if h != nil { // it may have been deleted in the meantime
			out = append(out, h)
		}
	}
	return out, nil
}

func (h *handle) file() string { return strconv.Itoa(h.Spec.VMID) + "-" + h.Spec.UID + ".json" }

// save writes a handle atomically and syncs it to disk, so that it is complete
// after a crash or a power cut.
func (d *Driver) save(h *handle) error {
	switch {
	case h.Restoring != "", h.Spec.From != nil && h.Phase != phaseCreated:
		h.Version = handleVersion
	case h.id().VMID != h.Spec.VMID:
		h.Version = 2
	default:
		h.Version = 1
	}
	if err := durable.ReplaceJSON(filepath.Join(d.dir, h.file()), h, durable.Name); err != nil {
		return fault(err, "cannot write the handle of sandbox %d", h.Spec.VMID)
	}
	return nil
}

// forget deletes the handle of a sandbox that is deleted completely.
func (d *Driver) forget(h *handle) error {
	path := filepath.Join(d.dir, h.file())
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fault(err, "cannot remove %s", path)
	}
	d.cache.forget(h.Spec.UID)
	if err := durable.SyncPath(d.dir); err != nil {
		return fault(err, "cannot remove %s", path)
	}
	return nil
}

// fault adds a code to an error of the operating system.
func fault(err error, format string, args ...any) *agentlab.Error {
	return fsfault.Own(err, "free disk space on this machine", format, args...)
}

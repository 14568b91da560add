package pve

import (
	"context"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// VM is one entry of a node's list. A paused VM reads "running" here: ask
// Status.
type VM struct {
	VMID     Int    `json:"vmid"`
	Name     Str    `json:"name"`
	Status   string `json:"status"` // running or stopped
	Template Bool   `json:"template"`
	TagList  Str    `json:"tags"`
	Lock     string `json:"lock"`
	MaxMem   Int    `json:"maxmem"` // bytes
	Mem      Int    `json:"mem"`
	PID      Int    `json:"pid"`
}

// Tags returns the tags.
func (v VM) Tags() []string { return splitTags(string(v.TagList)) }

// VMs lists the VMs of a node that the caller may see (VM.Audit); others are
// left out silently. The node fails the whole list when any VM is deleted while
// it reads the configurations: VMs then asks again, and returns unavailable
// when that does not help.
func (c *Client) VMs(ctx context.Context, node string) ([]VM, error) {
	var out []VM
	err := c.retry(ctx, func() (again bool, err error) {
		out, err = list[VM](ctx, c, "list VMs of node "+node, apiPath("nodes", node, "qemu"), nil)
		if agentlab.CodeOf(err) != agentlab.CodeNotFound {
			return false, err
		}
		// It names some VM of the list, and says nothing about any that was asked about.
		return true, recoded(err, agentlab.CodeUnavailable, "a VM was deleted while the node listed its VMs; try again")
	})
	if err != nil {
		return nil, err
	}
	for _, v := range out {
		if v.VMID <= 0 || v.Status == "" {
			return nil, agentlab.Errorf(agentlab.CodeInternal, "list VMs of node %s: an entry without number or status", node)
		}
	}
	return out, nil
}

// Config reads a VM's configuration. What is pending until the next cold start
// shows as if it were set; CurrentConfig tells what is in effect.
func (c *Client) Config(ctx context.Context, node string, vmid int) (Config, error) {
	return c.config(ctx, node, vmid, nil)
}

// CurrentConfig reads the configuration that is in effect now.
func (c *Client) CurrentConfig(ctx context.Context, node string, vmid int) (Config, error) {
	return c.config(ctx, node, vmid, url.Values{"current": {"1"}})
}

func (c *Client) config(ctx context.Context, node string, vmid int, params url.Values) (Config, error) {
	var out Config
	if err := c.vmCall(ctx, "read the configuration of", Get, node, vmid, "config", params, &out); err != nil {
		return nil, err
	}
	if out.Digest() == "" { // every configuration has one: without, this is something else
		return nil, agentlab.Errorf(agentlab.CodeInternal, "read the configuration of VM %d: the answer has no digest", vmid)
	}
	return out, nil
}

// PendingOption is one option as Pending tells it.
type PendingOption struct {
	Key     string `json:"key"`
	Value   *Str   `json:"value"`   // in effect; nil: not set
	Pending *Str   `json:"pending"` // what it becomes; nil: no change
	Delete  Int    `json:"delete"`  // 1: is to be deleted; 2: with force
}

// Changed reports whether a change of this option is pending.
func (p PendingOption) Changed() bool { return p.Pending != nil || p.Delete != 0 }

// Pending lists all options with what is in effect and what is pending.
func (c *Client) Pending(ctx context.Context, node string, vmid int) ([]PendingOption, error) {
	out, err := list[PendingOption](ctx, c, vmWhat("read the pending changes of", vmid), vmPath(node, vmid, "pending"), nil)
	return out, aboutVM(err, vmid)
}

// Status is the state of a VM now.
type Status struct {
	Status    string         `json:"status"`    // running or stopped
	QMPStatus string         `json:"qmpstatus"` // running, paused, stopped, prelaunch, …
	Name      Str            `json:"name"`
	Lock      string         `json:"lock"` // "" or e.g. clone, suspended
	Template  Bool           `json:"template"`
	Agent     Bool           `json:"agent"` // the guest agent is configured
	PID       Int            `json:"pid"`
	Uptime    Int            `json:"uptime"` // seconds
	TagList   Str            `json:"tags"`
	HA        HA             `json:"ha"`
	NICs      map[string]any `json:"nics"` // by tap, while it runs
}

// HA is what the cluster's high availability does with a VM.
type HA struct {
	Managed Bool `json:"managed"`
}

// Running reports whether a process of the VM exists, also a paused one.
func (s Status) Running() bool { return s.Status == "running" }

// Paused reports whether its CPUs stand still.
func (s Status) Paused() bool { return s.Running() && s.QMPStatus == "paused" }

// Status reads the state of a VM.
func (c *Client) Status(ctx context.Context, node string, vmid int) (Status, error) {
	var out Status
	if err := c.vmCall(ctx, "read the status of", Get, node, vmid, "status/current", nil, &out); err != nil {
		return Status{}, err
	}
	if out.Status != "running" && out.Status != "stopped" {
		return Status{}, agentlab.Errorf(agentlab.CodeInternal, "read the status of VM %d: %q is no status", vmid, agentlab.OneLine(out.Status, 40))
	}
	return out, nil
}

// CloneOptions are the parameters of a clone. Storage belongs to a full clone
// alone: a linked one lives on its template's storage.
type CloneOptions struct {
	NewID       int
	Name        string // a DNS name: no underscore
	Description string
	Pool        string
	Full        bool
	Storage     string // "": the source's
	Target      string // another node, when every disk is on shared storage; "": the same
}

// Clone begins to clone a VM or template. Errors: exists (NewID is taken; the
// same may come from Wait when two calls race), busy (something holds the
// source's lock: a clone waits 1 s), unsupported (no linked clone of this
// one), not_found (no source).
func (c *Client) Clone(ctx context.Context, node string, source int, o CloneOptions) (UPID, error) {
	p := url.Values{"newid": {strconv.Itoa(o.NewID)}, "full": {boolParam(o.Full)}}
	setNonEmpty(p, "name", o.Name)
	setNonEmpty(p, "description", o.Description)
	setNonEmpty(p, "pool", o.Pool)
	setNonEmpty(p, "storage", o.Storage)
	setNonEmpty(p, "target", o.Target)
	return c.vmTask(ctx, "clone to "+strconv.Itoa(o.NewID), Post, node, source, "clone", p)
}

func setNonEmpty(p url.Values, key, value string) {
	if value != "" {
		p.Set(key, value)
	}
}

// Changes are changes of a configuration. Values are as in Config; the value
// of sshkeys is EncodeSSHKeys'.
type Changes struct {
	Set    map[string]string
	Delete []string // options that are not set are no error
	Revert []string // pending changes to be forgotten
	Digest string   // "": whatever the configuration is now
}

func (ch Changes) params() url.Values {
	p := url.Values{}
	for k, v := range ch.Set {
		p.Set(k, v)
	}
	setNonEmpty(p, "delete", strings.Join(ch.Delete, ","))
	setNonEmpty(p, "revert", strings.Join(ch.Revert, ","))
	setNonEmpty(p, "digest", ch.Digest)
	return p
}

// EncodeSSHKeys is the value of option sshkeys for keys, one to a line. Proxmox
// takes the text percent-encoded (a blank is %20, never "+") before the
// encoding of the call itself.
func EncodeSSHKeys(keys string) string {
	return strings.ReplaceAll(url.QueryEscape(keys), "+", "%20")
}

// Set changes a configuration at once (PUT). It is not for what allocates or
// moves a disk: over REST a call that takes longer than 30 s is
// unknown_outcome, and is carried out all the same. Error busy: the digest
// does not fit, or the VM is locked. Error invalid with the option as field: a
// value is refused, or an earlier change is pending that cannot be applied
// (Revert it).
func (c *Client) Set(ctx context.Context, node string, vmid int, ch Changes) error {
	return c.vmCall(ctx, "configure", Put, node, vmid, "config", ch.params(), nil)
}

// Revert forgets pending changes of these options. The boot order that a
// refused deletion of a drive has taken along does not come back by it.
func (c *Client) Revert(ctx context.Context, node string, vmid int, options ...string) error {
	return c.Set(ctx, node, vmid, Changes{Revert: options})
}

// Resize begins to grow a disk, e.g. "scsi0" to "20G" or by "+5G". A smaller
// size is an error of the task.
func (c *Client) Resize(ctx context.Context, node string, vmid int, disk, size string) (UPID, error) {
	return c.vmTask(ctx, "resize "+disk+" of", Put, node, vmid, "resize", url.Values{"disk": {disk}, "size": {size}})
}

// Start begins to start a VM; starting a running one is an error of the task
// (conflict).
func (c *Client) Start(ctx context.Context, node string, vmid int) (UPID, error) {
	return c.vmTask(ctx, "start", Post, node, vmid, "status/start", nil)
}

// Stop begins to cut the power. A shutdown that waits for the guest holds the
// VM's lock, so it is aborted first; versions before 8.2 do not know how, and
// for a VM that somebody made highly available it is refused: they get a plain
// stop. Stopping a stopped VM succeeds.
func (c *Client) Stop(ctx context.Context, node string, vmid int) (UPID, error) {
	const overrule = "overrule-shutdown"
	u, err := c.vmTask(ctx, "stop", Post, node, vmid, "status/stop", url.Values{overrule: {"1"}})
	if f, ok := asFault(err); ok && f.Params[overrule] != "" {
		return c.vmTask(ctx, "stop", Post, node, vmid, "status/stop", nil)
	}
	return u, err
}

// Shutdown begins to ask the guest to shut down, for at most timeout (whole
// seconds). The task fails with code timeout when it does not. A paused VM
// cannot be asked (conflict); a stopped one succeeds.
func (c *Client) Shutdown(ctx context.Context, node string, vmid int, timeout time.Duration) (UPID, error) {
	seconds := max(int(timeout/time.Second), 1)
	return c.vmTask(ctx, "shut down", Post, node, vmid, "status/shutdown", url.Values{"timeout": {strconv.Itoa(seconds)}})
}

// Suspend begins to pause a running VM; its memory stays.
func (c *Client) Suspend(ctx context.Context, node string, vmid int) (UPID, error) {
	return c.vmTask(ctx, "suspend", Post, node, vmid, "status/suspend", nil)
}

// Resume begins to let a paused VM go on. A running one succeeds, a stopped
// one is conflict.
func (c *Client) Resume(ctx context.Context, node string, vmid int) (UPID, error) {
	return c.vmTask(ctx, "resume", Post, node, vmid, "status/resume", nil)
}

// Destroy begins to destroy a stopped VM with its disks; with unreferenced
// also every volume that bears its number on any storage. A volume that could
// not be freed does not fail the task: ask NotRemoved. Errors:
// not_found, denied (protected), conflict (it runs), busy (locked).
func (c *Client) Destroy(ctx context.Context, node string, vmid int, unreferenced bool) (UPID, error) {
	return c.vmTask(ctx, "destroy", Delete, node, vmid, "", url.Values{
		"purge": {"1"}, "destroy-unreferenced-disks": {boolParam(unreferenced)},
	})
}

var notRemoved = regexp.MustCompile(`Could not remove disk '([^']+)', check manually`)

// NotRemoved returns the volumes that a destruction which ended well could not
// free. Its log alone tells a token of them: with the VM its place in the pool
// is gone, and Content leaves out, silently, the volumes of a VM that the
// token has no VM.Config.Disk on (unless it has Datastore.Allocate on the
// storage, which deleting them takes anyway).
func (c *Client) NotRemoved(ctx context.Context, u UPID) ([]string, error) {
	lines, err := c.taskTail(ctx, u, 1000)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, l := range lines {
		if m := notRemoved.FindStringSubmatch(l); m != nil {
			out = append(out, m[1])
		}
	}
	return out, nil
}

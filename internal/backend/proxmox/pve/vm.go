package pve

import (
	"context"
	"encoding/json"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/lazyre"
)

// VM is one entry of a node's list. A paused VM is "running" here; Status
// distinguishes the two.
type VM struct {
	VMID     Int    `json:"vmid"`
	Name     Str    `json:"name"`
	Status   string `json:"status"` // running or stopped
	Template Bool   `json:"template"`
	TagList  Str    `json:"tags"`
	Lock     string `json:"lock"`
}

// Tags returns the tags.
func (v VM) Tags() []string { return splitTags(string(v.TagList)) }

// VMs lists the VMs of a node that the caller may see (VM.Audit); others are
// omitted without an error. The whole list fails if any VM is deleted while the
// node reads the configurations. VMs then asks again, and returns code
// unavailable if that does not help.
func (c *Client) VMs(ctx context.Context, node string) ([]VM, error) {
	var out []VM
	err := c.retry(ctx, func() (again bool, err error) {
		out, err = list[VM](ctx, c, "list VMs of node "+node, apiPath("nodes", node, "qemu"), nil)
		if agentlab.CodeOf(err) != agentlab.CodeNotFound {
			return false, err
		}
		// It is about some VM of the list, not about the VM of a call.
		return true, withCode(err, agentlab.CodeUnavailable, "a VM was deleted while the node listed its VMs; try again")
	})
	if err != nil {
		return nil, err
	}
	for _, v := range out {
		if v.VMID <= 0 || v.Status == "" {
			return nil, agentlab.Errorf(agentlab.CodeInternal, "list VMs of node %s: an entry has no VMID or status", node)
		}
	}
	return out, nil
}

// Config reads a VM's configuration. It includes pending changes, which take
// effect at the next cold start; CurrentConfig returns what is in effect.
func (c *Client) Config(ctx context.Context, node string, vmid int) (Config, error) {
	return c.config(ctx, node, vmid, nil)
}

// CurrentConfig reads the configuration that is in effect now.
func (c *Client) CurrentConfig(ctx context.Context, node string, vmid int) (Config, error) {
	return c.config(ctx, node, vmid, url.Values{"current": {"1"}})
}

// Configs reads with one call what Config and CurrentConfig return.
func (c *Client) Configs(ctx context.Context, node string, vmid int) (next, current Config, err error) {
	var options []struct {
		Key     string          `json:"key"`
		Value   json.RawMessage `json:"value"`
		Pending json.RawMessage `json:"pending"`
		Delete  Int             `json:"delete"` // 1, or 2 with force
	}
	if err := c.vmCall(ctx, "read the configuration of", Get, node, vmid, "pending", nil, &options); err != nil {
		return nil, nil, err
	}
	next, current = Config{}, Config{}
	for _, o := range options {
		if !isNull(o.Value) {
			current[o.Key] = optionText(o.Value)
			next[o.Key] = current[o.Key]
		}
		switch {
		case !isNull(o.Pending):
			next[o.Key] = optionText(o.Pending)
		case o.Delete != 0:
			delete(next, o.Key)
		}
	}
	if current.Digest() == "" { // every configuration has one, so this is not a configuration
		return nil, nil, agentlab.Errorf(agentlab.CodeInternal, "read the configuration of VM %d: the answer has no digest", vmid)
	}
	return next, current, nil
}

func (c *Client) config(ctx context.Context, node string, vmid int, params url.Values) (Config, error) {
	var out Config
	if err := c.vmCall(ctx, "read the configuration of", Get, node, vmid, "config", params, &out); err != nil {
		return nil, err
	}
	if out.Digest() == "" { // every configuration has one, so this is not a configuration
		return nil, agentlab.Errorf(agentlab.CodeInternal, "read the configuration of VM %d: the answer has no digest", vmid)
	}
	return out, nil
}

// Status is the current state of a VM.
type Status struct {
	Status    string `json:"status"`    // running or stopped
	QMPStatus string `json:"qmpstatus"` // running, paused, stopped, prelaunch, …
	Lock      string `json:"lock"`      // "" or e.g. clone, suspended
	PID       Int    `json:"pid"`
}

// Running reports whether a process of the VM exists, even if it is paused.
func (s Status) Running() bool { return s.Status == "running" }

// Paused reports whether its CPUs are paused.
func (s Status) Paused() bool { return s.Running() && s.QMPStatus == "paused" }

// Status reads the state of a VM.
func (c *Client) Status(ctx context.Context, node string, vmid int) (Status, error) {
	var out Status
	if err := c.vmCall(ctx, "read the status of", Get, node, vmid, "status/current", nil, &out); err != nil {
		return Status{}, err
	}
	if out.Status != "running" && out.Status != "stopped" {
		return Status{}, agentlab.Errorf(agentlab.CodeInternal, "read the status of VM %d: invalid status %q", vmid, agentlab.OneLine(out.Status, 40))
	}
	return out, nil
}

// CloneOptions are the parameters of a clone. Storage is only for a full
// clone: a linked one is on its template's storage.
type CloneOptions struct {
	NewID       int
	Name        string // a DNS name: no underscore
	Description string
	Pool        string
	Full        bool
	Snapshot    string // "": the current state of the source
	Storage     string // "": the source's
	Target      string // another node, when every disk is on shared storage; "": the same
}

// Clone starts a clone of a VM or template. Codes: exists (NewID is taken;
// Wait may return it too if two calls race), busy (the source is locked: a
// clone waits 1 s), unsupported (no linked clone of this source, no copy of a
// snapshot on this storage), conflict (no copy while the source runs), not_found
// (no source).
func (c *Client) Clone(ctx context.Context, node string, source int, o CloneOptions) (UPID, error) {
	p := url.Values{"newid": {strconv.Itoa(o.NewID)}, "full": {boolParam(o.Full)}}
	setNonEmpty(p, "name", o.Name)
	setNonEmpty(p, "description", o.Description)
	setNonEmpty(p, "pool", o.Pool)
	setNonEmpty(p, "snapname", o.Snapshot)
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
	Delete []string // unset options are not an error
	Digest string   // "": regardless of the current configuration
}

func (ch Changes) params() url.Values {
	p := url.Values{}
	for k, v := range ch.Set {
		p.Set(k, v)
	}
	setNonEmpty(p, "delete", strings.Join(ch.Delete, ","))
	setNonEmpty(p, "digest", ch.Digest)
	return p
}

// EncodeSSHKeys returns the value of option sshkeys for keys, one per line.
// Proxmox requires the text percent-encoded (a space is %20, never "+") before
// the encoding of the call itself.
func EncodeSSHKeys(keys string) string {
	return strings.ReplaceAll(url.QueryEscape(keys), "+", "%20")
}

// Set changes a configuration synchronously (PUT). It must not be used to
// allocate or move a disk: over REST a call that takes longer than 30 s
// returns code unknown_outcome, but continues. Code busy: the digest does not
// match, or the VM is locked. Code invalid with the option as field: a value
// is rejected, or an earlier change is pending that cannot be applied.
func (c *Client) Set(ctx context.Context, node string, vmid int, ch Changes) error {
	return c.vmCall(ctx, "configure", Put, node, vmid, "config", ch.params(), nil)
}

// Resize starts to grow a disk, e.g. "scsi0" to "20G" or by "+5G". With a
// smaller size the task fails.
func (c *Client) Resize(ctx context.Context, node string, vmid int, disk, size string) (UPID, error) {
	return c.vmTask(ctx, "resize "+disk+" of", Put, node, vmid, "resize", url.Values{"disk": {disk}, "size": {size}})
}

// Start starts a VM asynchronously. For a running VM the task fails
// (conflict).
func (c *Client) Start(ctx context.Context, node string, vmid int) (UPID, error) {
	return c.vmTask(ctx, "start", Post, node, vmid, "status/start", nil)
}

// Stop starts a power cut. A shutdown that waits for the guest locks the VM,
// so it is aborted first. Versions before 8.2 do not support that, and it is
// rejected for a highly available VM; these get a plain stop. Stopping a
// stopped VM succeeds.
func (c *Client) Stop(ctx context.Context, node string, vmid int) (UPID, error) {
	const overrule = "overrule-shutdown"
	u, err := c.vmTask(ctx, "stop", Post, node, vmid, "status/stop", url.Values{overrule: {"1"}})
	if f, ok := faultOf(err); ok && f.Params[overrule] != "" {
		return c.vmTask(ctx, "stop", Post, node, vmid, "status/stop", nil)
	}
	return u, err
}

// Shutdown asks the guest to shut down within timeout (whole seconds),
// asynchronously. The task fails with code timeout if it does not. A paused VM
// cannot be asked (conflict); for a stopped one it succeeds.
func (c *Client) Shutdown(ctx context.Context, node string, vmid int, timeout time.Duration) (UPID, error) {
	seconds := max(int(timeout/time.Second), 1)
	return c.vmTask(ctx, "shut down", Post, node, vmid, "status/shutdown", url.Values{"timeout": {strconv.Itoa(seconds)}})
}

// Suspend starts to pause a running VM; its memory is kept.
func (c *Client) Suspend(ctx context.Context, node string, vmid int) (UPID, error) {
	return c.vmTask(ctx, "suspend", Post, node, vmid, "status/suspend", nil)
}

// Resume starts to resume a paused VM. For a running VM it succeeds; for a
// stopped one the task fails (conflict).
func (c *Client) Resume(ctx context.Context, node string, vmid int) (UPID, error) {
	return c.vmTask(ctx, "resume", Post, node, vmid, "status/resume", nil)
}

// Destroy starts to destroy a stopped VM with its disks; with unreferenced
// also every volume with its number on any storage. The task does not fail if
// a volume could not be freed: NotRemoved returns such volumes. Codes:
// not_found, denied (protected), conflict (it runs), busy (locked).
func (c *Client) Destroy(ctx context.Context, node string, vmid int, unreferenced bool) (UPID, error) {
	return c.vmTask(ctx, "destroy", Delete, node, vmid, "", url.Values{
		"purge": {"1"}, "destroy-unreferenced-disks": {boolParam(unreferenced)},
	})
}

var notRemoved = lazyre.New(`Could not remove disk '([^']+)', check manually`)

// NotRemoved returns the volumes that a successful destruction could not free.
// A token finds them only in the task log: the deleted VM is no longer in the
// pool, and Content omits, without an error, the volumes of a VM on which the
// token lacks VM.Config.Disk, unless it has Datastore.Allocate on the storage,
// which deleting them needs anyway.
func (c *Client) NotRemoved(ctx context.Context, u UPID) ([]string, error) {
	lines, ok := c.t.Ended(u)
	if !ok {
		var err error
		if lines, err = c.taskTail(ctx, u, 1000); err != nil {
			return nil, err
		}
	}
	var out []string
	for _, l := range lines {
		if m := notRemoved.FindStringSubmatch(l); m != nil {
			out = append(out, m[1])
		}
	}
	return out, nil
}

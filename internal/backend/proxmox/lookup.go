package proxmox

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
)

// lookupResult is the result of a search for the VM of a sandbox.
type lookupResult struct {
	exists      bool // there is a VM or container with its number; false is a proof that there is none
	owned       bool // and it has AgentLab's mark
	placeholder bool // it is the empty configuration of an unfinished clone, which has no mark yet
	// unreadable: the token may not read it, so it is not in AgentLab's pool:
	// another user's VM, a sandbox that a user removed from the pool, or an
	// unfinished clone.
	unreadable bool
	// traces: it does not have AgentLab's mark, but parts of it are the
	// sandbox's: a user may have edited it.
	traces bool
	node   string
	// cfg includes pending changes, which take effect at the next cold start; current
	// is what is in effect.
	cfg, current pve.Config
}

// lookup searches for the VM of a sandbox: on the node where it should be,
// otherwise on the node that the cluster names. It returns an error if that
// node does not answer. For a token, the answer for a VM that
// does not exist is the same as for a VM that it may not read, so lookup also
// asks whether the number is in use.
func (d *Driver) lookup(ctx context.Context, id vmID, h *handle) (lookupResult, error) {
	var refused error
	if h != nil {
		s, err := d.lookupOn(ctx, id, h, h.Node)
		switch {
		case agentlab.CodeOf(err) == agentlab.CodeDenied:
			refused = err
		case err != nil || s.exists:
			return s, err
		}
	}
	free, err := d.pve.Free(ctx, id.VMID)
	if err != nil || free {
		return lookupResult{}, err
	}
	if refused != nil {
		return lookupResult{exists: true, unreadable: true, node: h.Node}, d.checkReadPermission(ctx, refused)
	}
	guests, err := d.pve.Guests(ctx)
	if err != nil {
		return lookupResult{}, err
	}
	var nodes []string
	// VMs and containers share one range of numbers, which are unique in the cluster.
	if i := slices.IndexFunc(guests, func(g pve.Guest) bool { return int(g.VMID) == id.VMID }); i < 0 {
		if nodes, err = d.nodeNames(ctx); err != nil {
			return lookupResult{}, err
		}
	} else if guests[i].Container() {
		return lookupResult{exists: true, node: guests[i].Node}, nil
	} else {
		nodes = []string{guests[i].Node}
	}
	for _, node := range nodes {
		if h != nil && node == h.Node {
			continue
		}
		s, err := d.lookupOn(ctx, id, h, node)
		denied := agentlab.CodeOf(err) == agentlab.CodeDenied
		switch {
		case denied && h != nil:
			return lookupResult{exists: true, unreadable: true, node: node}, d.checkReadPermission(ctx, err)
		case denied:
			return lookupResult{exists: true, unreadable: true, node: node}, nil
		case err != nil || s.exists:
			return s, err
		}
	}
	return lookupResult{}, agentlab.Errorf(agentlab.CodeUnavailable, "VMID %d is in use, but no node has a VM with it", id.VMID).
		WithHint("the VM may be migrating to another node; try again")
}

func (d *Driver) nodeNames(ctx context.Context) ([]string, error) {
	nodes, err := d.pve.Nodes(ctx)
	var names []string
	for _, n := range nodes {
		names = append(names, n.Name)
	}
	return names, err
}

// lookupOn looks on one node.
func (d *Driver) lookupOn(ctx context.Context, id vmID, h *handle, node string) (lookupResult, error) {
	cfg, current, err := d.pve.Configs(ctx, node, id.VMID)
	if agentlab.CodeOf(err) == agentlab.CodeNotFound {
		return lookupResult{}, nil
	}
	if err != nil {
		return lookupResult{}, err
	}
	s := lookupResult{exists: true, node: node, cfg: cfg, current: current, placeholder: isPlaceholder(cfg)}
	if h == nil {
		s.owned = d.ours(cfg, id, "")
		return s, nil
	}
	s.owned = d.ours(cfg, id, h.Spec.Name)
	s.traces = !s.owned && h.existed() && h.traces(cfg)
	return s, nil
}

// checkReadPermission returns nil if the refusal to read one VM is about that VM: the
// token must still have its rights on AgentLab's pool. A token that has lost them is
// refused everywhere, which proves nothing about any sandbox.
func (d *Driver) checkReadPermission(ctx context.Context, refused error) error {
	if d.cfg.Pool == "" {
		return refused
	}
	perms, err := d.pve.Permissions(ctx)
	if err != nil {
		return err
	}
	if !perms.Has("/pool/"+d.cfg.Pool, "VM.Audit") {
		return refused
	}
	return nil
}

// stubText is the description of the file with which Proxmox reserves the
// number of a clone, before it has copied anything.
const stubText = "qmclone temporary file"

// isPlaceholder reports whether a configuration is only such a file.
func isPlaceholder(cfg pve.Config) bool {
	for key := range cfg {
		if key != "lock" && key != "description" && key != "digest" {
			return false
		}
	}
	return cfg["lock"] == lockClone && strings.TrimSpace(cfg["description"]) == stubText
}

// lookupOwned is lookup for a sandbox whose VM must exist: not_found proves that it
// does not exist, unavailable proves nothing. It also finds a sandbox that was
// migrated.
func (d *Driver) lookupOwned(ctx context.Context, id vmID, h *handle) (lookupResult, error) {
	s, err := d.lookup(ctx, id, h)
	if err != nil {
		return s, err
	}
	if !s.owned {
		return s, d.foreignError(id, h, s)
	}
	if h != nil && h.Node != s.node {
		return s, d.updateNode(h, s.node)
	}
	return s, nil
}

// errUnreadable is the cause of an unknown state if the token may not read the VM.
var errUnreadable = errors.New("the VMID is in use, but the API token has no permission to read the VM")

// unreadableError returns the error for a created sandbox that may exist or not: a
// user may have removed it from the pool, or another user's VM may have its
// number.
func (d *Driver) unreadableError(id vmID, node string) error {
	return agentlab.Errorf(agentlab.CodeUnavailable, "cannot determine whether VM %d of a sandbox still exists: %w", id.VMID, errUnreadable).
		WithHint("on node %[1]s run qm config %[2]d; if the output contains %[3]s, add the VM to the pool again: pveum pool modify %[4]s --vms %[2]d; if not, grant the token and its user the role PVEAuditor on /vms/%[2]d",
			node, id.VMID, id.UID, d.cfg.Pool)
}

// errUnmarked is the cause of an unknown state if the VM has lost its mark.
var errUnmarked = errors.New("a VM with this VMID looks like the sandbox, but is not tagged")

// unmarkedError returns the error for a VM with the number of a sandbox that may be
// the sandbox after an edit by a user, or the user's own VM by now.
func (d *Driver) unmarkedError(id vmID, node string) error {
	return agentlab.Errorf(agentlab.CodeUnknownOutcome, "cannot determine whether VM %d is still the sandbox: %w", id.VMID, errUnmarked).
		WithHint("on node %[1]s run qm config %[2]d; if it is the sandbox, restore its tags: qm set %[2]d --tags '%[3]s' --description \"$(printf '%[4]s')\"; "+
			"if it is not needed: qm destroy %[2]d; if another user owns it, its owner must give it another VMID",
			node, id.VMID, tags(id.UID), strings.ReplaceAll(markLines(id, d.installation), "\n", `\n`))
}

// foreignError returns the error for a sandbox whose number has no VM of
// AgentLab.
func (d *Driver) foreignError(id vmID, h *handle, s lookupResult) error {
	switch {
	case s.unreadable && h != nil && h.existed():
		return d.unreadableError(id, s.node)
	case s.traces:
		return d.unmarkedError(id, s.node)
	}
	return absent(id.UID)
}

// bridgeEnforced reports whether policies are enforced on a node.
func (d *Driver) bridgeEnforced(node string) bool {
	n, err := d.node(node)
	return err == nil && n.Host != nil
}

// refOf returns the Ref of a sandbox: its Handle is the number of its VM.
func refOf(id vmID) backend.Ref {
	return backend.Ref{UID: id.UID, Handle: strconv.Itoa(id.VMID)}
}

// resolve finds the VM of a sandbox by its handle, otherwise by its mark. h is
// nil if it was lost; then the VM exists with the mark. Code not_found means
// that there is neither a handle nor a VM with the mark.
func (d *Driver) resolve(ctx context.Context, ref backend.Ref) (id vmID, h *handle, err error) {
	if h, err = d.readHandle(ref); h != nil || err != nil {
		if h != nil {
			id = h.id()
		}
		return id, h, err
	}
	id.UID = ref.UID
	id.VMID, err = d.findByMark(ctx, id.UID, "", 0)
	if err == nil && id.VMID == 0 {
		err = absent(id.UID)
	}
	return id, nil, err
}

// findByMark returns the number of the VM with the mark of a sandbox that has no
// handle, from a list that is at most age old; 0 proves that there is none. The list of the whole cluster has the
// tags of all VMs, also of nodes that do not answer, so only VMs that can be
// the sandbox's are read: those with its tag, those whose clone has not ended,
// which have no tag yet, and those with the name, unless it is "", that have
// no tag.
func (d *Driver) findByMark(ctx context.Context, uid, name string, age time.Duration) (vmid int, err error) {
	guests, err := d.guests(ctx, age)
	if err != nil {
		return 0, err
	}
	all, err := d.handles() // after the VMs were listed, so that a VM created in the meantime does not count as lost
	if err != nil {
		return 0, err
	}
	known := map[int]bool{}
	for _, h := range all {
		known[h.id().VMID] = true
	}
	for _, g := range guests {
		id := vmID{VMID: int(g.VMID), UID: uid}
		if g.Container() || known[id.VMID] || !d.inRange(id.VMID) {
			continue
		}
		tagged := taggedUID(string(g.TagList))
		if tagged != uid && (tagged != "" || g.Lock != lockClone && (name == "" || string(g.Name) != name)) {
			continue
		}
		if ours, err := d.hasMark(ctx, g.Node, id, name); err != nil || ours {
			return id.VMID, err
		}
	}
	return 0, nil
}

// wasDeleted reports whether the error of a read of a VM that was listed means that it was
// destroyed since then. For a token that is the same refusal as for a VM that it may not
// read. Any other error is returned.
func (d *Driver) wasDeleted(ctx context.Context, vmid int, err error) (bool, error) {
	switch agentlab.CodeOf(err) {
	case agentlab.CodeNotFound:
		return true, nil
	case agentlab.CodeDenied:
		free, ferr := d.pve.Free(ctx, vmid)
		if free || ferr != nil {
			return free, ferr
		}
	}
	return false, err
}

// hasMark reports whether a VM of the cluster's list is that of a sandbox
// that has no handle.
func (d *Driver) hasMark(ctx context.Context, node string, id vmID, name string) (bool, error) {
	cfg, err := d.pve.Config(ctx, node, id.VMID)
	if err == nil {
		return d.ours(cfg, id, name), nil
	}
	if code := agentlab.CodeOf(err); code == agentlab.CodeNotFound || code == agentlab.CodeDenied { // destroyed after the VMs were listed, or moved
		if free, ferr := d.pve.Free(ctx, id.VMID); free || ferr != nil {
			return false, ferr
		}
	}
	return false, agentlab.Errorf(agentlab.CodeUnavailable, "cannot determine whether VM %d on node %s belongs to sandbox %s: %w", id.VMID, clip(node), id.UID, err).
		WithHint("try again when node %s is reachable", clip(node))
}

// updateNode records that a user migrated a VM to another configured node. The
// next start loads its rules there. Until then the other node's bridge drops all
// its packets.
func (d *Driver) updateNode(h *handle, node string) error {
	if !d.bridgeEnforced(node) {
		return agentlab.Errorf(agentlab.CodeUnavailable, "sandbox %d was moved to node %s, which does not enforce its network policy", h.Spec.VMID, node).
			WithField("proxmox.nodes").WithHint("move the VM back or destroy the sandbox")
	}
	d.log.Warn("the VM of a sandbox was moved manually", "vmid", h.Spec.VMID, "from", h.Node, "to", node)
	h.moveTo(node)
	return d.save(h)
}

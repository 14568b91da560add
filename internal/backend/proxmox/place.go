package proxmox

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
)

// inventory caches recent answers of nodes, shared by all sandboxes.
type inventory struct {
	nodes  cached[[]pve.Node]
	guests cached[[]pve.Guest]

	mu       sync.Mutex        // guards the following fields
	verdicts map[string]string // UIDs of VMs without a handle, by their list entries
	sweptAt  time.Time
}

func (i *inventory) cachedMark(look string) (uid string, known bool) {
	i.mu.Lock()
	defer i.mu.Unlock()
	uid, known = i.verdicts[look]
	return uid, known
}

func (i *inventory) cacheMark(look, uid string) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.verdicts == nil || len(i.verdicts) > 10000 {
		i.verdicts = map[string]string{}
	}
	i.verdicts[look] = uid
}

// due reports whether the next sweep is due.
func (i *inventory) due(now time.Time, every time.Duration) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	if !i.sweptAt.IsZero() && now.Sub(i.sweptAt) < every {
		return false
	}
	i.sweptAt = now
	return true
}

// storagesOf returns the storages of a sandbox's volumes: those of its
// template, and that of full clones.
func (d *Driver) storagesOf(t template) []string {
	var out []string
	for key, value := range t.cfg {
		if volid, ok := driveVolume(value); ok && driveOption.MatchString(key) {
			storage, _, _ := strings.Cut(volid, ":")
			out = append(out, storage)
		}
	}
	if d.cfg.Storage != "" {
		out = append(out, d.cfg.Storage)
	}
	slices.Sort(out)
	return slices.Compact(out)
}

const inventoryAge = 3 * time.Second

// guests returns the VMs and containers of the cluster, at most age old.
func (d *Driver) guests(ctx context.Context, age time.Duration) ([]pve.Guest, error) {
	return d.inventory.guests.get(ctx, d.cfg.Now, age, d.pve.Guests)
}

// listed returns the VMs of every configured node. A node that the others
// report as offline is missing: the states of its VMs are not known.
func (d *Driver) listed(ctx context.Context) (map[string][]pve.VM, error) {
	vms := map[string][]pve.VM{}
	for _, n := range d.cfg.Nodes {
		list, err := d.pve.VMs(ctx, n.Name)
		if err != nil && d.offline(ctx, n.Name) {
			d.log.Warn("a node is offline, so its VMs are unknown", "node", n.Name, "err", err)
			continue
		}
		if err != nil {
			return nil, err
		}
		vms[n.Name] = list
	}
	return vms, nil
}

// nodePointers returns the nodes of the configuration.
func (d *Driver) nodePointers() []*Node {
	var out []*Node
	for i := range d.cfg.Nodes {
		out = append(out, &d.cfg.Nodes[i])
	}
	return out
}

// onlineNodes returns the nodes that the cluster does not report as offline:
// all if it does not answer.
func (d *Driver) onlineNodes(ctx context.Context) []*Node {
	out := d.nodePointers()
	if len(out) == 1 {
		return out
	}
	states, err := d.pve.Nodes(ctx)
	if err != nil {
		return out
	}
	return slices.DeleteFunc(out, func(n *Node) bool { return isOffline(states, n.Name) })
}

func isOffline(states []pve.Node, name string) bool {
	return slices.ContainsFunc(states, func(n pve.Node) bool { return n.Name == name && n.Status == "offline" })
}

// offline reports whether the rest of the cluster reports a node as offline.
func (d *Driver) offline(ctx context.Context, name string) bool {
	if len(d.cfg.Nodes) == 1 {
		return false
	}
	nodes, err := d.pve.Nodes(ctx)
	return err == nil && isOffline(nodes, name)
}

func (d *Driver) nodeStates(ctx context.Context) ([]pve.Node, error) {
	return d.inventory.nodes.get(ctx, d.cfg.Now, inventoryAge, d.pve.Nodes)
}

// placement is the template and the node for a new sandbox.
type placement struct {
	template
	target string
}

// choosePlacement selects the node of a new sandbox: of the nodes that are
// online, have no error of checkNode and can use the template, the one with
// the most free memory.
func (d *Driver) choosePlacement(ctx context.Context, spec backend.Spec) (placement, error) {
	vmid, digest, err := templateOf(spec.Image)
	if err != nil {
		return placement{}, err
	}
	if len(d.cfg.Nodes) == 1 {
		return d.placeOn(ctx, &d.cfg.Nodes[0], vmid, digest)
	}
	free, err := d.freeMemory(ctx)
	if err != nil {
		return placement{}, err
	}
	nodes := d.nodePointers()
	slices.SortStableFunc(nodes, func(a, b *Node) int { return cmp.Compare(free[b.Name], free[a.Name]) })
	var reasons []string
	var hint string
	var last error
	for _, n := range nodes {
		if _, online := free[n.Name]; !online {
			reasons = append(reasons, "node "+n.Name+" is offline")
			continue
		}
		found := d.checkNode(ctx, n, nodeFindingsAge)
		if i := slices.IndexFunc(found, isError); i >= 0 {
			reasons = append(reasons, "node "+n.Name+": "+found[i].Detail)
			hint = cmp.Or(hint, found[i].Remedy)
			continue
		}
		p, err := d.placeOn(ctx, n, vmid, digest)
		if err == nil {
			return p, nil
		}
		last = err
	}
	if last != nil {
		if len(reasons) == 0 {
			return placement{}, last
		}
		reasons = append(reasons, last.Error())
		hint = cmp.Or(agentlab.HintOf(last), hint)
	}
	return placement{}, agentlab.Errorf(agentlab.CodeUnavailable, "no node of proxmox.nodes can run the sandbox: %s", strings.Join(reasons, "; ")).WithHint("%s", hint)
}

// freeMemory returns the free memory of the nodes that are online. Memory of
// sandboxes that do not run counts as used.
func (d *Driver) freeMemory(ctx context.Context) (map[string]int64, error) {
	states, err := d.nodeStates(ctx)
	if err != nil {
		return nil, err
	}
	free := map[string]int64{}
	for _, s := range states {
		if s.Status == "online" {
			free[s.Name] = s.FreeMem()
		}
	}
	all, err := d.handles()
	if err != nil {
		return nil, err
	}
	for _, h := range all {
		if _, online := free[h.Node]; online && (h.Power == "" || h.Power == powerOff) {
			free[h.Node] -= int64(h.Spec.Resources.MemoryMB) << 20
		}
	}
	return free, nil
}

// Room implements backend.Host with the free memory of the nodes.
func (d *Driver) Room(ctx context.Context, r agentlab.Resources) error {
	free, err := d.freeMemory(ctx)
	if err != nil {
		return err
	}
	var most int64
	for _, n := range d.nodePointers() {
		most = max(most, free[n.Name])
	}
	if need := int64(r.MemoryMB) << 20; most < need {
		return agentlab.Errorf(agentlab.CodeNoSpace, "no node has %d MiB of free memory that is known; the most is %d", need>>20, most>>20).
			WithHint("destroy sandboxes that are no longer needed, or give the API token Sys.Audit on the nodes")
	}
	return nil
}

// placeOn returns the template for a sandbox on a node: the node's own, or
// that of another node if its disk is on shared storage.
func (d *Driver) placeOn(ctx context.Context, n *Node, vmid int, digest string) (placement, error) {
	own := d.sameImage(n, vmid)
	if own != 0 {
		t, err := d.template(ctx, n.Name, own)
		switch {
		case err == nil && own == vmid && t.digest() != digest:
			return placement{}, agentlab.Errorf(agentlab.CodeUnavailable, "template VM %d was replaced after the sandbox was requested", vmid).
				WithField("image").WithHint("create the sandbox again")
		case err == nil:
			return placement{t, n.Name}, nil
		case agentlab.CodeOf(err) != agentlab.CodeNotFound || len(d.cfg.Nodes) == 1:
			return placement{}, err
		}
	}
	var unknown error
	for _, other := range d.cfg.Nodes {
		if other.Name == n.Name {
			continue
		}
		t, err := d.template(ctx, other.Name, vmid)
		switch {
		case err == nil && t.shared && t.digest() == digest:
			return placement{t, n.Name}, nil
		case err != nil && agentlab.CodeOf(err) != agentlab.CodeNotFound:
			unknown = err
		}
	}
	if unknown != nil {
		return placement{}, unknown
	}
	return placement{}, agentlab.Errorf(agentlab.CodeUnavailable, "node %s has no equivalent of template VM %d, and that template's disk is not on shared storage", n.Name, vmid).
		WithField("proxmox.nodes").WithHint("create the template on each node and set its VMID under templates of the node")
}

// sameImage returns a node's own template of the image whose template on
// another node is vmid, and vmid itself if it belongs to no image.
func (d *Driver) sameImage(n *Node, vmid int) int {
	for _, other := range d.cfg.Nodes {
		for image, t := range other.Templates {
			if t == vmid {
				return n.Templates[image]
			}
		}
	}
	return vmid
}

package proxmox

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
)

// Check implements backend.Driver.
func (d *Driver) Check(ctx context.Context) []backend.Finding {
	nodes := d.onlineNodes(ctx)
	out := d.pve.Preflight(ctx, d.needs(ctx, nodes))
	if i := slices.IndexFunc(out, isError); i >= 0 {
		// Templates that could not be read are not missing.
		return named(append(out, finding("templates", backend.LevelWarn, "fix the finding "+out[i].Name+" first, then check again",
			"unknown: templates were not checked because of finding %s", out[i].Name)))
	}
	found := make([][]backend.Finding, len(nodes))
	var wg sync.WaitGroup
	for i, n := range nodes { // at once: the network of a node may take long to answer
		wg.Go(func() { found[i] = d.checkNode(ctx, n, 0) })
	}
	for _, n := range nodes {
		out = append(out, d.checkTemplates(ctx, n)...)
	}
	out = append(out, d.checkFirewall(ctx)...)
	out = append(out, d.checkSnippets(ctx, nodes)...)
	out = append(out, d.checkStorages(ctx, nodes)...)
	wg.Wait()
	return named(append(out, mergeNodes(nodes, found)...))
}

// mergeNodes returns the findings about all nodes. An error of a node is only a
// warning if another node has none, because choosePlacement uses that one.
func mergeNodes(nodes []*Node, found [][]backend.Finding) []backend.Finding {
	if len(nodes) == 0 {
		return []backend.Finding{finding("nodes", backend.LevelError, "start a node", "no node of proxmox.nodes is online")}
	}
	ready := slices.ContainsFunc(found, func(of []backend.Finding) bool { return !slices.ContainsFunc(of, isError) })
	var out []backend.Finding
	for i, n := range nodes {
		for _, f := range found[i] {
			if ready && isError(f) {
				f.Level = backend.LevelWarn
				f.Detail += "; new sandboxes are not created on node " + n.Name
			}
			out = append(out, f)
		}
	}
	return out
}

func isError(f backend.Finding) bool { return f.Level == backend.LevelError }

// nodeFindingsAge is the maximum age of the findings that choosePlacement
// uses. A node whose network does not answer delays only one call in that time.
const nodeFindingsAge = 30 * time.Second

// checkNode returns findings about the network of a node and about its access
// to snippets, at most age old. With an error among them no sandbox is created
// on the node.
func (d *Driver) checkNode(ctx context.Context, n *Node, age time.Duration) []backend.Finding {
	out, err := d.networks.of(n.Name).findings.get(ctx, d.cfg.Now, age, func(ctx context.Context) ([]backend.Finding, error) {
		return append(d.checkSnippetsOn(ctx, n), d.checkNetwork(ctx, n)), ctx.Err() // a cancelled check is not stored
	})
	if len(out) == 0 && err != nil {
		return []backend.Finding{broken("network-"+n.Name, err)}
	}
	return out
}

// named gives every finding a unique name.
func named(all []backend.Finding) []backend.Finding {
	seen := map[string]int{}
	for i, f := range all {
		if seen[f.Name]++; seen[f.Name] > 1 {
			all[i].Name = fmt.Sprintf("%s-%d", f.Name, seen[f.Name])
		}
		if f.Level != backend.LevelOK && f.Remedy == "" {
			all[i].Remedy = "see docs/proxmox.md"
		}
	}
	return all
}

// needs returns the rights that this configuration needs of a token. Templates
// are read on the given nodes.
func (d *Driver) needs(ctx context.Context, online []*Node) pve.Needs {
	n := pve.Needs{TokenID: d.cfg.TokenID, Pool: d.cfg.Pool, Bridges: []string{d.cfg.Bridge}, FreeMemory: len(d.cfg.Nodes) > 1, Firewall: d.cfg.Firewall}
	for i := range d.cfg.Nodes {
		node := &d.cfg.Nodes[i]
		n.Nodes = append(n.Nodes, node.Name)
		for _, vmid := range node.Templates {
			n.Templates = append(n.Templates, vmid)
			if !slices.Contains(online, node) {
				continue
			}
			if t, err := d.template(ctx, node.Name, vmid); err == nil {
				n.Storages = append(n.Storages, d.storagesOf(t)...)
				if s := t.cfg["vmstatestorage"]; s != "" { // Proxmox refuses a clone without rights on it, although nothing is written there
					n.Storages = append(n.Storages, s)
				}
				if bridge, ok := pve.ParseProps(t.cfg["net0"]).Get("bridge"); ok {
					n.Bridges = append(n.Bridges, bridge)
				}
			}
		}
	}
	for _, list := range []*[]string{&n.Storages, &n.Bridges} {
		slices.Sort(*list)
		*list = slices.Compact(*list)
	}
	slices.Sort(n.Templates)
	n.Templates = slices.Compact(n.Templates)
	return n
}

func finding(name string, level backend.Level, remedy, format string, args ...any) backend.Finding {
	return backend.Finding{Name: name, Level: level, Detail: fmt.Sprintf(format, args...), Remedy: remedy}
}

func broken(name string, err error) backend.Finding {
	return finding(name, backend.LevelError, agentlab.HintOf(err), "%s", err)
}

// checkTemplates checks the templates of a node. An image may be missing on
// one node. It is an error if no template is usable, unless one of them could
// not be read.
func (d *Driver) checkTemplates(ctx context.Context, n *Node) []backend.Finding {
	var out []backend.Finding
	good, unknown := 0, 0
	for _, image := range slices.Sorted(maps.Keys(n.Templates)) {
		vmid := n.Templates[image]
		name := "template-" + image
		t, err := d.template(ctx, n.Name, vmid)
		if err != nil {
			f := broken(name, err)
			f.Level = backend.LevelWarn
			out = append(out, f)
			if code := agentlab.CodeOf(err); code != agentlab.CodeNotFound && code != agentlab.CodeUnsupported {
				unknown++
			}
			continue
		}
		good++
		out = append(out, finding(name, backend.LevelOK, "", "VM %d on node %s (%s)", vmid, n.Name, clip(t.cfg["name"])))
	}
	switch {
	case good > 0 || len(d.cfg.Nodes) > 1:
	case unknown > 0:
		out = append(out, finding("templates", backend.LevelWarn, "fix the finding of that template first, then check again", "unknown: a template of node %s could not be read", n.Name))
	default:
		out = append(out, finding("templates", backend.LevelError, "scripts/create_template.sh --apply", "node %s has no usable template", n.Name))
	}
	return out
}

func (d *Driver) checkNetwork(ctx context.Context, n *Node) backend.Finding {
	name := "network-" + n.Name
	if n.Host == nil {
		return finding(name, backend.LevelError, "run the daemon on the node, or remove the node from proxmox.nodes",
			"the network of node %s cannot be managed from this host", n.Name)
	}
	host, err := d.network(ctx, n.Name)
	if err == nil {
		err = host.Ready(ctx)
	}
	if err != nil {
		f := broken(name, err)
		if f.Remedy == "" {
			f.Remedy = "agentlab host network apply"
		}
		return f
	}
	return finding(name, backend.LevelOK, "", "policies are enforced on %s", d.cfg.Bridge)
}

// leastFree is the minimum free space of a storage for sandboxes' disks, in
// bytes.
const leastFree = 5 << 30

func (d *Driver) checkStorages(ctx context.Context, nodes []*Node) []backend.Finding {
	var out []backend.Finding
	for _, n := range nodes {
		var names []string
		for _, vmid := range n.Templates {
			if t, err := d.template(ctx, n.Name, vmid); err == nil {
				names = append(names, d.storagesOf(t)...)
			}
		}
		slices.Sort(names)
		for _, storage := range slices.Compact(names) {
			out = append(out, d.checkStorage(ctx, n.Name, storage))
		}
	}
	return out
}

// checkSnippets checks the storage for snippets where the daemon runs: its
// content types must include snippets, and its directory must be readable.
func (d *Driver) checkSnippets(ctx context.Context, nodes []*Node) []backend.Finding {
	root := d.pve.Root()
	if root == nil || len(nodes) == 0 {
		return nil
	}
	const name = "snippets"
	storage := root.SnippetsStorage()
	if i := slices.IndexFunc(nodes, func(n *Node) bool { return n.Local }); i >= 0 {
		nodes = nodes[i : i+1]
	}
	var st pve.Storage
	var err error
	for _, n := range nodes { // the daemon's node, or any if it is not configured
		if st, err = d.pve.StorageStatus(ctx, n.Name, storage); err == nil {
			break
		}
	}
	switch {
	case err != nil:
		return []backend.Finding{broken(name, err)}
	case !st.Holds("snippets"):
		return []backend.Finding{finding(name, backend.LevelError, "pvesm set "+storage+" --content "+string(st.Content)+",snippets",
			"storage %s does not allow snippets (%s)", storage, clip(string(st.Content)))}
	}
	if _, err := root.Snippets(ctx); err != nil {
		return []backend.Finding{broken(name, err)}
	}
	return []backend.Finding{finding(name, backend.LevelOK, "", "storage %s allows snippets, and its snippets are readable", storage)}
}

// checkSnippetsOn checks whether a node can read the snippets, which the
// daemon writes on its own node.
func (d *Driver) checkSnippetsOn(ctx context.Context, n *Node) []backend.Finding {
	root := d.pve.Root()
	if root == nil || n.Local || n.Host == nil { // without Host no sandbox runs there
		return nil
	}
	name, storage := "snippets-"+n.Name, root.SnippetsStorage()
	st, err := d.pve.StorageStatus(ctx, n.Name, storage)
	switch {
	case err != nil:
		return []backend.Finding{broken(name, err)}
	case !bool(st.Shared):
		return []backend.Finding{finding(name, backend.LevelError,
			"set proxmox.snippets_storage in config.yaml to a storage that all nodes share, or remove the node from proxmox.nodes; if the directory of storage "+storage+" is on a shared file system: pvesm set "+storage+" --shared 1",
			"storage %s is not shared, so node %s cannot read the snippets that the daemon writes on its own node", storage, n.Name)}
	case !bool(st.Active):
		return []backend.Finding{finding(name, backend.LevelError, "mount or activate storage "+storage+" on node "+n.Name,
			"storage %s is not active on node %s, which cannot read the snippets there", storage, n.Name)}
	}
	return []backend.Finding{finding(name, backend.LevelOK, "", "node %s can read the snippets of storage %s", n.Name, storage)}
}

func (d *Driver) checkStorage(ctx context.Context, node, storage string) backend.Finding {
	name := "storage-" + storage
	st, err := d.pve.StorageStatus(ctx, node, storage)
	switch {
	case err != nil:
		return broken(name, err)
	case !bool(st.Active) || !st.Holds("images"):
		return finding(name, backend.LevelError, "activate the storage and allow the content type images: pvesm set "+storage+" --content images",
			"the storage is not active or does not allow disk images (%s)", clip(string(st.Content)))
	case st.Total > 0 && st.Avail < leastFree:
		return finding(name, backend.LevelWarn, "free space on the storage or destroy sandboxes", "%d MiB are free", st.Avail>>20)
	}
	if _, err := d.pve.Content(ctx, node, storage, "images", 0); err != nil {
		if file := pve.UnreadableFile(err); file != "" {
			return finding(name, backend.LevelWarn, "repair the file or move it out of the storage; sandboxes can still be created",
				"the file %s is damaged, and Proxmox cannot list the volumes: %s", clip(file), clip(err.Error()))
		}
		return finding(name, backend.LevelWarn, agentlab.HintOf(err), "cannot list the volumes: %s", clip(err.Error()))
	}
	return finding(name, backend.LevelOK, "", "%s, %s free", st.Type, strings.TrimSpace(fmt.Sprintf("%d GiB", st.Avail>>30)))
}

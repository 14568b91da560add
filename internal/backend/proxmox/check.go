package proxmox

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
)

// Check implements backend.Driver.
func (d *Driver) Check(ctx context.Context) []backend.Finding {
	out := d.pve.Preflight(ctx, d.needs(ctx))
	if i := slices.IndexFunc(out, func(f backend.Finding) bool { return f.Level == backend.LevelError }); i >= 0 {
		// Templates that could not be read are not missing.
		return named(append(out, finding("templates", backend.LevelWarn, "fix the finding "+out[i].Name+" first, then check again",
			"unknown: templates were not checked because of finding %s", out[i].Name)))
	}
	for i := range d.cfg.Nodes {
		n := &d.cfg.Nodes[i]
		out = append(out, d.checkTemplates(ctx, n)...)
		out = append(out, d.checkNetwork(ctx, n))
	}
	out = append(out, d.checkFirewall(ctx)...)
	out = append(out, d.checkSnippets(ctx)...)
	return named(append(out, d.checkStorages(ctx)...))
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

// needs returns the rights that this configuration needs of a token.
func (d *Driver) needs(ctx context.Context) pve.Needs {
	n := pve.Needs{TokenID: d.cfg.TokenID, Pool: d.cfg.Pool, Bridges: []string{d.cfg.Bridge}, FreeMemory: len(d.cfg.Nodes) > 1, Firewall: d.cfg.Firewall}
	for i := range d.cfg.Nodes {
		node := &d.cfg.Nodes[i]
		n.Nodes = append(n.Nodes, node.Name)
		for _, vmid := range node.Templates {
			n.Templates = append(n.Templates, vmid)
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
	for _, image := range sortedKeys(n.Templates) {
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

func sortedKeys(m map[string]int) []string {
	var out []string
	for k := range m {
		out = append(out, k)
	}
	slices.Sort(out)
	return out
}

func (d *Driver) checkNetwork(ctx context.Context, n *Node) backend.Finding {
	name := "network-" + n.Name
	if n.Host == nil {
		level := backend.LevelWarn
		if len(d.cfg.Nodes) == 1 {
			level = backend.LevelError
		}
		return finding(name, level, "run the daemon on the node, or remove the node from proxmox.nodes",
			"the network of node %s cannot be managed from this host: no sandbox is started there", n.Name)
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

func (d *Driver) checkStorages(ctx context.Context) []backend.Finding {
	var out []backend.Finding
	for i := range d.cfg.Nodes {
		n := &d.cfg.Nodes[i]
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

// checkSnippets checks the storage for snippets: its content types must
// include snippets, its directory must be readable, and it must be shared if
// sandboxes run on several nodes.
func (d *Driver) checkSnippets(ctx context.Context) []backend.Finding {
	root := d.pve.Root()
	if root == nil {
		return nil
	}
	const name = "snippets"
	storage := root.SnippetsStorage()
	nodes := slices.DeleteFunc(slices.Clone(d.cfg.Nodes), func(n Node) bool { return n.Host == nil }) // no sandbox runs there
	for _, n := range nodes {
		st, err := d.pve.StorageStatus(ctx, n.Name, storage)
		switch {
		case err != nil:
			return []backend.Finding{broken(name, err)}
		case !st.Holds("snippets"):
			return []backend.Finding{finding(name, backend.LevelError, "pvesm set "+storage+" --content "+string(st.Content)+",snippets",
				"storage %s does not allow snippets (%s)", storage, clip(string(st.Content)))}
		case len(nodes) > 1 && !bool(st.Shared):
			return []backend.Finding{finding(name, backend.LevelError, "set proxmox.snippets_storage in config.yaml to a storage that all nodes share, or remove the other nodes from proxmox.nodes",
				"storage %s is not shared: a VM on another node than the daemon's cannot start, because its snippet is not there", storage)}
		}
	}
	if _, err := root.Snippets(ctx); err != nil {
		return []backend.Finding{broken(name, err)}
	}
	return []backend.Finding{finding(name, backend.LevelOK, "", "storage %s allows snippets, and its snippets are readable", storage)}
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

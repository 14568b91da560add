package pve

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// Needs are the requirements of a caller, for Preflight.
type Needs struct {
	// TokenID is the token that calls (USER@REALM!NAME); "" for the shell
	// transport, whose caller is root.
	TokenID string
	Nodes   []string // that must be online
	// Templates are cloned. New VMs are added to Pool; if it is "", the caller
	// needs the rights to change every VM of the cluster. Their disks are on
	// Storages. Their network devices, and those of the templates, are on
	// Bridges.
	Templates []int
	Pool      string
	Storages  []string
	Bridges   []string
	// Options is added to the privileges on new VMs, e.g. VM.Config.HWType.
	Options []string
	// FreeMemory means that the nodes' load is read for placement, which
	// needs Sys.Audit if there are several nodes.
	FreeMemory bool
	// Firewall means that sandboxes use Proxmox's own firewall, whose state is
	// read.
	Firewall bool
}

// Grant is the privileges that a token needs on one path.
type Grant struct {
	Path       string
	Privileges []string // all of them are needed
	Why        string
	Optional   bool // sandboxes run without them
}

// Grants returns the minimum rights for n with a version of Proxmox VE.
func (n Needs) Grants(v Version) []Grant {
	// VM.Config.Network also covers the options of cloud-init.
	onVM := []string{
		"VM.Allocate", "VM.Audit", "VM.Config.CPU", "VM.Config.Disk", "VM.Config.Memory",
		"VM.Config.Network", "VM.Config.Options", "VM.PowerMgmt",
	}
	onVM = append(onVM, n.Options...)
	if v.AtLeast(9, 0) { // version 9 has split VM.Monitor
		onVM = append(onVM, "VM.GuestAgent.Audit", "VM.GuestAgent.FileWrite")
	} else {
		onVM = append(onVM, "VM.Monitor")
	}
	g := Grant{Path: "/vms", Privileges: onVM, Why: "to create, configure, start and destroy sandboxes"}
	if n.Pool != "" {
		g.Path = "/pool/" + n.Pool
	}
	grants := []Grant{g}
	for _, t := range n.Templates {
		grants = append(grants, Grant{Path: fmt.Sprintf("/vms/%d", t), Privileges: []string{"VM.Audit", "VM.Clone"}, Why: "to clone the template"})
	}
	for _, s := range n.Storages {
		grants = append(grants, Grant{Path: "/storage/" + s, Privileges: []string{"Datastore.AllocateSpace", "Datastore.Audit"}, Why: "for the disks of sandboxes"})
	}
	for _, b := range n.Bridges {
		grants = append(grants, Grant{Path: "/sdn/zones/localnetwork/" + b, Privileges: []string{"SDN.Use"}, Why: "for network devices on the bridge"})
	}
	if n.FreeMemory {
		for _, name := range n.Nodes {
			grants = append(grants, Grant{Path: "/nodes/" + name, Privileges: []string{"Sys.Audit"}, Why: "to place sandboxes by free memory", Optional: true})
		}
	}
	if n.Firewall {
		grants = append(grants, Grant{Path: "/", Privileges: []string{"Sys.Audit"}, Why: "to read whether the cluster's firewall is on; required for firewall_group", Optional: true})
	}
	grants = append(grants, Grant{
		Path: g.Path, Privileges: []string{"VM.Clone", "VM.Snapshot"}, Why: "for snapshots of sandboxes and copies of them", Optional: true,
	})
	for i := range grants {
		slices.Sort(grants[i].Privileges)
		grants[i].Privileges = slices.Compact(grants[i].Privileges)
	}
	return grants
}

// Missing returns the part of a grant that the permissions lack.
func (p Permissions) Missing(g Grant) []string {
	var missing []string
	for _, priv := range g.Privileges {
		if !p.holds(g.Path, priv) {
			missing = append(missing, priv)
		}
	}
	return missing
}

// holds is Has that also accepts equivalent privileges: a privilege on every
// VM includes those of a pool, and VM.GuestAgent.Unrestricted includes all
// others of the guest agent.
func (p Permissions) holds(path, priv string) bool {
	const anyVM = "/vms/999999999"
	paths := []string{path}
	switch {
	case path == "/vms": // a privilege that is not inherited has no effect there
		paths = []string{anyVM}
	case strings.HasPrefix(path, "/pool/") && strings.HasPrefix(priv, "VM."):
		paths = append(paths, anyVM)
	}
	return slices.ContainsFunc(paths, func(at string) bool {
		return p.Has(at, priv) || strings.HasPrefix(priv, "VM.GuestAgent.") && p.Has(at, "VM.GuestAgent.Unrestricted")
	})
}

// Preflight checks whether this client can do what n needs: identity on the
// node, version, nodes, and for a token each missing privilege, with the
// commands that grant it. It changes nothing. The findings are in the order in
// which to fix them. It ends after an error that hides the rest.
func (c *Client) Preflight(ctx context.Context, n Needs) []backend.Finding {
	var out []backend.Finding
	if c.Root() != nil {
		f := identityFinding(os.Geteuid(), os.Getegid())
		out = append(out, f)
		if f.Level == backend.LevelError {
			return out
		}
	}
	v, err := c.Version(ctx)
	if err != nil {
		return append(out, failedFinding("proxmox-api", err))
	}
	out = append(out, versionFinding(v))
	if !v.AtLeast(8, 0) {
		return out
	}
	out = append(out, c.nodeFindings(ctx, n.Nodes)...)
	if n.TokenID == "" {
		return out
	}
	perms, err := c.Permissions(ctx)
	if err != nil {
		return append(out, failedFinding("proxmox-privileges", err))
	}
	return append(out, privilegeFindings(n, n.Grants(v), perms)...)
}

func failedFinding(name string, err error) backend.Finding {
	return backend.Finding{Name: name, Level: backend.LevelError, Detail: err.Error(), Remedy: agentlab.HintOf(err)}
}

// identityFinding checks the access to the cluster file system of a node (pmxcfs):
// root with root's group may write, group www-data may read, other users have
// no access. If this process is root, it runs programs with root's group, so
// only the user matters.
func identityFinding(uid, gid int) backend.Finding {
	f := backend.Finding{Name: "proxmox-identity", Level: backend.LevelOK}
	switch {
	case uid != 0:
		f.Level = backend.LevelError
		f.Detail = fmt.Sprintf("the daemon runs as user %d, and only root can use pvesh and the cluster file system", uid)
		f.Remedy = "run agentlabd as root on the node (systemctl start agentlabd), or use proxmox.transport: rest with a token"
	case gid != 0:
		f.Detail = fmt.Sprintf("root with group %d; programs of Proxmox VE are run with group root, which the cluster file system requires", gid)
	default:
		f.Detail = "root with group root"
	}
	return f
}

func versionFinding(v Version) backend.Finding {
	f := backend.Finding{Name: "proxmox-version", Level: backend.LevelOK, Detail: "Proxmox VE " + v.Text}
	switch {
	case !v.AtLeast(8, 0):
		f.Level, f.Remedy = backend.LevelError, "upgrade the node to Proxmox VE 8.4 or 9"
	case v.Major > 9:
		f.Level, f.Remedy = backend.LevelWarn, "this version is not tested; tested versions are 8.4 and 9.2"
	case v.Major == 8 && v.Minor < 4:
		f.Level, f.Remedy = backend.LevelWarn, "versions 8.0 to 8.3 are not tested; upgrade to 8.4"
	}
	return f
}

func (c *Client) nodeFindings(ctx context.Context, want []string) []backend.Finding {
	nodes, err := c.Nodes(ctx)
	if err != nil {
		return []backend.Finding{failedFinding("proxmox-nodes", err)}
	}
	var out []backend.Finding
	known := make([]string, 0, len(nodes))
	for _, n := range nodes {
		known = append(known, n.Name)
	}
	for _, name := range want {
		i := slices.Index(known, name)
		switch {
		case i < 0:
			out = append(out, backend.Finding{
				Name: "proxmox-nodes", Level: backend.LevelError, Detail: "the cluster has no node " + name,
				Remedy: "set proxmox.nodes to one or more of: " + strings.Join(known, ", "),
			})
		case nodes[i].Status == "offline":
			out = append(out, backend.Finding{
				Name: "proxmox-nodes", Level: backend.LevelWarn, Detail: "node " + name + " is offline",
				Remedy: "start the node or remove it from proxmox.nodes",
			})
		}
	}
	if len(out) == 0 {
		out = append(out, backend.Finding{Name: "proxmox-nodes", Level: backend.LevelOK, Detail: strings.Join(want, ", ")})
	}
	return out
}

// privilegeFindings compares the needed privileges with the existing ones.
func privilegeFindings(n Needs, grants []Grant, perms Permissions) []backend.Finding {
	var out []backend.Finding
	for _, g := range grants {
		missing := perms.Missing(g)
		if len(missing) == 0 {
			continue
		}
		level := backend.LevelError
		if g.Optional {
			level = backend.LevelWarn
		}
		out = append(out, backend.Finding{
			Name: "proxmox-privileges", Level: level,
			Detail: fmt.Sprintf("%s lacks %s on %s (%s)", n.TokenID, strings.Join(missing, ", "), g.Path, g.Why),
			Remedy: "on the node: " + strings.Join(grantCommands(n.TokenID, g.Path, missing), " && "),
		})
	}
	if len(out) == 0 {
		out = append(out, backend.Finding{Name: "proxmox-privileges", Level: backend.LevelOK, Detail: n.TokenID + " has the required privileges"})
	}
	return out
}

// grantCommands returns the commands that grant privileges on a path. A token
// with privilege separation has only privileges that its user has too, so both
// get them. The name of the role depends on its privileges, so an existing
// role with that name is the right one; then "role add" fails and is not
// needed.
func grantCommands(token, path string, privileges []string) []string {
	user, _, _ := strings.Cut(token, "!")
	list := strings.Join(privileges, ",")
	sum := sha256.Sum256([]byte(list))
	role := "AgentLab-" + hex.EncodeToString(sum[:4])
	if path == "/" {
		path += " --propagate 0" // not on paths below
	}
	return []string{
		fmt.Sprintf("pveum role add %s --privs %s", role, list),
		fmt.Sprintf("pveum acl modify %s --users %s --roles %s", path, user, role),
		fmt.Sprintf("pveum acl modify %s --tokens '%s' --roles %s", path, token, role),
	}
}

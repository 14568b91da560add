package pve

import (
	"context"
	"fmt"
	"net/url"
	"strconv"
	"strings"

	"github.com/agentlab-vm/agentlab"
)

// Version is the version of Proxmox VE of the node that answers.
type Version struct {
	Major, Minor int
	Text         string // e.g. "8.4.21"
}

// String implements fmt.Stringer.
func (v Version) String() string { return v.Text }

// AtLeast reports whether the version is major.minor or later.
func (v Version) AtLeast(major, minor int) bool {
	return v.Major > major || v.Major == major && v.Minor >= minor
}

// Version asks for the version; it needs no privilege.
func (c *Client) Version(ctx context.Context) (Version, error) {
	var out struct {
		Version Str `json:"version"`
		Release Str `json:"release"`
	}
	if err := c.call(ctx, "read the version", Get, "/version", nil, &out); err != nil {
		return Version{}, err
	}
	return parseVersion(string(out.Version), string(out.Release))
}

// parseVersion reads a version like "8.4.21", else a release like "8.4".
func parseVersion(texts ...string) (Version, error) {
	for _, s := range texts {
		s = agentlab.OneLine(s, 40)
		number, _, _ := strings.Cut(s, "-") // 7.4-17
		f := strings.Split(number, ".")
		major, err := strconv.Atoi(f[0])
		if err != nil || major <= 0 {
			continue
		}
		v := Version{Major: major, Text: s}
		if len(f) > 1 {
			v.Minor, _ = strconv.Atoi(f[1]) // without a number it is .0
		}
		return v, nil
	}
	return Version{}, agentlab.Errorf(agentlab.CodeInternal, "invalid version %q of the node", agentlab.OneLine(fmt.Sprint(texts), 80))
}

// Node is a member of the cluster.
type Node struct {
	Name   string `json:"node"`
	Status string `json:"status"` // online, offline, unknown
	MaxMem Int    `json:"maxmem"` // bytes; 0: not known
	Mem    Int    `json:"mem"`    // used
}

// FreeMem returns the free memory in bytes, 0 if not known.
func (n Node) FreeMem() int64 { return max(int64(n.MaxMem-n.Mem), 0) }

// Nodes lists the nodes; it needs no privilege.
func (c *Client) Nodes(ctx context.Context) ([]Node, error) {
	return list[Node](ctx, c, "list nodes", "/nodes", nil)
}

// Permissions are the caller's effective privileges: a map from path to
// privilege to whether it also applies below that path. For a token with
// privilege separation they are the privileges that both the token and its
// user have.
type Permissions map[string]map[string]Bool

// Permissions reads the caller's own privileges; it needs no privilege.
func (c *Client) Permissions(ctx context.Context) (Permissions, error) {
	var out Permissions
	err := c.call(ctx, "read the permissions", Get, "/access/permissions", nil, &out)
	return out, err
}

// Has reports whether the caller has a privilege on a path: the path's own
// entry decides, otherwise that of the nearest path above it with an entry, if
// it is inherited.
func (p Permissions) Has(path, privilege string) bool {
	for at := path; ; {
		if privs, ok := p[at]; ok {
			down, held := privs[privilege]
			return held && (at == path || bool(down))
		}
		if at == "/" || at == "" {
			return false
		}
		at = at[:strings.LastIndexByte(at, '/')]
		if at == "" {
			at = "/"
		}
	}
}

// Guest is an entry of the cluster's list of VMs and containers.
type Guest struct {
	VMID    Int    `json:"vmid"`
	Type    string `json:"type"` // qemu, lxc
	Node    string `json:"node"`
	Name    Str    `json:"name"` // may be missing or outdated
	TagList Str    `json:"tags"`
	Lock    string `json:"lock"`
}

// Container reports whether the guest is a container.
func (g Guest) Container() bool { return g.Type == "lxc" }

// Guests returns the VMs and containers of the whole cluster that the caller
// may see (VM.Audit). The answering node has the configurations of all nodes,
// so the list does not depend on another node: numbers, nodes, tags and locks
// are current.
func (c *Client) Guests(ctx context.Context) ([]Guest, error) {
	return list[Guest](ctx, c, "list the guests of the cluster", "/cluster/resources", url.Values{"type": {"vm"}})
}

// Free reports whether no VM and no container of the whole cluster has a
// number. It reserves nothing, does not check leftover volumes, and needs no
// privilege.
func (c *Client) Free(ctx context.Context, vmid int) (bool, error) {
	var out Int
	err := c.call(ctx, "check whether VMID "+strconv.Itoa(vmid)+" is free", Get, "/cluster/nextid", url.Values{"vmid": {strconv.Itoa(vmid)}}, &out)
	switch {
	case err == nil && int(out) == vmid:
		return true, nil
	case err == nil:
		return false, agentlab.Errorf(agentlab.CodeInternal, "check whether VMID %d is free: the node answered for VMID %d", vmid, out)
	case agentlab.CodeOf(err) == agentlab.CodeExists:
		return false, nil
	}
	return false, err
}

package pve

import (
	"context"
	"net/url"
)

// DisableFirewall disables Proxmox's own firewall rules of a VM, which a clone
// inherits from its template.
func (c *Client) DisableFirewall(ctx context.Context, node string, vmid int) error {
	return c.vmCall(ctx, "turn off the firewall of", Put, node, vmid, "firewall/options", url.Values{"enable": {"0"}}, nil)
}

// SetFirewallGroup assigns a security group of Proxmox to a VM and enables its
// firewall. It takes effect only with firewall=1 on the network device and if
// the cluster's firewall is on. Proxmox does not check that the group exists.
func (c *Client) SetFirewallGroup(ctx context.Context, node string, vmid int, group string) error {
	rules, err := c.FirewallRules(ctx, node, vmid)
	if err != nil {
		return err
	}
	there := false
	for _, r := range rules {
		there = there || r.Type == "group" && r.Action == group && bool(r.Enable)
	}
	if !there {
		err := c.vmCall(ctx, "add a security group to", Post, node, vmid, "firewall/rules",
			url.Values{"type": {"group"}, "action": {group}, "enable": {"1"}}, nil)
		if err != nil {
			return err
		}
	}
	return c.vmCall(ctx, "turn on the firewall of", Put, node, vmid, "firewall/options", url.Values{"enable": {"1"}}, nil)
}

// FirewallRule is one rule of a VM.
type FirewallRule struct {
	Type   string `json:"type"` // in, out, group
	Action string `json:"action"`
	Enable Bool   `json:"enable"`
}

// FirewallRules lists the rules of a VM.
func (c *Client) FirewallRules(ctx context.Context, node string, vmid int) ([]FirewallRule, error) {
	return list[FirewallRule](ctx, c, vmWhat("list firewall rules of", vmid), vmPath(node, vmid, "firewall/rules"), nil)
}

// ClusterFirewall reports whether the firewall of the whole cluster is on. If
// it is off, no rule of any VM is applied. It needs Sys.Audit on /.
func (c *Client) ClusterFirewall(ctx context.Context) (on bool, err error) {
	var out struct {
		Enable Int `json:"enable"` // not set means off
	}
	err = c.call(ctx, "read the options of the cluster's firewall", Get, "/cluster/firewall/options", nil, &out)
	return out.Enable != 0, err
}

// SecurityGroups lists the names of the cluster's security groups; it needs no
// privilege.
func (c *Client) SecurityGroups(ctx context.Context) ([]string, error) {
	type group struct {
		Name string `json:"group"`
	}
	all, err := list[group](ctx, c, "list security groups", "/cluster/firewall/groups", nil)
	names := make([]string, 0, len(all))
	for _, g := range all {
		names = append(names, g.Name)
	}
	return names, err
}

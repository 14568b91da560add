package proxmox

import (
	"context"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// checkGroup rejects a security group that would have no effect: Proxmox
// accepts the name of a group that does not exist, and applies no rules of VMs
// while the firewall of the cluster is off. If the settings cannot be read, the
// group is rejected too.
func (d *Driver) checkGroup(ctx context.Context, group string) error {
	if group == "" {
		return nil
	}
	const field = "network.firewall_group"
	groups, err := d.pve.SecurityGroups(ctx)
	if err != nil {
		return err
	}
	if !slices.Contains(groups, group) {
		return agentlab.Errorf(agentlab.CodeUnsupported, "Proxmox VE has no security group %q", group).WithField(field).
			WithHint("create the group under Datacenter, Firewall, Security Group, or remove firewall_group from the profile")
	}
	on, err := d.pve.ClusterFirewall(ctx)
	switch {
	case agentlab.CodeOf(err) == agentlab.CodeDenied:
		return agentlab.Errorf(agentlab.CodeDenied, "cannot determine whether security group %q takes effect: %w", group, err).WithField(field).
			WithHint("let the token read the cluster's options: pveum acl modify / --propagate 0 --roles PVEAuditor --users %s --tokens '%s'", tokenUser(d.cfg.TokenID), d.cfg.TokenID)
	case err != nil:
		return err
	case !on:
		return agentlab.Errorf(agentlab.CodeUnsupported, "the firewall of the cluster is off, so security group %q would have no effect", group).WithField(field).
			WithHint("turn it on under Datacenter, Firewall, Options (it also filters the nodes: first make sure that you keep access to them), or remove firewall_group from the profile")
	}
	return nil
}

// tokenUser returns the user of a token.
func tokenUser(token string) string {
	user, _, _ := strings.Cut(token, "!")
	return user
}

// checkFirewall checks that the cluster's firewall is enabled, if sandboxes
// use it.
func (d *Driver) checkFirewall(ctx context.Context) []backend.Finding {
	if !d.cfg.Firewall {
		return nil
	}
	const name = "proxmox-firewall"
	on, err := d.pve.ClusterFirewall(ctx)
	switch {
	case err != nil:
		f := broken(name, err)
		f.Level = backend.LevelWarn
		return []backend.Finding{f}
	case !on:
		return []backend.Finding{finding(name, backend.LevelWarn, "turn it on under Datacenter, Firewall, Options, or remove proxmox.firewall",
			"proxmox.firewall is set, but the firewall of the cluster is off: groups have no effect, and profiles with network.firewall_group are rejected")}
	}
	return []backend.Finding{finding(name, backend.LevelOK, "", "the firewall of the cluster is on")}
}

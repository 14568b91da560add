package proxmox

import (
	"errors"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
	"github.com/agentlab-vm/agentlab/test/sample"
)

// firewall makes a security group, turns the cluster's firewall on, and lets
// the driver's token see it.
func (w *world) firewall(t *testing.T, group string) {
	t.Helper()
	ok(t, "group", w.admin(t, pve.Post, "/cluster/firewall/groups", map[string][]string{"group": {group}}))
	w.clusterFirewall(t, "1")
	w.auditor(t)
}

func (w *world) clusterFirewall(t *testing.T, enable string) {
	t.Helper()
	ok(t, "switch", w.admin(t, pve.Put, "/cluster/firewall/options", map[string][]string{"enable": {enable}}))
}

func (w *world) auditor(t *testing.T) {
	t.Helper()
	if w.shell {
		return
	}
	ok(t, "role", w.node.AddRole("Auditor", "Sys.Audit"))
	w.node.Grant("/", "agentlab@pve", "Auditor")
	w.node.Grant("/", w.tokenID, "Auditor")
}

// Trap 26: Proxmox takes the name of a security group that does not exist, and
// applies no rule while the cluster's firewall is off. A sandbox that was to be
// under a group is not made, nor started, without it.
func TestTrap26GroupWithoutEffect(t *testing.T) {
	both(t, func(t *testing.T, shell bool) {
		w := newWorld(t, worldConfig{shell: shell})
		spec := w.spec(1)
		spec.Options = `{"firewall_group":"agents"}`
		refused := func(what string, err error, code agentlab.Code, words string) {
			t.Helper()
			wantCode(t, what, err, code)
			e, is := errors.AsType[*agentlab.Error](err)
			if !is || !strings.Contains(err.Error(), words) || e.Field != "network.firewall_group" || e.Hint == "" {
				t.Errorf("%s: %v (%+v)", what, err, e)
			}
		}
		refused("no such group", w.driver.Create(t.Context(), spec), agentlab.CodeUnsupported, "no security group")
		ok(t, "group", w.admin(t, pve.Post, "/cluster/firewall/groups", map[string][]string{"group": {"agents"}}))
		if !shell {
			err := w.driver.Create(t.Context(), spec)
			refused("the token may not look", err, agentlab.CodeDenied, "cannot determine")
			if hint := agentlab.HintOf(err); !strings.Contains(hint, "pveum acl modify / --propagate 0") {
				t.Errorf("hint %q", hint)
			}
			w.auditor(t)
		}
		refused("the firewall is off", w.driver.Create(t.Context(), spec), agentlab.CodeUnsupported, "is off")
		if left := w.left(t); len(left) > 0 {
			t.Errorf("left: %q", left)
		}

		w.clusterFirewall(t, "1")
		ok(t, "Create", w.driver.Create(t.Context(), spec))
		w.clusterFirewall(t, "0")
		refused("Start with the firewall off", w.driver.Start(t.Context(), spec.Ref()), agentlab.CodeUnsupported, "is off")
		if in := w.inspect(t, spec.Ref()); in.Power != backend.PowerStopped {
			t.Errorf("%+v", in)
		}
		w.clusterFirewall(t, "1")
		ok(t, "Start", w.driver.Start(t.Context(), spec.Ref()))
		ok(t, "Destroy", w.driver.Destroy(t.Context(), spec.Ref()))
	})
}

func TestCheckFirewall(t *testing.T) {
	w := newWorld(t, worldConfig{alter: func(c *Config) { c.Firewall = true }})
	if f := findingOf(t, w, "proxmox-firewall"); f.Level != backend.LevelWarn {
		t.Errorf("of a token that may not look: %+v", f)
	}
	w.auditor(t)
	if f := findingOf(t, w, "proxmox-firewall"); f.Level != backend.LevelWarn || !strings.Contains(f.Detail, "off") {
		t.Errorf("off: %+v", f)
	}
	w.clusterFirewall(t, "1")
	if f := findingOf(t, w, "proxmox-firewall"); f.Level != backend.LevelOK {
		t.Errorf("on: %+v", f)
	}
}

// The storage of snippets must allow them: that the directory can be read says
// nothing.
func TestCheckSnippets(t *testing.T) {
	sample.Long(t, "it runs the programs of a node")
	w := newWorld(t, worldConfig{shell: true})
	if f := findingOf(t, w, "snippets"); f.Level != backend.LevelOK {
		t.Errorf("allowed: %+v", f)
	}
	w.node.SetContent("local", "images", "iso")
	f := findingOf(t, w, "snippets")
	if f.Level != backend.LevelError || !strings.Contains(f.Remedy, "pvesm set local --content") || !strings.Contains(f.Remedy, ",snippets") {
		t.Errorf("not allowed: %+v", f)
	}
}

//go:build linux

package control_test

import (
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/guest/guestd"
	"github.com/agentlab-vm/agentlab/test/guard"
)

// A guest tests KVM if its identity wants it, shares the device with the agent's user,
// and runs a job that requires it only if it works, also after its server was started
// again.
func TestNested(t *testing.T) {
	for _, c := range []struct {
		wanted string
		kvm    agentlab.NestedState
		state  string
		runs   bool
	}{
		{"", agentlab.NestedWorks, "", true},
		{"auto", agentlab.NestedWorks, "works", true},
		{"auto", agentlab.NestedNoModule, "no-module", true},
		{"on", agentlab.NestedWorks, "works", true},
		{"on", agentlab.NestedNoVM, "no-vm", false},
	} {
		t.Run(c.wanted+" "+c.state, func(t *testing.T) {
			// A runner can start when the test has ended. It creates nothing then.
			started := filepath.Join(t.TempDir(), "started")
			if err := os.WriteFile(started, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			g := newGuest(t, func(cfg *guestd.Config) { cfg.Runner = []string{"truncate", "--no-create", "--size=1", started} })
			g.kernel.kvm = c.kvm
			g.put(t, "etc/group", "other:x:7:\nkvm:x:4711:"+g.me.Username+"\n")
			id := identity()
			id.Nested, id.Bootstrap = c.wanted, &guestapi.Bootstrap{Token: "t", Controller: "c", VMID: 1}
			h, err := g.SetIdentity(guard.Context(t), id)
			if err != nil || h.Nested != c.state {
				t.Fatalf("%q, %v", h.Nested, err)
			}
			runs := func() bool { fi, err := os.Stat(started); return err == nil && fi.Size() > 0 }
			g.stop()
			g.start(t)
			if c.runs {
				guard.Until(t, "start of the runner", runs)
			}
			if h, err = g.Health(guard.Context(t)); err != nil || h.Nested != c.state || runs() != c.runs {
				t.Errorf("after a restart: %q, %v, the runner was started: %t", h.Nested, err, runs())
			}
			group := 0
			if c.state == "works" {
				group = 4711
			}
			if g.kernel.kvmGroup != group {
				t.Errorf("the device belongs to group %d, want %d", g.kernel.kvmGroup, group)
			}
		})
	}
}

// Without a group kvm, the device belongs to the group of the agent's user. What an
// earlier identity had is not reported.
func TestNestedGroupOfTheUser(t *testing.T) {
	g := newGuest(t, nil)
	g.kernel.kvm = agentlab.NestedWorks
	id := identity()
	id.Nested = "auto"
	if _, err := g.SetIdentity(guard.Context(t), id); err != nil {
		t.Fatal(err)
	}
	if got := strconv.Itoa(g.kernel.kvmGroup); got != g.me.Gid {
		t.Errorf("group %s, want %s", got, g.me.Gid)
	}
	id.Nested = ""
	if h, err := g.SetIdentity(guard.Context(t), id); err != nil || h.Nested != "" {
		t.Errorf("%q, %v", h.Nested, err)
	}
	id.Nested = "off"
	if _, err := g.SetIdentity(guard.Context(t), id); agentlab.CodeOf(err) != agentlab.CodeInvalid {
		t.Errorf("an unknown value: %v", err)
	}
}

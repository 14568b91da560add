package proxmox

import (
	"context"
	"log/slog"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/doctor"
	"github.com/agentlab-vm/agentlab/internal/fleet"
	"github.com/agentlab-vm/agentlab/internal/hostnet"
	"github.com/agentlab-vm/agentlab/test/guard"
	"github.com/agentlab-vm/agentlab/test/pvenode"
)

// brokenHost is a network whose agent cannot be reached while its error is set.
type brokenHost struct {
	bridge
	err *error
}

func (h brokenHost) Ready(ctx context.Context) error {
	if *h.err != nil {
		return *h.err
	}
	return h.bridge.Ready(ctx)
}

func (h brokenHost) Restore(ctx context.Context, guests []hostnet.Guest) error {
	if *h.err != nil {
		return *h.err
	}
	return h.bridge.Restore(ctx, guests)
}

// usable returns what the daemon asks before it creates a sandbox.
func (w *world) usable(t *testing.T) error {
	t.Helper()
	dir := t.TempDir()
	space := doctor.NewSpace(dir, dir, filepath.Join(dir, "reserve"), 0, slog.New(slog.DiscardHandler))
	s := doctor.New(doctor.Config{Fleet: fleet.Single(w.driver, nil), Space: space})
	if _, err := s.Checks(t.Context()); err != nil { // Usable waits only two seconds for the first check
		t.Fatal(err)
	}
	return s.Usable(Name)
}

// finding returns a finding of the driver, or nil.
func (w *world) finding(t *testing.T, name string) *backend.Finding {
	t.Helper()
	for _, f := range w.driver.Check(t.Context()) {
		if f.Name == name {
			return &f
		}
	}
	return nil
}

// A node that is offline does not prevent new sandboxes on another node.
func TestNodeDownStaysUsable(t *testing.T) {
	both(t, func(t *testing.T, shell bool) {
		w := twoNodes(t, shell)
		noRoute := error(agentlab.Errorf(agentlab.CodeUnavailable, "ssh: no route to host"))
		w.node.SetOnline("pve2", false)
		w.alterNodes(func(nodes []Node) { nodes[1].Host = brokenHost{bridge{w.farm}, &noRoute} })
		d := w.open()
		ok(t, "Usable", w.usable(t))
		if f := w.finding(t, "proxmox-nodes"); f == nil || f.Level != backend.LevelWarn || !strings.Contains(f.Detail, "pve2 is offline") {
			t.Errorf("%+v", f)
		}
		spec := w.create(t, 2)
		w.on(t, spec, "pve1")
		ok(t, "Start", d.Start(t.Context(), spec.Ref()))
	})
}

// alterNodes changes the nodes of the next configuration.
func (w *world) alterNodes(change func([]Node)) {
	before := w.alter
	w.alter = func(c *Config) {
		before(c)
		change(c.Nodes)
	}
}

// A node that is online, but whose network cannot be managed, gets no sandbox
// and does not prevent new sandboxes on another node. If no node is left, the
// error contains the reason of each.
func TestNodeNetworkBroken(t *testing.T) {
	both(t, func(t *testing.T, shell bool) {
		w := twoNodes(t, shell)
		var here, there error
		w.alterNodes(func(nodes []Node) {
			nodes[0].Host, nodes[1].Host = brokenHost{bridge{w.farm}, &here}, brokenHost{bridge{w.farm}, &there}
		})
		there = agentlab.Errorf(agentlab.CodeUnavailable, "ssh: permission denied").WithHint("copy the key")
		d := w.open()
		ok(t, "Usable", w.usable(t))
		f := w.finding(t, "network-pve2")
		if f == nil || f.Level != backend.LevelWarn || f.Remedy != "copy the key" || !strings.Contains(f.Detail, "permission denied; new sandboxes are not created on node pve2") {
			t.Errorf("%+v", f)
		}
		spec := w.create(t, 1)
		w.on(t, spec, "pve1")
		ok(t, "Start", d.Start(t.Context(), spec.Ref()))

		here = agentlab.Errorf(agentlab.CodeUnavailable, "no rules")
		if err := w.usable(t); agentlab.CodeOf(err) != agentlab.CodeUnavailable {
			t.Errorf("no node is ready: %v", err)
		}
		err := d.Create(t.Context(), w.spec(2))
		wantCode(t, "Create", err, agentlab.CodeUnavailable)
		for _, part := range []string{"node pve1: no rules", "node pve2: ssh: permission denied"} {
			if !strings.Contains(err.Error(), part) || agentlab.HintOf(err) == "" {
				t.Errorf("%v (%s)", err, agentlab.HintOf(err))
			}
		}
		if vms := w.node.VMs(); len(vms) != 2 {
			t.Errorf("VMs %v", vms)
		}

		there = nil
		ok(t, "Usable", w.usable(t))
		spec = w.create(t, 3)
		w.on(t, spec, "pve2")
	})
}

// A node that is the only one must be ready.
func TestOnlyNodeBroken(t *testing.T) {
	both(t, func(t *testing.T, shell bool) {
		w := newWorld(t, worldConfig{shell: shell})
		for _, f := range w.driver.Check(t.Context()) {
			if f.Level != backend.LevelOK || strings.HasPrefix(f.Name, "snippets-") {
				t.Errorf("%+v", f)
			}
		}
		ok(t, "Usable", w.usable(t))
		w.farm.notReady = agentlab.Errorf(agentlab.CodeUnavailable, "no rules")
		if f := w.finding(t, "network-"+w.node.Name()); f == nil || f.Level != backend.LevelError {
			t.Errorf("%+v", f)
		}
		wantCode(t, "Usable", w.usable(t), agentlab.CodeUnavailable)
	})
}

// The daemon writes snippets on its own node. While their storage is not
// shared, other nodes get no sandboxes. A token writes no snippets.
func TestSnippetsOfSeveralNodes(t *testing.T) {
	both(t, func(t *testing.T, shell bool) {
		for _, shared := range []bool{true, false} {
			w := twoNodesWith(t, shell, shared)
			var here error
			w.alterNodes(func(nodes []Node) { nodes[0].Host = brokenHost{bridge{w.farm}, &here} })
			d := w.open()
			ok(t, "Usable", w.usable(t))
			f, want := w.finding(t, "snippets-pve2"), "pve2"
			switch {
			case !shell:
				if f != nil {
					t.Errorf("over REST: %+v", f)
				}
			case shared:
				if f == nil || f.Level != backend.LevelOK {
					t.Errorf("shared: %+v", f)
				}
			default:
				want = "pve1"
				if f == nil || f.Level != backend.LevelWarn || !strings.Contains(f.Remedy, "proxmox.snippets_storage") || !strings.Contains(f.Remedy, "pvesm set local --shared 1") {
					t.Errorf("not shared: %+v", f)
				}
			}
			spec := w.create(t, 1)
			w.on(t, spec, want)
			ok(t, "Start", d.Start(t.Context(), spec.Ref()))
			if want == "pve2" {
				continue
			}
			here = agentlab.Errorf(agentlab.CodeUnavailable, "no rules")
			wantCode(t, "Usable", w.usable(t), agentlab.CodeUnavailable)
			err := d.Create(t.Context(), w.spec(2))
			wantCode(t, "Create", err, agentlab.CodeUnavailable)
			if !strings.Contains(err.Error(), "node pve2: storage local is not shared") || !strings.Contains(err.Error(), "node pve1: no rules") {
				t.Error(err)
			}
		}
	})
}

// meetingHost is a network that answers once that of the other node was asked.
type meetingHost struct {
	silentHost
	asked, other chan struct{}
}

func (h meetingHost) Ready(ctx context.Context) error {
	close(h.asked)
	select {
	case <-h.other:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// The check of a node does not wait for the network of another node.
func TestCheckAsksNodesAtOnce(t *testing.T) {
	w := twoNodes(t, false)
	a, b := make(chan struct{}), make(chan struct{})
	w.alterNodes(func(nodes []Node) {
		nodes[0].Host, nodes[1].Host = meetingHost{asked: a, other: b}, meetingHost{asked: b, other: a}
	})
	w.open()
	for _, f := range w.driver.Check(guard.Context(t)) {
		if f.Level != backend.LevelOK {
			t.Errorf("%+v", f)
		}
	}
}

// threeNodes is a cluster whose template is on pve3, on shared storage. Most
// memory is free on pve1.
func threeNodes(t *testing.T) *world {
	t.Helper()
	f := newFarm(t)
	st := pvenode.Storage{ID: "shared-zfs", Type: pvenode.ZFSPool, Shared: true}
	n := pvenode.New(t, pvenode.Config{
		Nodes: []string{"pve1", "pve2", "pve3"}, MemoryOf: map[string]int64{"pve1": 64 << 30, "pve2": 16 << 30, "pve3": 8 << 30},
		Storages: []pvenode.Storage{st}, Boot: f.boot, Waits: pvenode.ShortWaits(),
	})
	n.AddTemplate(t, pvenode.Template{VMID: 9000, Storage: st.ID, Node: "pve3"})
	w := &world{t: t, node: n, farm: f, dir: t.TempDir()}
	w.tokenID, w.secret = n.RootToken()
	w.alter = func(c *Config) {
		c.Nodes = nil
		for _, name := range []string{"pve1", "pve2", "pve3"} {
			c.Nodes = append(c.Nodes, Node{Name: name, Templates: map[string]int{"base": 9000}, Host: bridge{f}})
		}
	}
	var err error
	w.image, err = w.open().Templates().Ensure(t.Context(), templateImage(9000), nil)
	ok(t, "Ensure", err)
	return w
}

// A node that is offline hides no template of another node.
func TestNodeDownTemplateElsewhere(t *testing.T) {
	w := threeNodes(t)
	w.node.SetOnline("pve2", false)
	w.open()
	spec := w.create(t, 1)
	w.on(t, spec, "pve1")
}

// If all configured nodes are offline, the check has an error.
func TestAllNodesDown(t *testing.T) {
	w := threeNodes(t)
	all := w.alter
	w.alter = func(c *Config) {
		all(c)
		c.Nodes = c.Nodes[1:]
	}
	w.node.SetOnline("pve2", false)
	w.node.SetOnline("pve3", false)
	w.open()
	if f := w.finding(t, "nodes"); f == nil || f.Level != backend.LevelError || f.Remedy == "" {
		t.Errorf("%+v", f)
	}
	wantCode(t, "Usable", w.usable(t), agentlab.CodeUnavailable)
	err := w.driver.Create(t.Context(), w.spec(1))
	wantCode(t, "Create", err, agentlab.CodeUnavailable)
	if !strings.Contains(err.Error(), "node pve2 is offline; node pve3 is offline") {
		t.Error(err)
	}
}

package proxmox

import (
	"context"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/hostnet"
	"github.com/agentlab-vm/agentlab/test/pvenode"
)

// stuckHost is a network whose node does not answer.
type stuckHost struct {
	silentHost
	asked chan struct{}
}

func (h stuckHost) Restore(ctx context.Context, _ []hostnet.Guest) error {
	close(h.asked)
	<-ctx.Done()
	return context.Cause(ctx)
}

// TestUnresponsiveNodeDoesNotBlockOthers: what is asked of one node does not
// wait for another one.
func TestUnresponsiveNodeDoesNotBlockOthers(t *testing.T) {
	stuck := stuckHost{asked: make(chan struct{})}
	d := &Driver{dir: t.TempDir(), cfg: Config{Nodes: []Node{{Name: "pve1", Host: stuck}, {Name: "pve2", Host: silentHost{}}}}}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() {
		_, err := d.network(ctx, "pve1")
		ended <- err
	}()
	<-stuck.asked
	other := make(chan error)
	go func() {
		_, err := d.network(t.Context(), "pve2")
		other <- err
	}()
	if err := <-other; err != nil {
		t.Error(err)
	}
	cancel()
	if err := <-ended; err == nil {
		t.Error("a node that did not answer was taken over")
	}
}

// awayHost is a network that is out of reach.
type awayHost struct{ silentHost }

func (awayHost) Ready(context.Context) error {
	return agentlab.Errorf(agentlab.CodeUnavailable, "out of reach")
}
func (h awayHost) Restore(ctx context.Context, _ []hostnet.Guest) error { return h.Ready(ctx) }
func (h awayHost) Drop(ctx context.Context, _ hostnet.ID) error         { return h.Ready(ctx) }

// TestUnreachableNodeDoesNotBlockOtherSandboxes: a sandbox is destroyed although
// the agent of another node does not answer; with its own node's it waits.
func TestUnreachableNodeDoesNotBlockOtherSandboxes(t *testing.T) {
	f := newFarm(t)
	st := pvenode.Storage{ID: "shared-zfs", Type: pvenode.ZFSPool, Shared: true}
	n := pvenode.New(t, pvenode.Config{
		Nodes: []string{"pve1", "pve2"}, MemoryOf: map[string]int64{"pve1": 16 << 30, "pve2": 8 << 30},
		Storages: []pvenode.Storage{st}, Boot: f.boot, Waits: pvenode.ShortWaits(),
	})
	n.AddTemplate(t, pvenode.Template{VMID: 9000, Storage: st.ID, Node: "pve1"})
	w := &world{t: t, node: n, farm: f, dir: t.TempDir()}
	w.tokenID, w.secret = n.RootToken()
	var here, there Host = bridge{f}, awayHost{}
	w.alter = func(c *Config) {
		c.Nodes = []Node{{Name: "pve1", Templates: map[string]int{"base": 9000}, Host: here}, {Name: "pve2", Host: there}}
	}
	d := w.open()
	var err error
	w.image, err = d.Templates().Ensure(t.Context(), templateImage(9000), nil)
	ok(t, "Ensure", err)
	a, b := w.create(t, 1), w.create(t, 2)
	ok(t, "Destroy", d.Destroy(t.Context(), a.Ref()))
	here, there = awayHost{}, bridge{f}
	d = w.open()
	if err := d.Destroy(t.Context(), b.Ref()); agentlab.CodeOf(err) != agentlab.CodeUnavailable {
		t.Errorf("its own node was not told: %v", err)
	}
	here = bridge{f}
	ok(t, "Destroy", w.open().Destroy(t.Context(), b.Ref()))
}

package proxmox

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
	"github.com/agentlab-vm/agentlab/internal/control"
	"github.com/agentlab-vm/agentlab/test/guard"
	"github.com/agentlab-vm/agentlab/test/pvenode"
)

// maxCalls is how many calls a sandbox may cost from its making until its
// guest answers.
const maxCalls = 12

// Twenty sandboxes at once, on a node with its real lock waits.
func TestTwentyAtOnce(t *testing.T) {
	both(t, func(t *testing.T, shell bool) {
		w := newWorld(t, worldConfig{shell: shell, real: true, alter: func(c *Config) { c.Poll = pve.Poll{} }})
		const n = 20
		began, before := time.Now(), w.driver.pve.Calls()
		errs := make([]error, n)
		var wg sync.WaitGroup
		for i := range n {
			wg.Go(func() { errs[i] = w.boot(t.Context(), w.spec(i)) })
		}
		wg.Wait()
		ok(t, "boot", errors.Join(errs...))
		calls := float64(w.driver.pve.Calls()-before) / n
		t.Logf("%d sandboxes until their guests answered: %.1f calls each, %s in all; %v", n, calls, time.Since(began).Round(time.Millisecond), w.node.Calls())
		if calls > maxCalls {
			t.Errorf("%.1f calls for each sandbox are more than %d", calls, maxCalls)
		}
		all, err := w.driver.List(t.Context())
		ok(t, "List", err)
		ips, macs := map[string]bool{}, map[string]bool{}
		for _, in := range all {
			ips[in.IP] = in.Power == backend.PowerRunning
		}
		for _, g := range w.farm.put {
			macs[g.MAC.String()] = true
		}
		if len(all) != n || len(ips) != n || len(macs) != n {
			t.Errorf("%d sandboxes, %d addresses, %d MACs", len(all), len(ips), len(macs))
		}
		for i := range n {
			wg.Go(func() { errs[i] = w.driver.Destroy(t.Context(), w.spec(i).Ref()) })
		}
		wg.Wait()
		ok(t, "Destroy", errors.Join(errs...))
		if left := w.left(t); len(left) > 0 {
			t.Errorf("left: %q", left)
		}
	})
}

// boot makes and starts a sandbox and waits until its guest answers, looking
// at it as the sandbox service does.
func (w *world) boot(ctx context.Context, spec backend.Spec) error {
	d, ref := w.driver, spec.Ref()
	ctx, cancel := context.WithTimeout(ctx, guard.Patience)
	defer cancel()
	if err := d.Create(ctx, spec); err != nil {
		return err
	}
	if err := d.Start(ctx, ref); err != nil {
		return err
	}
	if in, err := d.Inspect(ctx, ref); err != nil || in.Power != backend.PowerRunning {
		return fmt.Errorf("%+v: %w", in, err)
	}
	c := control.New(func(ctx context.Context) (net.Conn, error) { return d.DialControl(ctx, ref) })
	for {
		_, err := c.Health(ctx)
		if err == nil {
			break
		}
		if code := agentlab.CodeOf(err); code != agentlab.CodeUnavailable && code != agentlab.CodeTimeout || ctx.Err() != nil {
			return err
		}
		time.Sleep(20 * time.Millisecond) // as the service does
	}
	_, err := d.Inspect(ctx, ref)
	return err
}

// One sandbox alone, when nothing is remembered.
func TestCallsOfOne(t *testing.T) {
	both(t, func(t *testing.T, shell bool) {
		w := newWorld(t, worldConfig{shell: shell, real: true, alter: func(c *Config) { c.Poll = pve.Poll{} }})
		w.open()
		w.node.ResetCalls()
		began := time.Now()
		ok(t, "boot", w.boot(t.Context(), w.spec(1)))
		t.Logf("%d calls, %s: %v", w.driver.pve.Calls(), time.Since(began).Round(time.Millisecond), w.node.Calls())
		if n := w.driver.pve.Calls(); n > maxCalls {
			t.Errorf("%d calls are more than %d", n, maxCalls)
		}
	})
}

// Several nodes: a sandbox goes where most memory is free, of the nodes whose
// network is within reach and that can have the template.
func TestPlacement(t *testing.T) {
	f := newFarm(t)
	st := pvenode.Storage{ID: "shared-zfs", Type: pvenode.ZFSPool, Shared: true}
	n := pvenode.New(t, pvenode.Config{
		Nodes: []string{"pve1", "pve2", "pve3"}, MemoryOf: map[string]int64{"pve1": 8 << 30, "pve2": 16 << 30, "pve3": 64 << 30},
		Storages: []pvenode.Storage{st}, Boot: f.boot, Waits: pvenode.ShortWaits(),
	})
	n.AddTemplate(t, pvenode.Template{VMID: 9000, Storage: st.ID, Node: "pve1"})
	w := &world{t: t, node: n, farm: f, dir: t.TempDir()}
	w.tokenID, w.secret = n.RootToken()
	templates := map[string]int{"base": 9000}
	w.alter = func(c *Config) {
		c.Nodes = []Node{
			{Name: "pve1", Templates: templates, Host: bridge{f}}, {Name: "pve2", Templates: templates, Host: bridge{f}},
			{Name: "pve3", Templates: templates}, // the largest, but its network is out of reach
		}
	}
	w.root = w.rest(w.tokenID, w.secret)
	d := w.open()
	var err error
	w.image, err = d.Templates().Ensure(t.Context(), "base", nil)
	ok(t, "Ensure", err)
	on := map[string]int{}
	for i := range 4 {
		spec := w.spec(i)
		spec.Resources.MemoryMB = 6 << 10
		ok(t, "Create", d.Create(t.Context(), spec))
		h, err := d.readHandle(spec.Ref())
		ok(t, "handle", err)
		on[h.Node]++
		if _, err := d.pve.Config(t.Context(), h.Node, spec.VMID); err != nil {
			t.Error(err)
		}
	}
	if on["pve1"] == 0 || on["pve2"] < 2 || on["pve3"] != 0 {
		t.Errorf("placed %v", on)
	}
	for i := range 4 {
		ok(t, "Destroy", d.Destroy(t.Context(), w.spec(i).Ref()))
	}
}

// An address that a guest says it has counts only on its own device and in
// the sandboxes' network.
func TestPickAddress(t *testing.T) {
	mac, other := net.HardwareAddr{0xbc, 0x24, 0x11, 1, 2, 3}, net.HardwareAddr{0xbc, 0x24, 0x11, 9, 9, 9}
	ip := netip.MustParseAddr
	list := []pve.Interface{
		{Name: "lo", IPs: []netip.Addr{ip("127.0.0.1")}},
		{Name: "eth1", MAC: other, IPs: []netip.Addr{ip("10.77.0.9")}},
		{Name: "docker0", IPs: []netip.Addr{ip("10.77.9.9")}},
		{Name: "eth0", MAC: mac, IPs: []netip.Addr{ip("fe80::1"), ip("192.168.1.4"), ip("10.77.1.4")}},
	}
	network := netip.MustParsePrefix("10.77.0.0/16")
	if got := pickAddress(list, mac, network); got != ip("10.77.1.4") {
		t.Error(got)
	}
	if got := pickAddress(list[:3], mac, network); got.IsValid() {
		t.Error(got)
	}
}

// If guests request their address, it is reported once the bridge's DHCP
// server has acknowledged it, or the guest's agent names it.
func TestDHCP(t *testing.T) {
	w := newWorld(t, worldConfig{alter: func(c *Config) { c.DHCP = true }})
	spec := w.create(t, 1)
	ok(t, "Start", w.driver.Start(t.Context(), spec.Ref()))
	if in := w.inspect(t, spec.Ref()); in.IP != "" {
		t.Errorf("address %s before it was leased", in.IP)
	}
	h, err := w.driver.readHandle(spec.Ref())
	ok(t, "handle", err)
	w.farm.mu.Lock()
	w.farm.leases[h.MAC] = spec.IPv4
	dhcp := w.farm.put[idOf(spec)].DHCP
	w.farm.mu.Unlock()
	if in := w.inspect(t, spec.Ref()); in.IP != spec.IPv4.String() || !dhcp {
		t.Errorf("%+v, may ask: %v", in, dhcp)
	}
}

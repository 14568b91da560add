package probe_test

import (
	"context"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"sync"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/egress/probe"
	"github.com/agentlab-vm/agentlab/internal/egress/probe/probetest"
	"github.com/agentlab-vm/agentlab/internal/egress/vnet"
	"github.com/agentlab-vm/agentlab/test/fakenet"
	"github.com/agentlab-vm/agentlab/test/netguest"
	"github.com/agentlab-vm/agentlab/test/netlab"
)

func TestMain(m *testing.M) {
	netguest.Main()
	netlab.Main()
	os.Exit(m.Run())
}

// userspace is a guest with a real kernel's network stack on the userspace
// network, before the reference world.
type userspace struct {
	*netguest.Guest
	net   *vnet.Network
	world *fakenet.Net

	mu      sync.Mutex
	records []agentlab.EgressRecord
}

func newUserspace(t *testing.T) *userspace {
	t.Helper()
	u := &userspace{world: fakenet.New()}
	t.Cleanup(u.world.Close)
	if err := u.world.ProbeWorld(); err != nil {
		t.Fatal(err)
	}
	u.Guest = netguest.Start(t, netguest.Config{
		Address: netip.MustParsePrefix("10.77.0.2/24"), Gateway: vnet.DefaultGateway, MTU: vnet.DefaultMTU,
		Address6: netip.PrefixFrom(vnet.DefaultGuest6, 64), Gateway6: vnet.DefaultGateway6,
	})
	var err error
	u.net, err = vnet.New(vnet.Config{
		Link: u.Link, Policy: policy(t, probetest.Reference()[0].Network), Dialer: u.world,
		Services: map[uint16]func(net.Conn){8844: controller},
		Audit:    u.record,
	})
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- u.net.Run(context.Background()) }()
	t.Cleanup(func() { u.net.Close(); <-ended })
	return u
}

// controller answers any request, as the guest plane does.
func controller(c net.Conn) {
	_, _ = c.Read(make([]byte, 4096))
	_, _ = c.Write([]byte("HTTP/1.1 " + http.StatusText(http.StatusNotFound) + "\r\n\r\n"))
}

func policy(t *testing.T, n agentlab.Network) *egress.Policy {
	t.Helper()
	p, err := egress.New(n)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func (u *userspace) record(r agentlab.EgressRecord) {
	u.mu.Lock()
	defer u.mu.Unlock()
	r.Seq = int64(len(u.records) + 1)
	u.records = append(u.records, r)
}

func userspaceEnv(v probetest.Variant) probe.Env {
	return probe.Env{
		Network: v.Network, Targets: v.Targets, Frames: true, ControllerPort: 8844,
		Guest4: vnet.DefaultGuest, Gateway4: vnet.DefaultGateway, Neighbour4: vnet.DefaultGuest.Next(),
		Guest6: vnet.DefaultGuest6, Gateway6: vnet.DefaultGateway6, Neighbour6: vnet.DefaultGuest6.Next(),
	}
}

// run tries the table under a policy.
func (u *userspace) run(t *testing.T, v probetest.Variant, checks ...string) probe.Report {
	t.Helper()
	u.net.SetPolicy(policy(t, v.Network))
	u.world.ForgetOutside()
	e := userspaceEnv(v)
	e.Outside, e.RecordsWithinSeconds = u.world.Outside, 2
	e.Records = func(context.Context) ([]agentlab.EgressRecord, error) {
		u.mu.Lock()
		defer u.mu.Unlock()
		return slices.Clone(u.records), nil
	}
	table := probe.Table(e)
	if len(checks) > 0 {
		table = slices.DeleteFunc(table, func(c probe.Check) bool { return !slices.Contains(checks, c.ID) })
	}
	r, err := probe.RunChecks(t.Context(), u.Exec, e, table)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// The table holds for the userspace network under every reference policy.
func TestUserspace(t *testing.T) {
	u := newUserspace(t)
	for _, v := range probetest.Reference() {
		r := u.run(t, v)
		for _, o := range probetest.Failures(r) {
			t.Errorf("%s: %s (%s): %s", v.Name, o.Check.ID, o.Check.Shows, o.Detail)
		}
		t.Logf("%s: %d passed, %d failed, %d skipped", v.Name, r.Passed, r.Failed, r.Skipped)
	}
}

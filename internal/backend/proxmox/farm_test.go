package proxmox

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"regexp"
	"sync"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/internal/hostnet"
	"github.com/agentlab-vm/agentlab/internal/link"
	"github.com/agentlab-vm/agentlab/test/pvenode"
)

// farm is what runs in the VMs of a fake node, and the network that they are
// on. Its guests are those of the fake driver: they speak guest control, over
// TLS as real ones do, and obey the key that their seed names and no other.
type farm struct {
	drv  *fake.Driver
	node *pvenode.Node // nil in tests without snapshots

	mu       sync.Mutex
	put      map[hostnet.ID]hostnet.Guest
	machines map[int]*machine
	disks    map[vmID]string   // content of guestapi.ControlFile, which outlives a boot
	saved    map[string]string // the same of snapshots, by UID
	copies   map[vmID]bool     // their disks are copies of a snapshot's
	notReady error
	leases   map[string]netip.Addr
	order    []string // what the driver did, for tests of its order
}

// machine is a VM that runs.
type machine struct {
	*pvenode.ScriptedGuest
	id       vmID
	listener net.Listener // guest control; nil until the guest knows whom to obey
}

func (m *machine) ref() backend.Ref { return backend.Ref{UID: m.id.UID} }

func newFarm(t testing.TB) *farm {
	host, err := fake.NewHost(fake.Config{NoForks: true, NoKeptSnapshots: true, AnySpec: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = host.Close() })
	return &farm{
		drv: host.Open(), put: map[hostnet.ID]hostnet.Guest{}, machines: map[int]*machine{}, disks: map[vmID]string{},
		saved: map[string]string{}, copies: map[vmID]bool{}, leases: map[string]netip.Addr{},
	}
}

var uidInDescription = regexp.MustCompile(markUID + `([a-z2-9]{26})`)

// boot is the node's Config.Boot.
func (f *farm) boot(ctx context.Context, b pvenode.Boot) (pvenode.Guest, error) {
	m := &machine{ScriptedGuest: &pvenode.ScriptedGuest{}}
	match := uidInDescription.FindStringSubmatch(b.Config["description"])
	if match == nil {
		return m.Start(b), nil // foreign
	}
	m.id = vmID{VMID: b.VMID, UID: match[1]}
	if err := f.ensure(ctx, m.id, nil); err != nil {
		return nil, err
	}
	if err := f.plugged(ctx, m, b.Config); err != nil {
		return nil, err
	}
	begin := f.drv.Start
	if b.Snapshot != "" {
		begin = f.drv.Resume
	}
	if err := begin(ctx, m.ref()); err != nil {
		return nil, err
	}
	m.OnEnd = func() { f.ended(m) }
	m.OnAgent = func(command string, _ map[string]any) (any, bool, error) {
		if text, written := m.File(guestapi.ControlFile); command == "guest-file-close" && written {
			return nil, false, f.seeded(m, text)
		}
		return nil, false, nil
	}
	m.Start(b)
	f.mu.Lock()
	f.machines[b.VMID] = m
	known := f.disks[m.id]
	f.mu.Unlock()
	if seed := seedOf(b.Seed["user-data"]); seed != "" && b.Snapshot == "" {
		known = seed // cloud-init replaces what a copied disk has
	}
	if known != "" {
		return m, f.seeded(m, known)
	}
	return m, nil
}

// seedOf finds the control file in rendered user-data.
func seedOf(userData string) string {
	m := regexp.MustCompile(`"content":\s*"([A-Za-z0-9+/=]+)"`).FindStringSubmatch(userData)
	if m == nil {
		return ""
	}
	text, err := base64.StdEncoding.DecodeString(m[1])
	if err != nil {
		return ""
	}
	return string(text)
}

// seeded starts guest control of a machine that knows whom to obey now.
func (f *farm) seeded(m *machine, text string) error {
	var c guestapi.ControlConfig
	if err := json.Unmarshal([]byte(text), &c); err != nil {
		return err
	}
	f.mu.Lock()
	copied := f.copies[m.id]
	f.mu.Unlock()
	if c.UID != m.id.UID && !copied {
		return fmt.Errorf("the seed is of %d %s", c.VMID, c.UID)
	}
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return err
	}
	raw, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	l, err := link.ListenTLS(raw, c.HostKey, key)
	if err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.disks[m.id] = text
	if m.listener != nil {
		return l.Close()
	}
	m.listener = l
	go f.serve(m.ref(), l)
	return nil
}

func (f *farm) serve(ref backend.Ref, l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		inner, err := f.drv.DialControl(context.Background(), ref)
		if err != nil {
			_ = c.Close()
			continue
		}
		go splice(c, inner)
	}
}

func splice(a, b net.Conn) {
	var wg sync.WaitGroup
	for _, p := range [][2]net.Conn{{a, b}, {b, a}} {
		wg.Go(func() {
			_, _ = io.Copy(p[0], p[1])
			_ = p[0].Close()
		})
	}
	wg.Wait()
}

func (f *farm) ended(m *machine) {
	f.mu.Lock()
	if m.listener != nil {
		_ = m.listener.Close()
	}
	if f.machines[m.id.VMID] == m {
		delete(f.machines, m.id.VMID)
	}
	f.mu.Unlock()
	_ = f.drv.Stop(context.Background(), m.ref(), 0)
}

// kill ends a machine without anybody's knowledge.
func (f *farm) kill(t testing.TB, ref backend.Ref) {
	f.mu.Lock()
	var found *machine
	for _, m := range f.machines {
		if m.id.UID == ref.UID {
			found = m
		}
	}
	f.mu.Unlock()
	if found == nil {
		t.Fatalf("sandbox %s does not run", ref.UID)
	}
	found.Kill()
}

// ensure makes the fake's sandbox behind a VM.
func (f *farm) ensure(ctx context.Context, id vmID, n *agentlab.Network) error {
	spec := farmSpec(id)
	if n != nil {
		spec.Network = *n
	} else if _, err := f.drv.Inspect(ctx, spec.Ref()); err == nil {
		return nil
	}
	return f.drv.Create(ctx, spec)
}

func farmSpec(id vmID) backend.Spec {
	return backend.Spec{
		VMID: id.VMID, UID: id.UID, Name: fmt.Sprintf("farm-%d", id.VMID), Image: "base@0",
		Resources: agentlab.Resources{Cores: 1, MemoryMB: 512}, Network: agentlab.Network{Mode: agentlab.NetworkNAT},
	}
}

func (f *farm) note(format string, args ...any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.order = append(f.order, fmt.Sprintf(format, args...))
}

// bridge is the farm as a node's network.
type bridge struct{ *farm }

var _ Host = bridge{}

func (b bridge) Ready(context.Context) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.notReady
}

func (b bridge) Put(ctx context.Context, g hostnet.Guest) error {
	b.note("put %d", g.ID.VMID)
	if err := b.Ready(ctx); err != nil {
		return err
	}
	b.mu.Lock()
	for id, other := range b.put {
		if id != g.ID && (other.IPv4 == g.IPv4 || other.Port == g.Port || other.MAC.String() == g.MAC.String()) {
			b.mu.Unlock()
			return fmt.Errorf("%v and %v share an address, a MAC or a port", id, g.ID)
		}
	}
	b.put[g.ID] = g
	b.mu.Unlock()
	return b.ensure(ctx, g.ID, &g.Network)
}

func (b bridge) Restore(_ context.Context, guests []hostnet.Guest) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	clear(b.put)
	for _, g := range guests {
		b.put[g.ID] = g
	}
	return nil
}

func (b bridge) Drop(ctx context.Context, id hostnet.ID) error {
	b.mu.Lock()
	delete(b.put, id)
	delete(b.disks, id)
	b.mu.Unlock()
	return b.drv.Destroy(ctx, backend.Ref{UID: id.UID})
}

func (b bridge) Listen(ctx context.Context, id hostnet.ID) (net.Listener, error) {
	if err := b.ensure(ctx, id, nil); err != nil {
		return nil, err
	}
	return b.drv.ListenGuest(ctx, backend.Ref{UID: id.UID})
}

func (b bridge) Dial(ctx context.Context, to netip.AddrPort) (net.Conn, error) {
	b.mu.Lock()
	var m *machine
	for id, g := range b.put {
		if g.IPv4 == to.Addr() {
			m = b.machines[id.VMID]
		}
	}
	var control net.Listener
	if m != nil {
		control = m.listener
	}
	b.mu.Unlock()
	switch {
	case m == nil || m.Status() != "running" || to.Port() == link.ControlPort && control == nil:
		return nil, errors.New("connection refused")
	case to.Port() == link.ControlPort:
		return (&net.Dialer{}).DialContext(ctx, "tcp", control.Addr().String())
	}
	return b.drv.DialGuest(ctx, m.ref(), to.Port())
}

func (b bridge) Lease(_ context.Context, mac net.HardwareAddr) (netip.Addr, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.leases[mac.String()], nil
}

func (b bridge) EgressLog(ctx context.Context, id hostnet.ID, after int64, limit int) ([]agentlab.EgressRecord, error) {
	return b.drv.EgressLog(ctx, backend.Ref{UID: id.UID}, after, limit)
}

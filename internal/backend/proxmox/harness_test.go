package proxmox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
	"github.com/agentlab-vm/agentlab/test/pvenode"
)

// quick is how tests ask about tasks.
var quick = pve.Poll{First: 2 * time.Millisecond, Max: 50 * time.Millisecond}

// storages are those that sandboxes are tested on, each with the image format that its
// templates have.
var storages = map[string]pvenode.Storage{
	"zfspool": {ID: "local-zfs", Type: pvenode.ZFSPool},
	"dir":     {ID: "disks", Type: pvenode.Dir, Content: []string{"images"}},
	"lvmthin": {ID: "local-lvm", Type: pvenode.LVMThin},
}

const templateVMID = 9000

// world is a fake node with a template, and the means to open drivers on it.
type world struct {
	t       testing.TB
	node    *pvenode.Node
	farm    *farm
	root    pve.Transport // for what an administrator does
	dir     string
	shell   bool
	storage string
	image   string
	alter   func(*Config)

	tokenID, secret string
	pool            string
	snippets        string // where they are

	driver *Driver // the last one that was opened
}

// worldConfig says what a world is like.
type worldConfig struct {
	storage string // of storages; "" is zfspool
	shell   bool
	waits   pvenode.Waits // zero: ShortWaits
	real    bool          // the waits of a real node
	version string
	nodes   []string
	admin   bool // over REST, the token may do everything
	alter   func(*Config)
}

func newWorld(t testing.TB, c worldConfig) *world {
	t.Helper()
	st := storages["zfspool"]
	if c.storage != "" {
		st = storages[c.storage]
	}
	f := newFarm(t)
	if !c.real && c.waits == (pvenode.Waits{}) {
		c.waits = pvenode.ShortWaits()
	}
	host, local := seedStorage(t)
	n := pvenode.New(t, pvenode.Config{
		Version: c.version, Nodes: c.nodes, Boot: f.boot, Contents: f, Waits: c.waits, Dir: host, Storages: []pvenode.Storage{st, local},
	})
	f.node = n
	w := &world{t: t, node: n, snippets: filepath.Join(local.Path, "snippets"), farm: f, dir: t.TempDir(), shell: c.shell, storage: cmp.Or(c.storage, "zfspool"), alter: c.alter}
	w.tokenID, w.secret = n.RootToken()
	w.root = w.rest(w.tokenID, w.secret)
	if !c.shell && !c.admin {
		w.restrict(st.ID)
	}
	w.makeTemplate(templateVMID, st)
	w.open()
	ref, err := w.driver.Templates().Ensure(t.Context(), templateImage(templateVMID), nil)
	if err != nil {
		t.Fatal(err)
	}
	w.image = ref
	return w
}

// seedStorage is the storage local of a node whose files are in host. The shell
// transport writes where the node says that snippets are, which here is a
// directory that this machine and the node share.
func seedStorage(t testing.TB) (host string, local pvenode.Storage) {
	t.Helper()
	host, seeds := t.TempDir(), t.TempDir()
	ok(t, "link", os.MkdirAll(filepath.Dir(filepath.Join(host, seeds)), 0o700))
	ok(t, "link", os.Symlink(seeds, filepath.Join(host, seeds)))
	return host, pvenode.Storage{ID: "local", Type: pvenode.Dir, Path: seeds, Content: []string{"snippets", "images", "iso"}}
}

// makeTemplate makes a template as create_template.sh does, with things that
// sandboxes must not inherit.
func (w *world) makeTemplate(vmid int, st pvenode.Storage, more ...string) {
	w.t.Helper()
	options := map[string]string{
		"memory": "2048", "cores": "2", "scsihw": "virtio-scsi-single", "agent": "enabled=1", "tags": "golden",
		"description": "golden image", "onboot": "1", "protection": "1", "cpulimit": "1",
	}
	for i := 0; i < len(more); i += 2 {
		options[more[i]] = more[i+1]
	}
	w.node.AddTemplate(w.t, pvenode.Template{VMID: vmid, Storage: st.ID, Name: "golden", Size: 1 << 30, Options: options})
}

// pool is that of the token with the smallest rights.
const pool = "agentlab"

// roleOf is the role that holds the i-th of the smallest rights.
func roleOf(i int) string { return fmt.Sprintf("AgentLab%d", i) }

// restrict gives the driver a token with the smallest rights that Check asks
// for, in place of root's.
func (w *world) restrict(storage string) {
	w.t.Helper()
	w.pool = pool
	w.node.AddPool(pool)
	header := w.node.AddUser(pvenode.User{ID: "agentlab@pve", Tokens: []pvenode.Token{{ID: "main", Privsep: true}}})
	w.tokenID, w.secret, _ = strings.Cut(strings.TrimPrefix(header[0], "PVEAPIToken="), "=")
	version, err := pve.New(w.root).Version(w.t.Context())
	ok(w.t, "version", err)
	needs := pve.Needs{Pool: pool, Templates: []int{templateVMID}, Storages: []string{storage}, Bridges: []string{"vmbr1"}}
	for i, g := range needs.Grants(version) {
		role := roleOf(i)
		ok(w.t, "role", w.node.AddRole(role, g.Privileges...))
		w.node.Grant(g.Path, "agentlab@pve", role)
		w.node.Grant(g.Path, w.tokenID, role)
	}
}

func (w *world) rest(tokenID, secret string) pve.Transport {
	w.t.Helper()
	tr, err := pve.NewREST(pve.RESTOptions{URL: w.node.URL(), TokenID: tokenID, Secret: secret, Fingerprint: w.node.Fingerprint()})
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = tr.Close() })
	return tr
}

func (w *world) transport() pve.Transport {
	if w.shell {
		return pve.NewShell(pve.ShellOptions{Bin: w.node.Bin(), Snippets: "local"})
	}
	return w.rest(w.tokenID, w.secret)
}

// testConfig is a driver's, but for its transport.
func testConfig(dir, node string, host Host) Config {
	return Config{
		StateDir: dir, First: 1000, Last: 1999, Bridge: "vmbr1",
		Nodes:   []Node{{Name: node, Templates: map[string]int{"base": templateVMID}, Host: host, Local: true}},
		Subnet4: netip.MustParsePrefix("10.77.0.0/16"), Gateway4: netip.MustParseAddr("10.77.0.1"),
		Subnet6: netip.MustParsePrefix("fd77:a91a:4d00::/64"), Gateway6: netip.MustParseAddr("fd77:a91a:4d00::1"),
		Modules: filepath.Join(dir, "modules"), CPUInfo: filepath.Join(dir, "cpuinfo"),
		Models: models, Poll: quick, Settle: 20 * time.Millisecond,
	}
}

func (w *world) config() Config {
	c := testConfig(w.dir, w.node.Name(), bridge{w.farm})
	c.Transport, c.Pool = w.transport(), w.pool
	if w.shell {
		c.Settle = 2 * time.Second // a program that was started takes a while until it calls
	}
	if os.Getenv("AGENTLAB_TEST_LOG") != "" {
		c.Logger = slog.New(slog.NewTextHandler(os.Stderr, nil))
	}
	if w.alter != nil {
		w.alter(&c)
	}
	return c
}

// open opens a driver as a new process does.
func (w *world) open() *Driver {
	w.t.Helper()
	d, err := New(w.config())
	if err != nil {
		w.t.Fatal(err)
	}
	w.driver = d
	return d
}

func testUID(n int) string {
	digits := []byte("aaaaaaaaaaaaaaaaaaaaaaaaaa")
	for i := len(digits) - 1; n > 0; i-- {
		digits[i] = "abcdefghijkmnpqrstuvwxyz23456789"[n%32]
		n /= 32
	}
	return string(digits)
}

func (w *world) spec(n int) backend.Spec {
	return backend.Spec{
		VMID: 1000 + n, UID: testUID(n), Name: fmt.Sprintf("sb-%d", n), Image: w.image,
		Resources: agentlab.Resources{Cores: 1, MemoryMB: 512}, Network: agentlab.Network{Mode: agentlab.NetworkNAT},
		IPv4: netip.AddrFrom4([4]byte{10, 77, 1, byte(n + 10)}),
		IPv6: netip.MustParseAddr(fmt.Sprintf("fd77:a91a:4d00::a4d:1%02x", n+10)),
	}
}

// idOf names the VM of a sandbox that has the number of its sandbox.
func idOf(spec backend.Spec) vmID { return vmID{VMID: spec.VMID, UID: spec.UID} }

// loseHandle is the loss of the file that says what is known of a sandbox.
func (w *world) loseHandle(t testing.TB, spec backend.Spec) {
	t.Helper()
	h, err := w.driver.readHandle(spec.Ref())
	ok(t, "read", err)
	ok(t, "lose", w.driver.forget(h))
}

// mortal is a driver whose process can die inside a method.
type mortal struct{ *Driver }

type died struct{ point string }

func (died) Error() string { return "the driver's process died" }

// survive turns the death of the process into an error of the call.
func survive(err *error) {
	switch r := recover().(type) {
	case nil:
	case died:
		*err = r
	default:
		panic(r)
	}
}

func (m mortal) Create(ctx context.Context, s backend.Spec) (err error) {
	defer survive(&err)
	return m.Driver.Create(ctx, s)
}

func (m mortal) Start(ctx context.Context, ref backend.Ref) (err error) {
	defer survive(&err)
	return m.Driver.Start(ctx, ref)
}

func (m mortal) Stop(ctx context.Context, ref backend.Ref, grace time.Duration) (err error) {
	defer survive(&err)
	return m.Driver.Stop(ctx, ref, grace)
}

func (m mortal) Destroy(ctx context.Context, ref backend.Ref) (err error) {
	defer survive(&err)
	return m.Driver.Destroy(ctx, ref)
}

func (m mortal) SaveSnapshot(ctx context.Context, ref backend.Ref, uid string) (s backend.Snapshot, err error) {
	defer survive(&err)
	return m.Driver.SaveSnapshot(ctx, ref, uid)
}

func (m mortal) RestoreSnapshot(ctx context.Context, ref backend.SnapshotRef) (err error) {
	defer survive(&err)
	return m.Driver.RestoreSnapshot(ctx, ref)
}

func (m mortal) DeleteSnapshot(ctx context.Context, ref backend.SnapshotRef) (err error) {
	defer survive(&err)
	return m.Driver.DeleteSnapshot(ctx, ref)
}

// ok fails the test for an error.
func ok(t testing.TB, what string, err error) {
	t.Helper()
	if err != nil {
		hint := ""
		if e, is := errors.AsType[*agentlab.Error](err); is {
			hint = e.Hint
		}
		t.Fatalf("%s: %v (code %s, hint %q)", what, err, agentlab.CodeOf(err), hint)
	}
}

func wantCode(t testing.TB, what string, err error, code agentlab.Code) {
	t.Helper()
	if agentlab.CodeOf(err) != code {
		t.Fatalf("%s: %v (code %q), want code %q", what, err, agentlab.CodeOf(err), code)
	}
}

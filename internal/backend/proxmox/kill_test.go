package proxmox

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
	"github.com/agentlab-vm/agentlab/internal/hostnet"
	"github.com/agentlab-vm/agentlab/test/guard"
	"github.com/agentlab-vm/agentlab/test/pvenode"
	"github.com/agentlab-vm/agentlab/test/sample"
)

// childEnv makes this program a process with a driver, for a test that kills
// it: its value is a childOrder.
const childEnv = "AGENTLAB_TEST_PROXMOX_CHILD"

type childOrder struct {
	Config  childConfig  `json:"config"`
	Deed    string       `json:"deed"` // create, destroy, save, restore or delete
	Spec    backend.Spec `json:"spec"`
	DieHere string       `json:"die_here"` // a point of the driver; "" lives on
}

type childConfig struct {
	Dir, Node, URL, TokenID, Secret, Fingerprint, Bin, Pool string
}

func TestMain(m *testing.M) {
	if text := os.Getenv(childEnv); text != "" {
		os.Exit(child(text))
	}
	os.Exit(guard.Run(m))
}

// child carries out an order. It ends with 0, or by a signal.
func child(text string) int {
	var o childOrder
	if err := json.Unmarshal([]byte(text), &o); err != nil {
		return complain(err)
	}
	c := o.Config
	tr := pve.NewShell(pve.ShellOptions{Bin: c.Bin, Snippets: "local"})
	if c.Bin == "" {
		var err error
		if tr, err = pve.NewREST(pve.RESTOptions{URL: c.URL, TokenID: c.TokenID, Secret: c.Secret, Fingerprint: c.Fingerprint}); err != nil {
			return complain(err)
		}
	}
	cfg := testConfig(c.Dir, c.Node, silentHost{})
	cfg.Transport, cfg.Pool = tr, c.Pool
	d, err := New(cfg)
	if err != nil {
		return complain(err)
	}
	d.crash = func(point string) {
		if point == o.DieHere {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), guard.Patience)
	defer cancel()
	if err := d.do(ctx, o.Deed, o.Spec); err != nil {
		return complain(err)
	}
	return 0
}

// do carries out the deed of an order. The snapshot is always the same.
func (d *Driver) do(ctx context.Context, deed string, spec backend.Spec) error {
	switch deed {
	case "destroy":
		return d.Destroy(ctx, spec.Ref())
	case "save":
		_, err := d.SaveSnapshot(ctx, spec.Ref(), snapUID(1))
		return err
	case "restore":
		return d.RestoreSnapshot(ctx, refTo(spec, 1))
	case "delete":
		return d.DeleteSnapshot(ctx, refTo(spec, 1))
	}
	if err := d.Create(ctx, spec); err != nil {
		return err
	}
	return d.Start(ctx, spec.Ref())
}

func complain(err error) int {
	fmt.Fprintln(os.Stderr, err)
	return 1
}

// silentHost is an empty network that accepts all calls.
type silentHost struct{}

func (silentHost) Ready(context.Context) error                    { return nil }
func (silentHost) Put(context.Context, hostnet.Guest) error       { return nil }
func (silentHost) Restore(context.Context, []hostnet.Guest) error { return nil }
func (silentHost) Drop(context.Context, hostnet.ID) error         { return nil }
func (silentHost) Listen(context.Context, hostnet.ID) (net.Listener, error) {
	return nil, agentlab.Errorf(agentlab.CodeUnavailable, "no listener")
}

func (silentHost) Dial(context.Context, netip.AddrPort) (net.Conn, error) {
	return nil, agentlab.Errorf(agentlab.CodeUnavailable, "no answer")
}
func (silentHost) Lease(context.Context, net.HardwareAddr) (netip.Addr, error) {
	return netip.Addr{}, nil
}
func (silentHost) EgressLog(context.Context, hostnet.ID, int64, int) ([]agentlab.EgressRecord, error) {
	return nil, nil
}

// process is a running child.
type process struct {
	cmd  *exec.Cmd
	errs *strings.Builder
	once sync.Once
	end  chan struct{}
	err  error
}

func (w *world) child(deed string, spec backend.Spec, dieHere string) *process {
	w.t.Helper()
	o := childOrder{Deed: deed, Spec: spec, DieHere: dieHere, Config: childConfig{Dir: w.dir, Node: w.node.Name(), Pool: w.pool}}
	if w.shell {
		o.Config.Bin = w.node.Bin()
	} else {
		o.Config.URL, o.Config.Fingerprint = w.node.URL(), w.node.Fingerprint()
		o.Config.TokenID, o.Config.Secret = w.tokenID, w.secret
	}
	text, err := json.Marshal(o)
	ok(w.t, "order", err)
	self, err := os.Executable()
	ok(w.t, "this program", err)
	p := &process{cmd: exec.Command(self), errs: &strings.Builder{}, end: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), childEnv+"="+string(text))
	p.cmd.Stderr = p.errs
	ok(w.t, "start", p.cmd.Start())
	go func() {
		p.err = p.cmd.Wait()
		close(p.end)
	}()
	w.t.Cleanup(p.kill)
	return p
}

// kill is kill -9, and returns when the process is gone.
func (p *process) kill() {
	p.once.Do(func() { _ = p.cmd.Process.Kill() })
	<-p.end
}

// wait waits for the end, by itself or by a signal.
func (p *process) wait(t testing.TB) {
	t.Helper()
	select {
	case <-p.end:
	case <-time.After(guard.Patience):
		p.kill()
		t.Fatal("the process does not end")
	}
}

// left tells what there is of sandboxes: VMs in their range that are not
// foreign, their volumes, snippets, handles.
func (w *world) left(t testing.TB, foreign ...int) []string {
	t.Helper()
	var out []string
	c := pve.New(w.root)
	ctx := context.Background()
	vms, err := c.VMs(ctx, w.node.Name())
	ok(t, "list", err)
	for _, vm := range vms {
		if n := int(vm.VMID); n >= 1000 && n <= 1999 && !slices.Contains(foreign, n) {
			out = append(out, fmt.Sprintf("VM %d", n))
		}
	}
	stores, err := c.Storages(ctx, w.node.Name())
	ok(t, "storages", err)
	for _, s := range stores {
		vols, err := c.Content(ctx, w.node.Name(), s.Name, "", 0)
		ok(t, "content", err)
		for _, v := range vols {
			n := volumeOwner(v.VolID)
			if n >= 1000 && n <= 1999 && !slices.Contains(foreign, n) || strings.Contains(v.VolID, "snippets/agentlab-") {
				out = append(out, v.VolID)
			}
		}
	}
	entries, err := os.ReadDir(w.dir + "/proxmox")
	ok(t, "handles", err)
	for _, e := range entries {
		if handleName.MatchString(e.Name()) {
			out = append(out, e.Name())
		}
	}
	return out
}

// A process is killed at any point of Create and Destroy, and between any two
// calls. The next process completes the work: none of our VMs and disks is
// left, and nothing foreign was touched.
func TestKilled(t *testing.T) {
	for _, shell := range []bool{false, true} {
		t.Run(map[bool]string{false: "rest", true: "shell"}[shell], func(t *testing.T) {
			if shell {
				sample.Long(t, "it runs the programs of a node")
			}
			w := newWorld(t, worldConfig{shell: shell, alter: func(c *Config) { c.Settle = 3 * time.Second }})
			untouched := w.foreign(t, 1500, "sb-1", nil)
			n, killed := 0, 0
			run := func(name, deed string, arm func(*process) (disarm func()), dieHere string) {
				t.Run(name, func(t *testing.T) {
					n++
					spec := w.spec(n % 200)
					if deed == "destroy" {
						p := w.child("create", spec, "")
						if p.wait(t); p.err != nil {
							t.Fatalf("%v: %s", p.err, p.errs)
						}
					}
					p := w.child(deed, spec, dieHere)
					disarm := func() {}
					if arm != nil {
						disarm = arm(p)
					}
					p.wait(t)
					disarm()
					if p.err != nil {
						killed++
					}
					d := w.open()
					if n%2 == 0 && deed == "create" { // the next process may want it, too
						ok(t, "Create again", d.Create(t.Context(), spec))
						ok(t, "Start again", d.Start(t.Context(), spec.Ref()))
					}
					ok(t, "Destroy", d.Destroy(t.Context(), spec.Ref()))
					if left := w.left(t, 1500); len(left) > 0 {
						t.Errorf("left: %q", left)
					}
					untouched(t)
				})
			}
			for _, p := range crashPoints(shell) {
				switch p.method {
				case "Create", "Start":
					run(p.name, "create", nil, p.name)
				case "Destroy":
					run(p.name, "destroy", nil, p.name)
				}
			}
			type cell struct {
				deed string
				call int
				lost bool
			}
			var cells []cell
			for _, deed := range []string{"create", "destroy"} {
				for k := range w.count(t, deed) {
					cells = append(cells, cell{deed, k + 1, true}, cell{deed, k + 1, false})
				}
			}
			for _, c := range sample.Cover(t, cells, func(c cell) []string {
				return []string{fmt.Sprint(c.deed, c.call), fmt.Sprint(c.deed, c.lost)}
			}) {
				name := fmt.Sprintf("%s/call %d %s", c.deed, c.call, map[bool]string{true: "lost", false: "carried out"}[c.lost])
				run(name, c.deed, func(p *process) func() { return w.killAt(p, c.call, c.lost) }, "")
			}
			if t.Logf("%d of %d died", killed, n); killed < n*9/10 { // a deed may need fewer calls than the one that was counted
				t.Errorf("only %d of %d processes died on the way", killed, n)
			}
		})
	}
}

// count returns how many calls an operation makes.
func (w *world) count(t *testing.T, deed string) int {
	spec := w.spec(199)
	d := w.driver
	defer func() { ok(t, "Destroy", d.Destroy(t.Context(), spec.Ref())) }()
	if deed == "destroy" {
		ok(t, "Create", d.Create(t.Context(), spec))
		ok(t, "Start", d.Start(t.Context(), spec.Ref()))
	}
	w.node.ResetCalls()
	p := w.child(deed, spec, "")
	if p.wait(t); p.err != nil {
		t.Fatalf("%v: %s", p.err, p.errs)
	}
	return w.node.TotalCalls()
}

// killAt kills a process when the node gets its kth call from now on: the call
// is lost, or executed without a reader of the result.
func (w *world) killAt(p *process, k int, lost bool) (disarm func()) {
	stop := func() {}
	if k > 1 {
		stop = w.node.Fail("*", pvenode.Fault{Times: k - 1})
	}
	kill := w.node.Fail("*", pvenode.Fault{Times: 1, Lost: lost, Reached: p.kill})
	return func() { stop(); kill() }
}

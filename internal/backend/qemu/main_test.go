package qemu

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/backendtest"
	"github.com/agentlab-vm/agentlab/internal/backend/registry"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/egress/gate"
	"github.com/agentlab-vm/agentlab/internal/image"
	"github.com/agentlab-vm/agentlab/internal/qemuvm"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
	"github.com/agentlab-vm/agentlab/internal/vmdir"
	"github.com/agentlab-vm/agentlab/test/fakenet"
	"github.com/agentlab-vm/agentlab/test/guard"
	"github.com/agentlab-vm/agentlab/test/sample"
)

// bootTimeout is generous: guests are emulated, on machines that do other
// work too.
const bootTimeout = guard.Patience

// The test binary is also the shim, and the process that dies in crash tests.
func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == "nested" {
		os.Exit(nested())
	}
	switch {
	case len(os.Args) == 4 && os.Args[1] == "vmm":
		if err := runSupervisor(context.Background(), os.Args[3], os.Args[2]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	case len(os.Args) == 3 && os.Args[1] == "die":
		os.Exit(die(os.Args[2]))
	}
	os.Exit(guard.Run(m))
}

// runner builds agent-runner once.
func runner() (string, error) {
	dir, err := guard.Programs("../../..", "./cmd/agent-runner")
	return filepath.Join(dir, "agent-runner"), err
}

// sharedDir returns a directory that all tests of this run use at the same time.
func sharedDir(t testing.TB, name string) string {
	t.Helper()
	dir, err := guard.Once("qemu-"+name, func(string) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// images is the image store that all tests of the project share.
func images(t testing.TB) *image.Store {
	dir := os.Getenv("AGENTLAB_TEST_CACHE")
	if dir == "" {
		dir = "../../../.cache/test"
	}
	return image.NewStore(filepath.Join(dir, "images"), image.Options{})
}

var baseImage = sync.OnceValues(func() (vmdir.ImageFiles, error) {
	img, err := images(nil).Ensure(context.Background(), "base", func(string) {})
	return vmdir.ImageFiles{Ref: img.Ref(), RootDisk: img.RootDisk(), Kernel: img.Kernel(), Modules: img.Modules()}, err
})

// fixed is the part of a driver's configuration that another process needs to
// open the same driver.
type fixed struct {
	StateDir, CacheDir, Runner string
	Image                      vmdir.ImageFiles
	Internet                   string // socket of the guests' internet; "" means that of the host
	PauseBelow                 uint64
	TemplateBytes              int64
	TemplateDir                string
	QEMU                       string // "": the one that is installed
	UpstreamProxy              *gate.ProxyConfig
}

func (f fixed) open() (*Driver, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	d, err := New(Config{
		StateDir: f.StateDir, CacheDir: f.CacheDir, Runner: f.Runner, UpstreamProxy: f.UpstreamProxy, PauseBelow: f.PauseBelow, TemplateBytes: f.TemplateBytes, TemplateDir: f.TemplateDir, QEMU: f.QEMU, Supervisor: []string{self, "vmm", f.Internet},
		Images: func(_ context.Context, ref string) (vmdir.ImageFiles, error) {
			if ref != f.Image.Ref {
				return vmdir.ImageFiles{}, agentlab.Errorf(agentlab.CodeNotFound, "no image %s", ref)
			}
			return f.Image, nil
		},
	})
	if err == nil && f.TemplateDir != "" {
		d.tmpl.stop() // tests that share templates make none in the background
	}
	return d, err
}

// vmFixture is for tests that boot VMs.
func vmFixture(t testing.TB) fixed {
	t.Helper()
	sample.Long(t, "it boots virtual machines")
	img, err := baseImage()
	if err != nil {
		t.Fatalf("the base image: %v (%s)", err, agentlab.HintOf(err))
	}
	r, err := runner()
	if err != nil {
		t.Fatal(err)
	}
	f := fixed{StateDir: stateDir(t), CacheDir: sharedCache(t), Runner: r, Image: img}
	t.Cleanup(func() { f.destroyAll(t) })
	return f
}

// warmFixture is vmFixture for sandboxes that start from a template, which all
// tests share.
func warmFixture(t testing.TB) fixed {
	t.Helper()
	f := vmFixture(t)
	f.TemplateBytes, f.TemplateDir = 4<<30, sharedDir(t, "templates")
	d, err := f.open()
	if err == nil {
		_, err = d.WarmTemplate(t.Context(), f.spec(1))
	}
	if err != nil {
		t.Fatalf("a template: %v", err)
	}
	return f
}

// sharedCache keeps initrds and the KVM verdict for all tests of this run.
func sharedCache(t testing.TB) string { return sharedDir(t, "cache") }

// stateDir is like t.TempDir, but says what was left in it.
func stateDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "agentlab-qemu-*")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// destroyAll destroys what a test left, and fails it for any process of it
// that still lives after that.
func (f fixed) destroyAll(t testing.TB) {
	d, err := f.open()
	if err != nil {
		t.Error(err)
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), bootTimeout)
	defer cancel()
	list, err := d.List(ctx)
	if err != nil {
		t.Error(err)
	}
	for _, in := range list {
		if t.Failed() {
			for _, name := range []string{shimLog, qemuvm.FileLog, "shim.stderr", "console.log"} {
				b, _ := os.ReadFile(filepath.Join(d.dir(in.Ref), name))
				t.Logf("%s:\n%s", name, b[max(0, len(b)-3000):])
			}
		}
		if err := d.Destroy(ctx, in.Ref); err != nil {
			t.Error(err)
		}
	}
	eventually(t, bootTimeout, "no process is left", func() error {
		if left := processes(f.StateDir); len(left) > 0 {
			return fmt.Errorf("%q", left)
		}
		return nil
	})
}

// processes lists the command lines of the processes that work in dir.
func processes(dir string) []string {
	var found []string
	stats, _ := filepath.Glob("/proc/[0-9]*/cwd")
	for _, cwd := range stats {
		if to, err := os.Readlink(cwd); err == nil && strings.HasPrefix(to, dir) {
			b, _ := os.ReadFile(filepath.Join(filepath.Dir(cwd), "cmdline"))
			found = append(found, filepath.Base(filepath.Dir(cwd))+": "+strings.ReplaceAll(string(b), "\x00", " "))
		}
	}
	return found
}

func eventually(t testing.TB, within time.Duration, what string, cond func() error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	var last error
	for {
		if last = cond(); last == nil {
			return
		}
		select {
		case <-ctx.Done():
			t.Fatalf("%s: not within %s: %v", what, within, last)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// dir returns the directory of a sandbox; "" means that there is none.
func (d *Driver) dir(ref backend.Ref) string {
	f, _ := d.find(ref.UID)
	return f.Dir
}

// Files of the supervisor in a sandbox's directory.
const shimLog, shimPID, qemuPID = "shim.log", "shim.pid", "qemu.pid"

// runSupervisor is the process of a sandbox's supervisor.
func runSupervisor(ctx context.Context, dir, internet string) error {
	var o supervisor.Options
	if internet != "" {
		o.Dialer = fakenet.UnixDialer{Path: internet}
	}
	return supervisor.Run(ctx, dir, func(name string) (supervisor.Kind, error) {
		_, err := registry.List{Backend}.VM(name)
		return crashKind, err
	}, o)
}

// fileCrash names a point of machine.at and what happens there, in a sandbox's
// directory: "supervisor" or "QEMU" is killed, or "space" is used up,
// or "nothing" but a pause.
const fileCrash = "crash"

// crashKind opens a VM that is killed where fileCrash says.
func crashKind(dir string, h supervisor.Hooks) (supervisor.VM, error) {
	vm, err := openVM(dir, h)
	if m, ok := vm.(*machine); ok {
		m.crash = func(point string) {
			text, _ := os.ReadFile(filepath.Join(dir, fileCrash))
			at, victim, _ := strings.Cut(string(text), "/")
			if at != point {
				return
			}
			_ = os.Remove(filepath.Join(dir, fileCrash))
			switch victim {
			case "QEMU":
				m.Kill()
				<-m.Done()
				return
			case "nothing":
				time.Sleep(time.Second) // so that others see the point
				return
			case "space":
				fillTo(dir, spaceLeft)
				return
			}
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
	}
	return vm, err
}

// noted returns the process ID in a file of a sandbox's directory.
func noted(dir, name string) (int, error) {
	var p struct{ PID int }
	err := durable.ReadJSON(filepath.Join(dir, name), &p)
	return p.PID, err
}

// spec returns a sandbox of the nth number.
func (f fixed) spec(n int) backend.Spec {
	return backend.Spec{
		VMID: 1000 + n, UID: uid(n), Name: fmt.Sprintf("box-%d", n), Image: f.Image.Ref,
		Resources: agentlab.Resources{Cores: 1, MemoryMB: 512}, Network: agentlab.Network{Mode: agentlab.NetworkNAT},
	}
}

// uid is a mark that is the same in every process.
func uid(n int) string {
	return strings.Repeat("a", 24) + string([]byte{'a' + byte(n/26), 'a' + byte(n%26)})
}

// methodWarm makes a template.
const methodWarm backendtest.Method = "Warm"

// doomed is a call that another process makes and dies in.
type doomed struct {
	Fixed  fixed
	Method backendtest.Method
	Point  string
	Spec   backend.Spec

	Snapshot backend.SnapshotRef // for the methods with snapshots

	Volume   backend.VolumeSpec // for those of volumes: the volume, or the clone
	Saved    backend.VolumeSnapshotRef
	Attached backend.Ref
}

// die makes the call and kills itself, as SIGKILL does, when it comes to the
// point.
func die(arg string) int {
	var c doomed
	if err := json.Unmarshal([]byte(arg), &c); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	d, err := c.Fixed.open()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	d.crash = func(point string) {
		if point == c.Point {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
	}
	ctx := context.Background()
	switch c.Method {
	case backendtest.MethodCreate:
		err = d.Create(ctx, c.Spec)
	case backendtest.MethodStart:
		err = d.Start(ctx, c.Spec.Ref())
	case backendtest.MethodStop:
		err = d.Stop(ctx, c.Spec.Ref(), time.Second)
	case backendtest.MethodDestroy:
		err = d.Destroy(ctx, c.Spec.Ref())
	case backendtest.MethodSaveSnapshot:
		_, err = d.SaveSnapshot(ctx, c.Snapshot.Of, c.Snapshot.UID)
	case backendtest.MethodRestoreSnapshot:
		err = d.RestoreSnapshot(ctx, c.Snapshot)
	case backendtest.MethodDeleteSnapshot:
		err = d.DeleteSnapshot(ctx, c.Snapshot)
	case methodWarm:
		_, err = d.WarmTemplate(ctx, c.Spec)
	default:
		err = c.volumes(ctx, d)
	}
	fmt.Fprintln(os.Stderr, "not reached:", c.Point, err)
	return 3
}

// dieIn runs the call in a process of its own, and returns an error when that
// died at the point.
func (c doomed) dieIn() error {
	arg, err := json.Marshal(c)
	if err != nil {
		panic(err) // a nil would say that the point was not reached
	}
	self, err := os.Executable()
	if err != nil {
		panic(err)
	}
	cmd := exec.Command(self, "die", string(arg))
	cmd.Stderr = os.Stderr
	err = cmd.Run()
	if ws, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && ws.Signaled() && ws.Signal() == syscall.SIGKILL {
		return err
	}
	return nil
}

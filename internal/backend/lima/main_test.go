package lima

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
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
	"github.com/agentlab-vm/agentlab/internal/image"
	"github.com/agentlab-vm/agentlab/internal/qemuvm"
	"github.com/agentlab-vm/agentlab/internal/vmdir"
	"github.com/agentlab-vm/agentlab/test/guard"
	"github.com/agentlab-vm/agentlab/test/limactl"
	"github.com/agentlab-vm/agentlab/test/sample"
)

// The test binary is also the supervisor, the wrapper, and the process that dies in
// crash tests.
func TestMain(m *testing.M) {
	switch {
	case len(os.Args) > 2 && (os.Args[1] == "vmm" || os.Args[1] == "helper"):
		if err := (registry.List{Backend}).Process(context.Background(), os.Args[1], os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	case len(os.Args) == 3 && os.Args[1] == "die":
		os.Exit(die(os.Args[2]))
	}
	if flag.Parse(); !testing.Short() { // else no test runs limactl
		if os.Geteuid() == 0 {
			_, _ = baseImage() // only root can build it; the tests report an error
		}
		if code, ran := limactl.AsUser(); ran {
			os.Exit(code)
		}
	}
	os.Exit(guard.Run(m))
}

var baseImage = sync.OnceValues(func() (vmdir.ImageFiles, error) {
	dir := os.Getenv("AGENTLAB_TEST_CACHE")
	if dir == "" {
		dir = "../../../.cache/test"
	}
	img, err := image.NewStore(filepath.Join(dir, "images"), image.Options{}).Ensure(context.Background(), "base", func(string) {})
	return vmdir.ImageFiles{Ref: img.Ref(), RootDisk: img.RootDisk(), Kernel: img.Kernel(), Modules: img.Modules()}, err
})

// fixed is the part of a driver's configuration that another process needs to
// open the same driver.
type fixed struct {
	StateDir, CacheDir, Runner, Limactl string
	Image                               vmdir.ImageFiles
}

func (f fixed) open() (*Driver, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	return New(Config{
		StateDir: f.StateDir, CacheDir: f.CacheDir, Runner: f.Runner, Limactl: f.Limactl,
		Supervisor: []string{self, "vmm"}, Wrapper: []string{self, "helper", Name},
		Images: func(_ context.Context, ref string) (vmdir.ImageFiles, error) {
			if ref != f.Image.Ref {
				return vmdir.ImageFiles{}, agentlab.Errorf(agentlab.CodeNotFound, "no image %s", ref)
			}
			return f.Image, nil
		},
		Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})),
	})
}

func (f fixed) spec(n int) backend.Spec {
	return backend.Spec{
		VMID: 1000 + n, UID: strings.Repeat("a", 24) + string([]byte{'a' + byte(n/26), 'a' + byte(n%26)}), Name: fmt.Sprintf("box-%d", n), Image: f.Image.Ref,
		Resources: agentlab.Resources{Cores: 1, MemoryMB: 512}, Network: agentlab.Network{Mode: agentlab.NetworkNAT},
	}
}

// newFixture returns the configuration of a driver with a real limactl.
func newFixture(t testing.TB, img vmdir.ImageFiles) fixed {
	t.Helper()
	sample.Long(t, "it builds limactl")
	dir, err := guard.Programs("../../..", "./cmd/agent-runner")
	if err != nil {
		t.Fatal(err)
	}
	cache, err := guard.Once("lima-cache", func(string) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	state, err := os.MkdirTemp("", "agentlab-lima-*")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(state) })
	f := fixed{StateDir: state, CacheDir: cache, Runner: filepath.Join(dir, "agent-runner"), Limactl: limactl.Build(t, "../../.."), Image: img}
	t.Cleanup(func() { f.destroyAll(t) })
	return f
}

// vmFixture is newFixture for tests that boot VMs.
func vmFixture(t testing.TB) fixed {
	t.Helper()
	sample.Long(t, "it boots virtual machines")
	img, err := baseImage()
	if err != nil {
		t.Fatalf("the base image: %v (%s)", err, agentlab.HintOf(err))
	}
	return newFixture(t, img)
}

// still returns a driver for tests without a VM, with a small image.
func still(t testing.TB) (*Driver, fixed) {
	t.Helper()
	dir := t.TempDir()
	img := vmdir.ImageFiles{Ref: "base@0", RootDisk: filepath.Join(dir, "root.img"), Kernel: filepath.Join(dir, "vmlinux"), Modules: filepath.Join(dir, "modules.cpio")}
	for path, size := range map[string]int64{img.RootDisk: 8 << 20, img.Kernel: 4096, img.Modules: 512} {
		if err := errors.Join(os.WriteFile(path, []byte("content"), 0o600), os.Truncate(path, size)); err != nil {
			t.Fatal(err)
		}
	}
	f := newFixture(t, img)
	d, err := f.open()
	if err != nil {
		t.Fatal(err)
	}
	return d, f
}

// destroyAll destroys what a test left, and fails it for any process of it
// that still lives after that.
func (f fixed) destroyAll(t testing.TB) {
	d, err := f.open()
	if err != nil {
		t.Error(err)
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), guard.Patience)
	defer cancel()
	list, err := d.List(ctx)
	if err != nil {
		t.Error(err)
	}
	for _, in := range list {
		if t.Failed() {
			for _, name := range []string{"shim.log", qemuvm.FileLog, fileLimaLog, "shim.stderr", "console.log"} {
				b, _ := os.ReadFile(filepath.Join(d.dir(in.Ref), name))
				t.Logf("%s:\n%s", name, b[max(0, len(b)-3000):])
			}
			b, _ := os.ReadFile(filepath.Join(d.instance(in.Ref.UID), "ha.stderr.log"))
			t.Logf("ha.stderr.log:\n%s", b[max(0, len(b)-3000):])
		}
		if err := d.Destroy(ctx, in.Ref); err != nil {
			t.Error(err)
		}
	}
	if left, _ := os.ReadDir(d.home()); len(left) > 2 { // _config and _disks
		t.Errorf("instances are left: %v", left)
	}
	for {
		left := processes(f.StateDir)
		if len(left) == 0 {
			return
		}
		select {
		case <-ctx.Done():
			t.Errorf("processes are left: %q", left)
			return
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// processes lists the command lines of the processes that work in dir.
func processes(dir string) []string {
	var found []string
	stats, _ := filepath.Glob("/proc/[0-9]*/cwd")
	for _, cwd := range stats {
		if to, err := os.Readlink(cwd); err == nil && strings.HasPrefix(to, dir) {
			b, _ := os.ReadFile(filepath.Join(filepath.Dir(cwd), "cmdline"))
			found = append(found, strings.ReplaceAll(string(b), "\x00", " "))
		}
	}
	return found
}

// dir returns the directory of a sandbox; "" means that there is none.
func (d *Driver) dir(ref backend.Ref) string {
	f, _ := d.set.Find(ref.UID)
	return f.Dir
}

// doomed is a call that another process makes and dies in.
type doomed struct {
	Fixed  fixed
	Method backendtest.Method
	Point  string
	Spec   backend.Spec
	Volume backend.VolumeSpec
	Has    backend.Ref // the sandbox that gets or loses the volume
	Saved  backend.VolumeSnapshotRef
}

// die makes the call and kills itself, as SIGKILL does, when it comes to the
// point.
func die(arg string) int {
	var c doomed
	err := json.Unmarshal([]byte(arg), &c)
	var d *Driver
	if err == nil {
		d, err = c.Fixed.open()
	}
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
	default:
		err = c.volumes(ctx, d)
	}
	fmt.Fprintf(os.Stderr, "%s did not come to %q: %v\n", c.Method, c.Point, err)
	return 3
}

// dieIn makes the call in another process. It returns an error if that died at the point.
func (c *doomed) dieIn() error {
	arg, err := json.Marshal(c)
	if err != nil {
		return err
	}
	cmd := exec.Command("/proc/self/exe", "die", string(arg))
	out, err := cmd.CombinedOutput()
	if cmd.ProcessState == nil || !cmd.ProcessState.Exited() {
		return fmt.Errorf("the process was killed: %w", err)
	}
	_, _ = os.Stderr.Write(out)
	return nil
}

package qemu

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/qemuvm"
	"github.com/agentlab-vm/agentlab/internal/vmdir"
	"github.com/agentlab-vm/agentlab/test/smalldisk"
)

// still returns a driver on an image of nothing, for what needs no VM.
func still(t *testing.T) (*Driver, fixed) {
	t.Helper()
	dir := t.TempDir()
	img := vmdir.ImageFiles{Ref: "base@0", RootDisk: filepath.Join(dir, "root.img"), Kernel: filepath.Join(dir, "vmlinux"), Modules: filepath.Join(dir, "modules.cpio")}
	for path, size := range map[string]int64{img.RootDisk: 3<<30 + 512, img.Kernel: 10, img.Modules: 10} {
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(path, size); err != nil {
			t.Fatal(err)
		}
	}
	f := fixed{StateDir: filepath.Join(dir, "state"), CacheDir: filepath.Join(dir, "cache"), Runner: img.Kernel, Image: img}
	d, err := f.open()
	if err != nil {
		t.Fatal(err)
	}
	return d, f
}

func TestRootSize(t *testing.T) {
	d, f := still(t)
	for i, test := range []struct {
		gb   int
		want string // virtual size in bytes, "" when refused
	}{{0, "3221225984"}, {3, ""}, {4, "4294967296"}, {65536, "70368744177664"}} {
		sp := f.spec(i)
		sp.Resources.RootSizeGB = test.gb
		err := d.Create(t.Context(), sp)
		if test.want == "" {
			e, ok := err.(*agentlab.Error)
			if !ok || e.Code != agentlab.CodeInvalid || e.Field != "storage.root_size_gb" || !strings.HasSuffix(e.Hint, "at least 4") || strings.Contains(e.Error(), "MiB") {
				t.Errorf("%d GiB: %#v", test.gb, err)
			}
			if _, err := d.Inspect(t.Context(), sp.Ref()); agentlab.CodeOf(err) != agentlab.CodeNotFound {
				t.Errorf("a refused Create left something: %v", err)
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		out, err := exec.Command("qemu-img", "info", "--output=json", filepath.Join(d.dir(sp.Ref()), fileRoot)).CombinedOutput()
		if err != nil || !strings.Contains(string(out), `"virtual-size": `+test.want) ||
			!strings.Contains(string(out), `"backing-filename-format": "raw"`) || !strings.Contains(string(out), `"full-backing-filename": "`+f.Image.RootDisk) {
			t.Errorf("%d GiB: %v\n%s", test.gb, err, out)
		}
	}
}

func TestCreateRefusals(t *testing.T) {
	d, f := still(t)
	good := f.spec(1)
	if err := d.Create(t.Context(), good); err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		change func(*backend.Spec)
		code   agentlab.Code
	}{
		"other specification": {func(s *backend.Spec) { s.Resources.Cores++ }, agentlab.CodeExists},
		"no such image":       {func(s *backend.Spec) { s.VMID, s.UID, s.Image = 7, uid(7), "none@0" }, agentlab.CodeNotFound},
		"no image":            {func(s *backend.Spec) { s.VMID, s.UID, s.Image = 7, uid(7), "" }, agentlab.CodeInvalid},
		"no name":             {func(s *backend.Spec) { s.VMID, s.UID, s.Name = 7, uid(7), "A B" }, agentlab.CodeInvalid},
		"no number":           {func(s *backend.Spec) { s.VMID = 0 }, agentlab.CodeInvalid},
		"path as a mark":      {func(s *backend.Spec) { s.UID = "../../aaaaaaaaaaaaaaaaaaaa" }, agentlab.CodeInvalid},
		"no cores":            {func(s *backend.Spec) { s.Resources.Cores = 0 }, agentlab.CodeInvalid},
		"little memory":       {func(s *backend.Spec) { s.Resources.MemoryMB = 200 }, agentlab.CodeUnsupported},
		"unknown network":     {func(s *backend.Spec) { s.Network.Mode = "" }, agentlab.CodeUnsupported},
	} {
		sp := good
		test.change(&sp)
		if err := d.Create(t.Context(), sp); agentlab.CodeOf(err) != test.code {
			t.Errorf("%s: %v, want code %s", name, err, test.code)
		}
	}
	if list, err := d.List(t.Context()); err != nil || len(list) != 1 || list[0].Power != backend.PowerStopped {
		t.Errorf("%+v, %v", list, err)
	}
}

// A sandbox of the warm pool that was handed out has another name and another
// network: the next Create stores both.
func TestCreateStoresTheName(t *testing.T) {
	d, f := still(t)
	sp := f.spec(1)
	if err := d.Create(t.Context(), sp); err != nil {
		t.Fatal(err)
	}
	sp.Name, sp.Network.Mode = "renamed", agentlab.NetworkOff
	if err := d.Create(t.Context(), sp); err != nil {
		t.Fatal(err)
	}
	in, err := d.Inspect(t.Context(), sp.Ref())
	if err != nil || in.Name != "renamed" || in.Spec.Name != "renamed" || in.Spec.Network.Mode != agentlab.NetworkOff {
		t.Errorf("%+v, %v", in, err)
	}
}

// TestDiskFull runs on a file system that has no room.
func TestDiskFull(t *testing.T) {
	_, f := still(t)
	if err := os.MkdirAll(f.StateDir, 0o700); err != nil {
		t.Fatal(err)
	}
	resize := smalldisk.Tmpfs(t, f.StateDir, "128k")
	d, err := f.open()
	if err != nil {
		t.Fatal(err)
	}
	sp := f.spec(1)
	fill := filepath.Join(f.StateDir, "fill")
	for _, left := range []int64{64 << 10, 0} { // room for the mark but not the disk; for nothing
		if err := os.WriteFile(fill, make([]byte, 120<<10-left), 0o600); err != nil && left > 0 {
			t.Fatal(err)
		}
		if left == 0 {
			g, err := os.OpenFile(fill, os.O_APPEND|os.O_WRONLY, 0)
			if err != nil {
				t.Fatal(err)
			}
			for err == nil {
				_, err = g.Write(make([]byte, 4096))
			}
			_ = g.Close()
		}
		err := d.Create(t.Context(), sp)
		if agentlab.CodeOf(err) != agentlab.CodeNoSpace || agentlab.HintOf(err) == "" {
			t.Errorf("%d bytes left: %v (code %s), want no_space and a hint", left, err, agentlab.CodeOf(err))
		}
		if err := d.Destroy(t.Context(), sp.Ref()); err != nil {
			t.Error(err)
		}
	}
	if err := os.Remove(fill); err != nil {
		t.Fatal(err)
	}
	resize("10m")
	if err := d.Create(t.Context(), sp); err != nil {
		t.Errorf("with room again: %v", err)
	}
}

// stateJSON is the supervisor's file with the state of the last run.
const stateJSON = "state.json"

func TestDamagedFiles(t *testing.T) {
	d, f := still(t)
	sp := f.spec(1)
	if err := d.Create(t.Context(), sp); err != nil {
		t.Fatal(err)
	}
	dir := d.dir(sp.Ref())
	if err := os.WriteFile(filepath.Join(dir, stateJSON), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if in, err := d.Inspect(t.Context(), sp.Ref()); err != nil || in.Power != backend.PowerCrashed || in.Reason == "" || !in.HostRestarted {
		t.Errorf("a state that was lost in a power cut: %+v, %v", in, err)
	}
	// A damaged file is reported, and never treated as absent.
	for _, name := range []string{stateJSON, vmdir.FileConfig} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("{"), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := d.Inspect(t.Context(), sp.Ref()); agentlab.CodeOf(err) != agentlab.CodeInternal {
			t.Errorf("damaged %s: %v", name, err)
		}
		list, err := d.List(t.Context())
		if err != nil || len(list) != 1 || list[0].Power != backend.PowerPartial || list[0].Reason == "" {
			t.Errorf("damaged %s: %+v, %v", name, list, err)
		}
	}
	if err := d.Destroy(t.Context(), sp.Ref()); err != nil {
		t.Error(err)
	}
	if list, err := d.List(t.Context()); err != nil || len(list) != 0 {
		t.Errorf("%+v, %v", list, err)
	}
}

// A database that was lost is made again from what List answers.
func TestListHasAllSandboxes(t *testing.T) {
	d, f := still(t)
	sp := f.spec(1)
	if err := d.Create(t.Context(), sp); err != nil {
		t.Fatal(err)
	}
	list, err := d.List(t.Context())
	if err != nil || len(list) != 1 || list[0].Spec == nil || !reflect.DeepEqual(*list[0].Spec, sp) {
		t.Errorf("%+v, %v; want %+v", list, err, sp)
	}
}

func TestNewerHandle(t *testing.T) {
	d, f := still(t)
	sp := f.spec(1)
	if err := d.Create(t.Context(), sp); err != nil {
		t.Fatal(err)
	}
	if err := durable.ReplaceJSON(filepath.Join(d.dir(sp.Ref()), vmdir.FileConfig), handle{Version: vmdir.Version + 1, Spec: sp}, durable.None); err != nil {
		t.Fatal(err)
	}
	for what, err := range map[string]error{
		"Start":  d.Start(t.Context(), sp.Ref()),
		"Create": d.Create(t.Context(), sp),
	} {
		if agentlab.CodeOf(err) != agentlab.CodeUnsupported || agentlab.HintOf(err) == "" {
			t.Errorf("%s: %v, want unsupported and a hint", what, err)
		}
	}
}

func TestArgs(t *testing.T) {
	h := handle{Spec: fixed{Image: vmdir.ImageFiles{Ref: "b@0"}}.spec(1), Image: vmdir.ImageFiles{Kernel: "/k,ernel"}}
	h.Spec.Resources = agentlab.Resources{Cores: 100, MemoryMB: 300}
	find := func(args []string, name string) string {
		i := slices.Index(args, name)
		if i < 0 {
			return ""
		}
		return args[i+1]
	}
	tcg := vmArgs(h, startConfig{Machine: qemuvm.Machine{Accel: qemuvm.AccelTCG, TSCKHz: 7, TSCFixed: true}, Initrd: "/i"}, fds{net: 3, control: 4, console: 5, qmp: 6})
	kvm := vmArgs(h, startConfig{Machine: qemuvm.Machine{Accel: qemuvm.AccelKVM, TSCKHz: 7, TSCFixed: true}, Initrd: "/i"}, fds{net: 3, control: 4, console: 5, qmp: 6})
	for name, want := range map[string]string{"-smp": "100", "-m": "300M", "-kernel": "/k,ernel", "-initrd": "/i", "-accel": "tcg,thread=single,tb-size=128", "-cpu": "max,-erms,-fsrm,-svm,-vmx"} {
		if got := find(tcg, name); got != want {
			t.Errorf("%s %s, want %s", name, got, want)
		}
	}
	if got := find(kvm, "-accel") + " " + find(kvm, "-cpu"); got != "kvm host,-svm,-vmx" {
		t.Error(got)
	}
	if got := find(tcg, "-append"); !strings.Contains(got, "transparent_hugepage=madvise mitigations=off norandmaps tsc_early_khz=7 tsc=reliable") {
		t.Error(got)
	}
	if got := find(kvm, "-append"); strings.Contains(got, "tsc") || strings.Contains(got, "mitigations") || strings.Contains(got, "norandmaps") {
		t.Error(got)
	}
	for _, flag := range []string{"-nodefaults", "-no-user-config", "-no-reboot"} {
		if !slices.Contains(tcg, flag) {
			t.Errorf("%s is missing", flag)
		}
	}
	for i, arg := range tcg { // a format that is guessed may be one that the guest wrote
		if arg == "-drive" || arg == "-blockdev" && !strings.HasPrefix(tcg[i+1], "driver=") {
			t.Errorf("the format of %s is not named", tcg[i+1])
		}
	}
	if got := find(tcg, "-sandbox"); !strings.Contains(got, "spawn=deny") {
		t.Error(got)
	}
	if a, b := find(tcg, "-append"), find(vmArgs(handle{}, startConfig{Machine: qemuvm.Machine{Accel: qemuvm.AccelTCG, TSCKHz: 7, TSCFixed: true}}, fds{}), "-append"); a != b {
		t.Errorf("the kernel's command line is not the same for all sandboxes: %q, %q", a, b)
	}
}

func TestNewRefusals(t *testing.T) {
	_, f := still(t)
	good := Config{StateDir: f.StateDir, CacheDir: f.CacheDir, Runner: f.Runner, Images: func(context.Context, string) (vmdir.ImageFiles, error) { return f.Image, nil }}
	for name, change := range map[string]func(*Config){
		"StateDir": func(c *Config) { c.StateDir = "relative" },
		"CacheDir": func(c *Config) { c.CacheDir = "" },
		"Runner":   func(c *Config) { c.Runner = "" },
		"Images":   func(c *Config) { c.Images = nil },
		"accel":    func(c *Config) { c.Accel = "xen" },
	} {
		c := good
		change(&c)
		_, err := New(c)
		if e, ok := err.(*agentlab.Error); !ok || e.Code != agentlab.CodeInvalid || e.Field != name {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A stopped sandbox that an older version made can be started again, which
// begins with a Create.
func TestCreateOfOlderHandle(t *testing.T) {
	d, f := still(t)
	sp := f.spec(1)
	sp.Options = `{"nic_model":"virtio"}`
	if err := d.Create(t.Context(), sp); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(d.dir(sp.Ref()), vmdir.FileConfig)
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var older bytes.Buffer
	if err := json.Compact(&older, text); err != nil {
		t.Fatal(err)
	}
	if field := `"Hardware":{"nic_model":"virtio"}`; !strings.Contains(older.String(), field) {
		t.Errorf("%s has no %s, which older versions write and read", older.String(), field)
	}
	if err := os.WriteFile(path, older.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := d.Create(t.Context(), sp); err != nil {
		t.Error(err)
	}
	sp.Options = ""
	if err := d.Create(t.Context(), sp); agentlab.CodeOf(err) != agentlab.CodeExists {
		t.Errorf("Create with other options: %v", err)
	}
}

// The one network device that a guest has is taken when it is named.
func TestNetworkDeviceByName(t *testing.T) {
	d, f := still(t)
	for model, want := range map[string]agentlab.Code{"virtio": "", "e1000": agentlab.CodeUnsupported} {
		sp := f.spec(1)
		sp.Options = agentlab.Options(`{"nic_model":"` + model + `"}`)
		if err := d.Validate(sp); agentlab.CodeOf(err) != want {
			t.Errorf("%s: %v", model, err)
		}
	}
}

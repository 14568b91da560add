package lima

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/qemuvm"
	"github.com/agentlab-vm/agentlab/internal/vmdir"
	"github.com/agentlab-vm/agentlab/test/guard"
)

// Only what prints a text goes to QEMU without the supervisor, and only the command line of
// the instance, without a mount, is accepted.
func TestWrapperArguments(t *testing.T) {
	for text, want := range map[string]bool{
		"--version": true, "-M none -accel help": true, "-M none -netdev help": true, "-machine help": true, "-cpu help -machine q35": true,
		"": false, "-machine q35": false, "-accel help -drive file=/etc/shadow": false, "-netdev user,id=n help": false, "--version -monitor stdio": false,
	} {
		if got := query(strings.Fields(text)); got != want {
			t.Errorf("%q: %v", text, got)
		}
	}
	for text, want := range map[string]agentlab.Code{
		"-m 512 -name lima-abc -drive file=x": "",
		"-m 512 -name lima-abd":               agentlab.CodeConflict,
		"-m 512":                              agentlab.CodeConflict,
		"-name":                               agentlab.CodeConflict,
		"-name lima-abc -virtfs local,path=/": agentlab.CodeConflict,
		"-name lima-abc -device vhost-user-fs-pci,tag=mount0": agentlab.CodeConflict,
	} {
		if err := checkArgs(strings.Fields(text), "abc"); agentlab.CodeOf(err) != want {
			t.Errorf("%q: %v", text, err)
		}
	}
}

// QEMU gets none of the devices that Lima adds: no network of its own, no mount, no
// disk of the user, no log without a size.
func TestCommandLine(t *testing.T) {
	h := vmdir.Handle{Spec: fixed{Image: vmdir.ImageFiles{Ref: "b@0"}}.spec(1), Image: vmdir.ImageFiles{Kernel: "/k", RootDisk: "/im,age/root.img"}}
	args := vmArgs(h, startConfig{Initrd: "/i", Machine: qemuvm.Machine{Accel: qemuvm.AccelTCG}}, "/home/vm")
	var netdevs, disks []string
	for i, a := range args {
		for _, bad := range []string{"user,", "hostfwd", "logfile", "virtfs", "fsdev", "cidata", "iso", "ssh", "vhost", "vnc", "tap"} {
			if strings.Contains(a, bad) && a != "-no-user-config" {
				t.Errorf("%q has %s", a, bad)
			}
		}
		switch a {
		case "-netdev":
			netdevs = append(netdevs, args[i+1])
		case "-blockdev":
			disks = append(disks, args[i+1])
		case "-drive", "-nic", "-net", "-hda", "-serial", "-parallel":
			t.Errorf("%s %s", a, args[i+1])
		}
	}
	if len(netdevs) != 1 || !strings.HasPrefix(netdevs[0], "stream,") {
		t.Errorf("networks: %q", netdevs)
	}
	want := []string{
		"driver=file,node-name=base-file,read-only=on,filename=/im,,age/root.img", "driver=raw,node-name=base,read-only=on,file=base-file",
		"driver=file,node-name=root-file,discard=unmap,filename=/home/vm/diffdisk",
		"driver=qcow2,node-name=root,file=root-file,backing=base,discard=unmap,detect-zeroes=unmap",
		"driver=file,node-name=no-volume,filename=no-volume", "driver=raw,node-name=volume,file=no-volume,discard=unmap",
	}
	if !slices.Equal(disks, want) {
		t.Errorf("disks: %q", disks)
	}
}

// limactl reads the template as it is meant.
func TestTemplate(t *testing.T) {
	d, f := still(t)
	sp := f.spec(1)
	sp.Resources.Cores, sp.Resources.MemoryMB, sp.Resources.RootSizeGB = 2, 1024, 3
	if err := d.Create(t.Context(), sp); err != nil {
		t.Fatal(err)
	}
	in := d.listed(t)
	if len(in) != 1 || in[0].Name != instanceName(sp.UID) || in[0].Status != "Stopped" || in[0].CPUs != 2 || in[0].Memory != 1<<30 || in[0].Disk != 3<<30 {
		t.Errorf("%+v", in)
	}
	c := in[0].Config
	if len(c.Mounts) > 0 || !c.Plain || c.SSH.ForwardAgent || c.SSH.LocalPort != 0 || c.Containerd["user"] != false || c.Containerd["system"] != false {
		t.Errorf("%+v", c)
	}
	if to, err := os.Readlink(filepath.Join(d.instance(sp.UID), limaBaseDisk)); err != nil || to != f.Image.RootDisk {
		t.Errorf("the disk of the image: %s, %v", to, err)
	}
	sp2 := f.spec(2)
	sp2.From = &backend.SnapshotRef{UID: sp.UID}
	if err := d.Create(t.Context(), sp2); agentlab.CodeOf(err) != agentlab.CodeUnsupported || agentlab.HintOf(err) == "" {
		t.Errorf("from a snapshot: %v", err)
	}
}

// listed is an instance in the output of 'limactl list --json'.
type listed struct {
	Name, Status string
	CPUs         int
	Memory, Disk int64
	Config       struct {
		Mounts     []any
		Plain      bool
		SSH        templateSSH
		Containerd map[string]any
	}
}

func (d *Driver) listed(t *testing.T) []listed {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), d.cfg.Limactl, "list", "--json")
	cmd.Env, cmd.Stderr = d.env(), os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	var all []listed
	for dec := json.NewDecoder(strings.NewReader(string(out))); dec.More(); {
		var in listed
		if err := dec.Decode(&in); err != nil {
			t.Fatal(err)
		}
		all = append(all, in)
	}
	return all
}

// A start fails, and leaves nothing, if limactl does not call the wrapper, calls it for
// something else, or hangs.
func TestLimactlMisbehaves(t *testing.T) {
	d, f := still(t)
	sp := f.spec(1)
	if err := d.Create(t.Context(), sp); err != nil {
		t.Fatal(err)
	}
	script := func(text string) {
		t.Helper()
		path := filepath.Join(t.TempDir(), "limactl")
		text = "#!/bin/sh\n[ \"$1\" = --version ] && echo limactl version 1.2.2 && exit\n" + text + "\n"
		if err := os.WriteFile(path, []byte(text), 0o700); err != nil {
			t.Fatal(err)
		}
		d.cfg.Limactl = path
	}
	for name, test := range map[string]struct{ script, want string }{
		"ends":           {`echo 'time="x" level=fatal msg="no \"disk\""' >&2; exit 3`, "limactl has ended, and has not started QEMU"},
		"other instance": {"exec " + wrapperQEMU + " -name lima-other", "another instance"},
		"mount":          {"exec " + wrapperQEMU + " -name lima-" + instanceName(sp.UID) + " -virtfs local,path=/", "a mount of this host"},
		"no QEMU":        {"PATH=; exec qemu-system-x86_64", "limactl has ended"},
	} {
		script(test.script)
		if err := d.Start(t.Context(), sp.Ref()); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	script("exec /bin/sleep 100000")
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	if err := d.Start(ctx, sp.Ref()); agentlab.CodeOf(err) != agentlab.CodeUnavailable {
		t.Errorf("hangs: %v", err)
	}
	if left := processes(f.StateDir); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
	if in, err := d.Inspect(t.Context(), sp.Ref()); err != nil || in.Power == backend.PowerRunning {
		t.Errorf("%+v, %v", in, err)
	}
}

// limactl sees the VM in its LIMA_HOME, and can stop it.
func TestLimactlSeesVM(t *testing.T) {
	f := vmFixture(t)
	d, err := f.open()
	if err != nil {
		t.Fatal(err)
	}
	sp := f.spec(1)
	if err := d.Create(t.Context(), sp); err != nil {
		t.Fatal(err)
	}
	if err := d.Start(t.Context(), sp.Ref()); err != nil {
		t.Fatal(err)
	}
	ctx := guard.Context(t)
	for {
		conn, err := d.DialControl(ctx, sp.Ref())
		if err == nil {
			_ = conn.Close()
			break
		}
		if ctx.Err() != nil {
			t.Fatal(err)
		}
	}
	if in := d.listed(t); len(in) != 1 || in[0].Status != "Running" {
		t.Errorf("%+v", in)
	}
	if args := qemuCommandLine(t, d.dir(sp.Ref())); !strings.Contains(args, "-sandbox") || strings.Contains(args, "hostfwd") {
		t.Errorf("QEMU runs as %q", args)
	}
	if err := d.runLimactl(ctx, "stop", "--tty=false", instanceName(sp.UID)); err != nil {
		t.Fatal(err)
	}
	in, err := d.Inspect(ctx, sp.Ref())
	for err == nil && in.Power == backend.PowerRunning && ctx.Err() == nil {
		in, err = d.Inspect(ctx, sp.Ref())
	}
	if err != nil || in.Power != backend.PowerStopped {
		t.Errorf("after limactl stop: %+v, %v", in, err)
	}
	if err := d.Start(ctx, sp.Ref()); err != nil {
		t.Errorf("started again: %v", err)
	}
}

// qemuCommandLine returns the command line of the QEMU of a sandbox.
func qemuCommandLine(t *testing.T, dir string) string {
	t.Helper()
	for _, c := range processes(dir) {
		if strings.Contains(c, "-accel") {
			return c
		}
	}
	return ""
}

// A host agent outlives a supervisor that was killed in half of the cases. The next start, and
// the destruction, end it. A VM that was lost with its supervisor starts again.
func TestSupervisorIsKilled(t *testing.T) {
	f := vmFixture(t)
	d, err := f.open()
	if err != nil {
		t.Fatal(err)
	}
	sp := f.spec(1)
	if err := d.Create(t.Context(), sp); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if err := d.Start(t.Context(), sp.Ref()); err != nil {
			t.Fatal(err)
		}
		var agent, shim struct{ PID int }
		if err := errors.Join(durable.ReadJSON(filepath.Join(d.dir(sp.Ref()), "limactl.pid"), &agent), durable.ReadJSON(filepath.Join(d.dir(sp.Ref()), "shim.pid"), &shim)); err != nil {
			t.Fatal(err)
		}
		if err := syscall.Kill(agent.PID, syscall.SIGSTOP); err != nil { // it cannot end by itself
			t.Fatal(err)
		}
		if err := syscall.Kill(shim.PID, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
	if err := d.Destroy(t.Context(), sp.Ref()); err != nil {
		t.Fatal(err)
	}
	if left := processes(f.StateDir); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

// An instance whose disk or description a user has removed does not start with an empty disk.
func TestLostInstance(t *testing.T) {
	d, f := still(t)
	for n, name := range []string{limaDiffDisk, limaConfig} {
		sp := f.spec(n)
		if err := d.Create(t.Context(), sp); err != nil {
			t.Fatal(err)
		}
		if err := os.Remove(filepath.Join(d.instance(sp.UID), name)); err != nil {
			t.Fatal(err)
		}
		if err := d.Start(t.Context(), sp.Ref()); agentlab.CodeOf(err) != agentlab.CodeConflict || agentlab.HintOf(err) == "" {
			t.Errorf("without %s: %v", name, err)
		}
	}
}

// A directory in which limactl could make no socket is refused before anything is made.
func TestLongPath(t *testing.T) {
	d, f := still(t)
	for _, dir := range []string{filepath.Join(f.StateDir, strings.Repeat("long", 20)), filepath.Join(f.StateDir, "a:b")} {
		d.cfg.StateDir = dir
		if err := os.MkdirAll(d.set.Root, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := d.Create(t.Context(), f.spec(1)); agentlab.CodeOf(err) != agentlab.CodeUnsupported || agentlab.HintOf(err) == "" {
			t.Errorf("%s: %v", dir, err)
		}
		if list, err := d.List(t.Context()); err != nil || len(list) > 0 {
			t.Errorf("%s: %v, %v", dir, list, err)
		}
	}
}

// limactl in the environment of a user, where it finds the real QEMU, starts no VM.
func TestWithoutWrapper(t *testing.T) {
	d, f := still(t)
	sp := f.spec(1)
	if err := d.Create(t.Context(), sp); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(guard.Context(t), d.cfg.Limactl, "start", "--tty=false", instanceName(sp.UID))
	cmd.Env = append(d.env(), "PATH="+os.Getenv("PATH"))
	if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), "exited") && !strings.Contains(string(out), "exiting") {
		t.Errorf("%v: %s", err, out)
	}
	log, err := os.ReadFile(filepath.Join(d.instance(sp.UID), limaAgentLog))
	if err != nil || !strings.Contains(string(log), "agentlab") {
		t.Errorf("the log of the host agent: %s, %v", log, err)
	}
}

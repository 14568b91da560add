package machine

import (
	"context"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	diskfs "github.com/diskfs/go-diskfs"

	"github.com/agentlab-vm/agentlab/test/guard"
	"github.com/agentlab-vm/agentlab/test/netlab"
)

func TestMain(m *testing.M) {
	netlab.Main()
	os.Exit(guard.Run(m))
}

// limit is more than any step of these tests takes on a busy machine.
const limit = guard.Patience

func need(t *testing.T, programs ...string) {
	t.Helper()
	for _, p := range programs {
		if _, err := exec.LookPath(p); err != nil {
			t.Skipf("%v: apt-get install qemu-system-x86 qemu-utils iproute2", err)
		}
	}
}

func run(t *testing.T, args ...string) string {
	t.Helper()
	out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %v\n%s", args, err, out)
	}
	return string(out)
}

// testSpec is a VM whose disk nothing boots from.
func testSpec(t *testing.T, extra Config) Spec {
	t.Helper()
	dir, err := os.MkdirTemp("", "pvm")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	disk := filepath.Join(dir, "images", "101", "vm-101-disk-0.qcow2")
	if err := CreateDisk(t.Context(), disk, "qcow2", 64<<20); err != nil {
		t.Fatal(err)
	}
	conf := Config{
		"name": "sb-101", "memory": "64", "cores": "2", "scsihw": "virtio-scsi-pci", "scsi0": "local:101/vm-101-disk-0.qcow2,size=64M",
		"boot": "order=scsi0", "agent": "enabled=1", "serial0": "socket", "vga": "serial0",
		"smbios1": "uuid=83456888-2490-402d-9dda-238895acf29f",
	}
	for k, v := range extra {
		conf[k] = v
	}
	return Spec{VMID: 101, Dir: filepath.Join(dir, "run"), Conf: conf, Disks: map[string]Disk{"scsi0": {File: disk, Format: "qcow2"}}}
}

func start(t *testing.T, s Spec) *Machine {
	t.Helper()
	m, err := Start(t.Context(), s)
	if err != nil {
		if failed, ok := errors.AsType[*StartError](err); ok {
			t.Fatalf("%v: %s", err, failed.Log)
		}
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Kill(); <-m.Done() })
	return m
}

// wait waits for the end of QEMU.
func wait(t *testing.T, m *Machine) {
	t.Helper()
	select {
	case <-m.Done():
	case <-time.After(limit):
		t.Fatalf("QEMU is still running: %s", m.Log())
	}
}

func status(t *testing.T, m *Machine) string {
	t.Helper()
	st, err := m.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return st
}

// The power calls do to a QEMU what they do on Proxmox VE.
func TestPower(t *testing.T) {
	need(t, "qemu-system-x86_64", "qemu-img")
	s := testSpec(t, nil)
	m := start(t, s)
	if got := status(t, m); got != "running" {
		t.Errorf("status after start: %s", got)
	}
	for range 2 { // each is idempotent
		if err := m.Pause(t.Context()); err != nil || status(t, m) != "paused" {
			t.Errorf("pause: %v, %s", err, status(t, m))
		}
	}
	for range 2 {
		if err := m.Resume(t.Context()); err != nil || status(t, m) != "running" {
			t.Errorf("resume: %v, %s", err, status(t, m))
		}
	}
	if err := m.Reset(t.Context()); err != nil {
		t.Error(err)
	}
	// The firmware has no ear for the power button.
	if err := m.Powerdown(t.Context()); err != nil || status(t, m) != "running" {
		t.Errorf("powerdown: %v, %s", err, status(t, m))
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := m.Agent(ctx, "guest-ping", nil); !errors.Is(err, ErrAgent) {
		t.Errorf("call without an agent: %v", err)
	}

	// A second VM on the same image starts: nothing protects the image.
	other := s
	other.VMID, other.Conf = 102, Config{}
	for k, v := range s.Conf {
		other.Conf[k] = v
	}
	second := start(t, other)
	second.Quit()
	wait(t, second)

	m.Quit()
	wait(t, m)
	if got := status(t, m); got != "stopped" {
		t.Errorf("status after stop: %s", got)
	}
	if left, _ := filepath.Glob(filepath.Join(s.Dir, "*.q*")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// Options that would make another machine than the one here are refused.
func TestUnknownOption(t *testing.T) {
	for key, value := range map[string]string{"hostpci0": "01:00.0", "args": "-S", "hookscript": "local:snippets/x", "machine": "q35", "scsi1": "local:101/x.qcow2", "bios": "ovmf"} {
		if _, err := Start(t.Context(), testSpec(t, Config{key: value})); err == nil {
			t.Errorf("%s was accepted", key)
		}
	}
}

// The interface is a port of its bridge for as long as the VM runs, with
// firewall=1 behind a bridge of its own; without the bridge nothing starts.
func TestTap(t *testing.T) {
	need(t, "qemu-system-x86_64", "qemu-img", "ip")
	if !netlab.Inside(t) {
		return
	}
	netlab.Sh(t, "ip link add vmbr1 type bridge; ip link set vmbr1 up")
	port := func(name string) bool { _, err := os.Stat("/sys/class/net/vmbr1/brif/" + name); return err == nil }

	m := start(t, testSpec(t, Config{"net0": "virtio=BC:24:11:00:00:02,bridge=vmbr1"}))
	if !port("tap101i0") {
		t.Errorf("no port: %s", run(t, "ip", "link"))
	}
	m.Kill()
	wait(t, m)
	if _, err := net.InterfaceByName("tap101i0"); err == nil {
		t.Error("the tap device was not deleted")
	}

	m = start(t, testSpec(t, Config{"net0": "virtio=BC:24:11:00:00:02,bridge=vmbr1,firewall=1"}))
	if port("tap101i0") || !port("fwpr101p0") {
		t.Errorf("with firewall=1: %s", run(t, "ip", "link"))
	}
	m.Kill()
	wait(t, m)
	if _, err := net.InterfaceByName("fwbr101i0"); err == nil {
		t.Error("the firewall bridge was not deleted")
	}

	_, err := Start(t.Context(), testSpec(t, Config{"net0": "virtio=BC:24:11:00:00:02,bridge=nosuch"}))
	failed, ok := errors.AsType[*StartError](err)
	if !ok || failed.Code != 1 || !strings.Contains(failed.Log, "bridge 'nosuch' does not exist") || !strings.Contains(failed.Log, "failed with status 512") {
		t.Errorf("without the bridge: %v %+v", err, failed)
	}
}

// Linked and full clones, and sizes.
func TestDisks(t *testing.T) {
	need(t, "qemu-img")
	dir, ctx := t.TempDir(), t.Context()
	base, linked, full := filepath.Join(dir, "9000/base.qcow2"), filepath.Join(dir, "101/l.qcow2"), filepath.Join(dir, "102/f.raw")
	for _, err := range []error{
		CreateDisk(ctx, base, "qcow2", 10<<20), LinkedClone(ctx, base, "qcow2", linked), FullClone(ctx, base, "qcow2", "", full, "raw"),
		ResizeDisk(ctx, linked, "qcow2", 20<<20),
		SnapshotDisk(ctx, "-c", base, "one"), FullClone(ctx, base, "qcow2", "one", filepath.Join(dir, "103/s.qcow2"), "qcow2"),
		SnapshotDisk(ctx, "-a", base, "one"), SnapshotDisk(ctx, "-d", base, "one"),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := CreateDisk(ctx, base, "qcow2", 1<<20); err == nil {
		t.Error("an image was overwritten")
	}
	for file, want := range map[string]int64{base: 10 << 20, linked: 20 << 20} {
		if got, err := DiskSize(ctx, file, "qcow2"); err != nil || got != want {
			t.Errorf("%s: %d, %v", file, got, err)
		}
	}
	if out := run(t, "qemu-img", "info", linked); !strings.Contains(out, "backing file: ../9000/base.qcow2") {
		t.Error(out)
	}
}

// The ISO can be read, with whole names; guests of the end-to-end test do it
// with a kernel's eyes.
func TestSeed(t *testing.T) {
	need(t, "qemu-img", "blkid")
	image := filepath.Join(t.TempDir(), "vm-101-cloudinit.raw")
	long := strings.Repeat("# filler\n", 1000)
	for range 2 {
		if err := WriteSeed(t.Context(), image, "raw", map[string]string{"user-data": long, "meta-data": "instance-id: x\n", "network-config": "version: 1\n"}); err != nil {
			t.Fatal(err)
		}
	}
	if st, err := os.Stat(image); err != nil || st.Size() != SeedSize {
		t.Errorf("%v, %v", st, err)
	}
	if out := run(t, "blkid", "-o", "export", image); !strings.Contains(out, "LABEL=cidata") {
		t.Error(out)
	}
	d, err := diskfs.Open(image, diskfs.WithOpenMode(diskfs.ReadOnly))
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	fs, err := d.GetFilesystem(0)
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"user-data": long, "network-config": "version: 1\n"} {
		if got, err := fs.ReadFile(name); err != nil || string(got) != want {
			t.Errorf("%s: %d bytes, %v", name, len(got), err)
		}
	}
}

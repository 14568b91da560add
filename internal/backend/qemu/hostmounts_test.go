package qemu

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/qemuvm"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
	"github.com/agentlab-vm/agentlab/internal/vmdir"
)

// prepared is a sandbox that could be started, and what it would be started
// with.
func prepared(t *testing.T) (dir string, h handle, c startConfig, args []string) {
	t.Helper()
	d, f := still(t)
	sp := f.spec(0)
	if err := d.Create(t.Context(), sp); err != nil {
		t.Fatal(err)
	}
	b, err := d.load(sp.Ref())
	if err != nil {
		t.Fatal(err)
	}
	h = b.Handle
	c = startConfig{Machine: qemuvm.Machine{Accel: qemuvm.AccelTCG, TSCKHz: 1000000, TSCFixed: true}, Initrd: f.Image.Modules}
	return b.Dir, h, c, vmArgs(h, c, qemuFDs)
}

func TestHostMountsAreRefused(t *testing.T) {
	dir, h, c, args := prepared(t)
	if err := refuseHostMounts(dir, h, c, args); err != nil {
		t.Fatalf("what we really run: %v", err)
	}
	kvm := c
	kvm.Accel = qemuvm.AccelKVM
	if err := refuseHostMounts(dir, h, kvm, vmArgs(h, kvm, qemuFDs)); err != nil {
		t.Fatalf("with KVM: %v", err)
	}
	for _, more := range [][]string{
		{"-fsdev", "local,id=host,path=/,security_model=none"},
		{"-virtfs", "local,path=/,mount_tag=host,security_model=none"},
		{"-device", "virtio-9p-device,fsdev=host,mount_tag=host"},
		{"-device", "vhost-user-fs-device,chardev=fs,tag=host"},
		{"-device", "vfio-pci,host=00:02.0"},
		{"-device", "usb-host,vendorid=1"},
		{"-device", "ivshmem-plain,memdev=m"},
		{"-device", "virtio-blk-pci,drive=host"},
		{"-drive", "file=/dev/sda,format=raw"},
		{"-hda", "/etc/shadow"},
		{"-cdrom", "/dev/cdrom"},
		{"-hdb", "fat:rw:/home"},
		{"-blockdev", "driver=file,node-name=host,filename=/etc/shadow"},
		{"-blockdev", "driver=host_device,node-name=host,filename=/dev/sda"},
		{"-blockdev", "driver=vvfat,node-name=host,dir=/home,rw=on"},
		{"-blockdev", "driver=file,node-name=root-file,filename=../../other/root.qcow2,discard=unmap"},
		{"-object", "memory-backend-file,id=m,mem-path=/etc,size=4096"},
		{"-object", "rng-random,id=rng,filename=/etc/shadow"},
		{"-object", "secret,id=s,file=/etc/shadow"},
		{"-chardev", "file,id=x,path=/etc/passwd"},
		{"-chardev", "socket,id=fs,path=/run/virtiofsd.sock"},
		{"-netdev", "user,id=u,smb=/home"},
		{"-netdev", "tap,id=t"},
		{"-kernel", "/etc/shadow"},
		{"-initrd", "/etc/shadow"},
		{"-mem-path", "/dev/shm"},
		{"-fw_cfg", "name=opt/x,file=/etc/shadow"},
		{"-smbios", "file=/etc/shadow"},
		{"-readconfig", "/tmp/x.cfg"},
		{"-add-fd", "fd=9,set=1"},
		{"-incoming", "exec:cat"},
		{"-monitor", "stdio"},
		{"-nodefaults", "x"},
		{"-sandbox", "off"},
		{"-append"},
		{"stray"},
	} {
		err := refuseHostMounts(dir, h, c, append(slices.Clone(args), more...))
		if more[0] == "-append" { // the value of the last one; QEMU itself refuses it
			continue
		}
		if agentlab.CodeOf(err) != agentlab.CodeDenied {
			t.Errorf("%v: %v", more, err)
		}
	}
	for _, name := range mustHave {
		i := slices.Index(args, name)
		n := 1
		if name == "-sandbox" {
			n = 2
		}
		if err := refuseHostMounts(dir, h, c, slices.Delete(slices.Clone(args), i, i+n)); agentlab.CodeOf(err) != agentlab.CodeDenied {
			t.Errorf("without %s: %v", name, err)
		}
	}
}

// The disk of a sandbox has only its image as backing file.
func TestDiskOnAFileOfTheHostIsRefused(t *testing.T) {
	dir, h, c, args := prepared(t)
	disk := filepath.Join(dir, fileRoot)
	outside := filepath.Join(t.TempDir(), "outside")
	if err := os.WriteFile(outside, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	img := func(args ...string) func() {
		return func() {
			if out, err := exec.Command("qemu-img", args...).CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
		}
	}
	link := func() {
		if err := os.Symlink(outside, disk); err != nil {
			t.Fatal(err)
		}
	}
	good, err := os.ReadFile(disk)
	if err != nil {
		t.Fatal(err)
	}
	for name, spoil := range map[string]func(){
		"other backing file": img("create", "-q", "-f", "qcow2", "-F", "raw", "-b", outside, disk, "1M"),
		"backing format":     img("create", "-q", "-f", "qcow2", "-u", "-F", "qcow2", "-b", h.Image.RootDisk, disk, "1M"),
		"no backing file":    img("create", "-q", "-f", "qcow2", disk, "1M"),
		"external data":      img("create", "-q", "-f", "qcow2", "-o", "data_file="+filepath.Join(t.TempDir(), "data"), disk, "1M"),
		"raw":                func() { _ = os.WriteFile(disk, make([]byte, 4096), 0o600) },
		"empty":              func() { _ = os.WriteFile(disk, nil, 0o600) },
		"symbolic link":      link,
		"directory":          func() { _ = os.Mkdir(disk, 0o700) },
		"absent":             func() {},
	} {
		if err := os.RemoveAll(disk); err != nil {
			t.Fatal(err)
		}
		spoil()
		if err := refuseHostMounts(dir, h, c, args); agentlab.CodeOf(err) != agentlab.CodeDenied {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := os.RemoveAll(disk); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(disk, good, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := refuseHostMounts(dir, h, c, args); err != nil {
		t.Errorf("the good disk: %v", err)
	}
	h.Image.RootDisk = filepath.Dir(h.Image.RootDisk)
	if err := refuseHostMounts(dir, h, c, args); agentlab.CodeOf(err) != agentlab.CodeDenied {
		t.Errorf("a directory as image: %v", err)
	}
}

// Start refuses, and QEMU is never run; neither does a shim that is started
// by something else.
func TestStartRefusesHostMounts(t *testing.T) {
	_, f := still(t)
	ran := filepath.Join(t.TempDir(), "ran")
	qemu := script(t, "qemu", "[ \"$1\" = --version ] && { echo 'QEMU emulator version 8.0.0'; exit 0; }\ntouch "+ran)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	d, err := New(Config{
		StateDir: f.StateDir, CacheDir: f.CacheDir, Runner: f.Runner, Supervisor: []string{self, "vmm", ""}, Accel: qemuvm.AccelTCG, QEMU: qemu,
		Images: func(context.Context, string) (vmdir.ImageFiles, error) { return f.Image, nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	sp := f.spec(0)
	if err := d.Create(t.Context(), sp); err != nil {
		t.Fatal(err)
	}
	defer d.Destroy(context.Background(), sp.Ref())
	disk := filepath.Join(d.dir(sp.Ref()), fileRoot)
	if out, err := exec.Command("qemu-img", "rebase", "-u", "-F", "raw", "-b", "/etc/passwd", disk).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	err = d.Start(t.Context(), sp.Ref())
	if agentlab.CodeOf(err) != agentlab.CodeDenied || !strings.Contains(err.Error(), "/etc/passwd") || agentlab.HintOf(err) == "" {
		t.Errorf("%v", err)
	}
	b, err := d.load(sp.Ref())
	if err != nil {
		t.Fatal(err)
	}
	m := &machine{dir: b.Dir, handle: b.Handle, cfg: startConfig{QEMU: qemu, Machine: qemuvm.Machine{Accel: qemuvm.AccelTCG}, Initrd: f.Image.Modules}, hooks: supervisor.Hooks{Log: d.log}}
	if _, err := m.Launch(t.Context()); agentlab.CodeOf(err) != agentlab.CodeDenied {
		t.Errorf("the shim: %v", err)
	}
	if _, err := os.Stat(ran); err == nil {
		t.Error("QEMU was run")
	}
}

package qemu

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/egress/vnet"
	"github.com/agentlab-vm/agentlab/internal/qemuvm"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
)

// Start implements backend.Driver.
func (d *Driver) Start(ctx context.Context, ref backend.Ref) error {
	f, unlock, err := d.open(ctx, ref)
	if err != nil {
		return err
	}
	defer unlock()
	onDisk, err := d.suspendedToDisk(f)
	if err != nil {
		return err
	}
	if onDisk {
		return agentlab.Errorf(agentlab.CodeConflict, "sandbox %d is suspended", f.vmid).WithHint("continue it with 'agentlab sandbox resume %d'", f.vmid)
	}
	return d.start(ctx, f)
}

// start starts the sandbox's VM, with a memory that is in its directory. A VM that
// does not start with the memory of a template boots, and the template is removed:
// it may be damaged.
func (d *Driver) start(ctx context.Context, f found) error {
	if err := d.tidyStopped(ctx, f); err != nil {
		return err
	}
	saved, err := readMemory(f.dir)
	template := err == nil && saved.Boot != ""
	var started *startConfig
	err = d.supervised(f).Start(ctx, d.cfg.Supervisor, func(ctx context.Context) (supervisor.Config, error) {
		cfg, err := d.startConfig(ctx, f.handle)
		if err != nil {
			return nil, err
		}
		if cfg.Load, err = d.memoryOf(f, cfg); err != nil {
			return nil, err
		}
		if cfg.Load {
			cfg.Identity, cfg.Detached = f.Spec.UID, saved.Boot == ""
			cfg.Own = saved.own()
		}
		// machine.Launch checks again; here the caller gets the error's code.
		if err := refuseHostMounts(f.dir, f.handle, cfg, vmArgs(f.handle, cfg, qemuFDs)); err != nil {
			return nil, err
		}
		started = &cfg
		return &cfg, nil
	})
	switch {
	case started == nil:
	case err == nil && !started.Load:
		d.tmpl.want(f, *started)
	case err == nil && template:
		d.tmpl.watch(f, saved.Machine)
	case err != nil && template && started.Load && ctx.Err() == nil:
		d.log.Warn("a sandbox did not start from its template, which is removed; it boots", "vmid", f.vmid, "err", err)
		if err := errors.Join(d.tmpl.remove(saved.Machine), dropMemory(f.dir, durable.Content)); err != nil {
			return err
		}
		return d.start(ctx, f)
	}
	return err
}

// startConfig examines the host and returns what the supervisor runs.
func (d *Driver) startConfig(ctx context.Context, h handle) (startConfig, error) {
	if err := d.host.Ready(ctx); err != nil {
		return startConfig{}, err
	}
	for _, p := range []string{h.Image.Kernel, h.Image.RootDisk} {
		if _, err := os.Stat(p); err != nil {
			return startConfig{}, imageGone(h, err)
		}
	}
	accel, err := d.host.Accel(ctx)
	if err != nil {
		return startConfig{}, err
	}
	if h.Spec.Resources.Nested == agentlab.NestedOn {
		if err := d.Nested(ctx); err != nil {
			return startConfig{}, err
		}
	}
	initrd, err := d.rd.File(ctx, h.Image.Modules)
	if errors.Is(err, fs.ErrNotExist) && !fileExists(h.Image.Modules) {
		return startConfig{}, imageGone(h, err)
	}
	if err != nil {
		return startConfig{}, asError(err, "cannot create the initrd")
	}
	cfg := startConfig{
		Start: supervisor.Start{
			Backend: Name, PauseBelow: d.cfg.PauseBelow, Reserved: d.cfg.Reserved, UpstreamProxy: d.cfg.UpstreamProxy,
		},
		QEMU: d.host.QEMU(), QEMUImg: d.host.QEMUImg(), Accel: accel, Initrd: initrd,
		Nested: h.Spec.Resources.Nested.Wanted() && !d.cfg.NoNested,
	}
	if cfg.Machine, err = d.machineKey(ctx, h, cfg); err != nil {
		return startConfig{}, err
	}
	if accel == qemuvm.AccelTCG {
		if cfg.TSCKHz, cfg.TSCFixed, err = d.host.TSC(ctx); err != nil {
			return startConfig{}, err
		}
	}
	return cfg, nil
}

func fileExists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// Names that the guest relies on.
const (
	RootSerial  = "agentlab-root"    // /sys/block/*/serial of the root disk
	ControlPort = "agentlab.control" // /sys/class/virtio-ports/*/name of the control channel
	GuestMAC    = "52:54:00:77:00:02"
	GuestMTU    = vnet.DefaultMTU
)

// fds are the file descriptors that QEMU inherits, by number in QEMU.
type fds struct{ net, control, console, qmp, devices int }

// qemuFDs are the file descriptors of a sandbox's QEMU, in the order of the
// inherited files.
var qemuFDs = fds{net: qemuvm.FDNetwork, control: qemuvm.FDControl, console: qemuvm.FDConsole, qmp: qemuvm.FDMonitor, devices: qemuvm.FDMore}

// vmArgs returns the command line of QEMU, without the program. QEMU runs in
// the sandbox's directory.
func vmArgs(h handle, c startConfig, f fds) []string {
	a := []string{
		"-name", "agentlab-" + strconv.Itoa(h.Spec.VMID) + ",debug-threads=on",
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
	}
	size := strconv.Itoa(h.Spec.Resources.MemoryMB) + "M"
	a = append(a, machineArgs(c)...)
	if c.Load {
		// The guest has its kernel in its memory. Its CPUs start by a command.
		a = append(a, "-object", "memory-backend-file,id="+ramBlock+",size="+size+",share=off,mem-path="+fileMemory,
			"-incoming", "fd:"+strconv.Itoa(f.devices), "-S",
			// The guest's address has not moved to another port of a switch: it need
			// not announce it.
			"-global", "migration.announce-rounds=0")
	} else {
		a = append(a, "-object", "memory-backend-ram,id="+ramBlock+",size="+size,
			"-kernel", h.Image.Kernel, "-initrd", c.Initrd, "-append", kernelCommandLine(c))
	}
	a = append(a,
		"-smp", strconv.Itoa(h.Spec.Resources.Cores),
		"-m", size, "-machine", "memory-backend="+ramBlock,
		"-rtc", "base=utc",

		"-chardev", "socket,id=qmp,fd="+strconv.Itoa(f.qmp), "-mon", "chardev=qmp,mode=control",

		// Console and control share one bus, which saves the interrupts of a
		// device.
		"-device", "virtio-serial-device,id=serial,max_ports=4",
		"-chardev", "socket,id=console,fd="+strconv.Itoa(f.console),
		"-device", "virtconsole,bus=serial.0,nr=0,chardev=console",
		"-chardev", "socket,id=control,fd="+strconv.Itoa(f.control),
		"-device", "virtserialport,bus=serial.0,nr=1,chardev=control,name="+ControlPort,

		"-netdev", "stream,id=net,server=off,addr.type=fd,addr.str="+strconv.Itoa(f.net),
		"-device", "virtio-net-device,netdev=net,mac="+GuestMAC+",host_mtu="+strconv.Itoa(GuestMTU),

		// QEMU stops the guest when the host's disk is full (werror=enospc);
		// the supervisor continues it when there is enough space again.
		"-blockdev", "driver=file,node-name=root-file,filename="+fileRoot+",discard=unmap",
		"-blockdev", "driver=qcow2,node-name=root,file=root-file,discard=unmap,detect-zeroes=unmap",
		"-device", "virtio-blk-device,id="+deviceRoot+",drive=root,serial="+RootSerial+",werror=enospc,rerror=report",

		// The place of the volume, which is empty until setVolume.
		"-blockdev", "driver=file,node-name="+nodeNoVolume+",filename="+fileNoVolume,
		"-blockdev", "driver=raw,node-name="+nodeSlot+",file="+nodeNoVolume+",discard=unmap",
		"-device", "virtio-blk-device,id="+deviceVolume+",drive="+nodeSlot+",serial="+backend.VolumeSerial+",werror=enospc,rerror=report",

		"-object", "rng-random,id=rng,filename=/dev/urandom",
		"-device", "virtio-rng-device,rng=rng",
		"-device", "virtio-balloon-device,free-page-reporting=on,deflate-on-oom=on",
	)
	return a
}

// machineArgs returns the options that a probe of an accelerator and a real VM
// share. The legacy devices are off because they cost boot time. The clock (rtc)
// is on, because Linux waits two seconds for a missing one.
func machineArgs(c startConfig) []string {
	return []string{
		"-machine", "microvm,pit=off,pic=off,isa-serial=off,usb=off,pcie=off,dump-guest-core=off",
		"-global", "virtio-mmio.force-legacy=false",
		// With announce-rounds=0, QEMU 7.2 frees the timer of announcements when it has
		// loaded a memory, and uses it when the guest resets the device at a reboot.
		"-global", "virtio-net-device.guest_announce=off",
		"-accel", accelArg(c.Accel), "-cpu", cpuArg(c),
	}
}

// probeMachine returns the machine with which an accelerator is probed.
func probeMachine(a qemuvm.Accel) []string { return machineArgs(startConfig{Accel: a}) }

func accelArg(a qemuvm.Accel) string {
	if a == qemuvm.AccelKVM {
		return "kvm"
	}
	// One thread translates and runs all CPUs. With a thread for each, a CPU can
	// keep a translation of kernel code that another CPU is patching, and loop in
	// it endlessly: the guest hangs.
	// A larger translation cache is not faster and costs up to 170 MB per VM.
	return "tcg,thread=single,tb-size=128"
}

func cpuArg(c startConfig) string {
	// One step of an emulated string instruction handles one element. Without these
	// features the guest copies and clears its memory by words, not by bytes.
	arg := "max,-erms,-fsrm"
	if c.Accel == qemuvm.AccelKVM {
		arg = "host"
	}
	if !c.Nested {
		arg += ",-svm,-vmx"
	}
	return arg
}

// kernelCommandLine has nothing that identifies a sandbox: the guest gets its
// identity over the control channel.
func kernelCommandLine(c startConfig) string {
	args := []string{
		"console=hvc0", "quiet",
		"panic=-1", "reboot=t", // a panic ends QEMU at once, since it runs with -no-reboot
		"cryptomgr.notests", // 0.2 s of self tests
		"net.ifnames=0",     // eth0
		// The VM is the boundary; Docker in it fails with a partial AppArmor.
		"lsm=landlock,yama", "apparmor=0", "audit=0",
		"systemd.show_status=yes", // "quiet" would leave the console log empty
	}
	if c.Accel != qemuvm.AccelKVM {
		// Large pages would be cleared slowly, and occupy the host's memory.
		args = append(args, "transparent_hugepage=madvise")
		// The code against speculation has no effect on an emulated processor, and
		// takes time at each indirect call and each change of the process.
		args = append(args, "mitigations=off")
		// QEMU 7.2 translates the same code again at another virtual address. With
		// random addresses that is at each start of a program, which takes three times
		// as long.
		args = append(args, "norandmaps")
	}
	if c.Accel != qemuvm.AccelKVM && c.TSCKHz > 0 {
		// Without it the kernel measures the TSC against a timer, which on a
		// busy host takes very long.
		args = append(args, "tsc_early_khz="+strconv.Itoa(c.TSCKHz))
		if c.TSCFixed {
			// Otherwise a guest with two CPUs falls back to a slower clock.
			args = append(args, "tsc=reliable")
		}
	}
	return strings.Join(args, " ")
}

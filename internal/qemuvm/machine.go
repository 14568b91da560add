package qemuvm

import (
	"strconv"
	"strings"

	"github.com/agentlab-vm/agentlab/internal/egress/vnet"
)

// Facts that the guest relies on.
const (
	RootSerial  = "agentlab-root"    // /sys/block/*/serial of the root disk
	ControlPort = "agentlab.control" // /sys/class/virtio-ports/*/name of the control channel
	GuestMAC    = "52:54:00:77:00:02"
	GuestMTU    = vnet.DefaultMTU
)

// Confined are the options of every QEMU: it has no device that is not named, reads no
// configuration, and starts no program.
var Confined = []string{
	"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
	"-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
}

// Machine describes what does not depend on the guest: the machine, and its CPUs on
// this host.
type Machine struct {
	Accel    Accel `json:"accel"`            // "kvm" or "tcg"
	Nested   bool  `json:"nested,omitempty"` // the CPUs have virtualization
	TSCKHz   int   `json:"tsc_khz,omitempty"`
	TSCFixed bool  `json:"tsc_fixed,omitempty"` // the host's TSC never changes its rate
}

// Args returns the options that a probe of an accelerator and a real VM
// share. The legacy devices are off because they cost boot time. The clock (rtc)
// is on, because Linux waits two seconds for a missing one.
func (m Machine) Args() []string {
	return []string{
		"-machine", "microvm,pit=off,pic=off,isa-serial=off,usb=off,pcie=off,dump-guest-core=off",
		"-global", "virtio-mmio.force-legacy=false",
		// With announce-rounds=0, QEMU 7.2 frees the timer of announcements when it has
		// loaded a memory, and uses it when the guest resets the device at a reboot.
		"-global", "virtio-net-device.guest_announce=off",
		"-accel", accelArg(m.Accel), "-cpu", m.cpu(),
	}
}

func accelArg(a Accel) string {
	if a == AccelKVM {
		return "kvm"
	}
	// One thread translates and runs all CPUs. With a thread for each, a CPU can
	// keep a translation of kernel code that another CPU is patching, and loop in
	// it endlessly: the guest hangs.
	// A larger translation cache is not faster and costs up to 170 MB per VM.
	return "tcg,thread=single,tb-size=128"
}

func (m Machine) cpu() string {
	// One step of an emulated string instruction handles one element. Without these
	// features the guest copies and clears its memory by words, not by bytes.
	arg := "max,-erms,-fsrm"
	if m.Accel == AccelKVM {
		arg = "host"
	}
	if !m.Nested {
		arg += ",-svm,-vmx"
	}
	return arg
}

// KernelCommandLine has nothing that identifies a sandbox: the guest gets its
// identity over the control channel.
func (m Machine) KernelCommandLine() string {
	args := []string{
		"console=hvc0", "quiet",
		"panic=-1", "reboot=t", // a panic ends QEMU at once, since it runs with -no-reboot
		"cryptomgr.notests", // 0.2 s of self tests
		"net.ifnames=0",     // eth0
		// The VM is the boundary; Docker in it fails with a partial AppArmor.
		"lsm=landlock,yama", "apparmor=0", "audit=0",
		"systemd.show_status=yes", // "quiet" would leave the console log empty
	}
	if m.Accel != AccelKVM {
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
	if m.Accel != AccelKVM && m.TSCKHz > 0 {
		// Without it the kernel measures the TSC against a timer, which on a
		// busy host takes very long.
		args = append(args, "tsc_early_khz="+strconv.Itoa(m.TSCKHz))
		if m.TSCFixed {
			// Otherwise a guest with two CPUs falls back to a slower clock.
			args = append(args, "tsc=reliable")
		}
	}
	return strings.Join(args, " ")
}

// Devices returns the options for the monitor and for the devices of supervisor.Wires,
// with the file descriptors that QEMU inherits. The order of all devices must not
// change: the memory of a guest that was saved has it.
func Devices(network, control, console, monitor int) []string {
	return []string{
		"-chardev", "socket,id=qmp,fd=" + strconv.Itoa(monitor), "-mon", "chardev=qmp,mode=control",

		// Console and control share one bus, which saves the interrupts of a
		// device.
		"-device", "virtio-serial-device,id=serial,max_ports=4",
		"-chardev", "socket,id=console,fd=" + strconv.Itoa(console),
		"-device", "virtconsole,bus=serial.0,nr=0,chardev=console",
		"-chardev", "socket,id=control,fd=" + strconv.Itoa(control),
		"-device", "virtserialport,bus=serial.0,nr=1,chardev=control,name=" + ControlPort,

		"-netdev", "stream,id=net,server=off,addr.type=fd,addr.str=" + strconv.Itoa(network),
		"-device", "virtio-net-device,netdev=net,mac=" + GuestMAC + ",host_mtu=" + strconv.Itoa(GuestMTU),
	}
}

// Helpers are the options for the devices that need nothing of the host: random
// numbers, and the balloon that gives free memory back.
var Helpers = []string{
	"-object", "rng-random,id=rng,filename=/dev/urandom",
	"-device", "virtio-rng-device,rng=rng",
	"-device", "virtio-balloon-device,free-page-reporting=on,deflate-on-oom=on",
}

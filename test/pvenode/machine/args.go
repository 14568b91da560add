package machine

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// Disk is the image behind a drive of the configuration, such as scsi0.
type Disk struct {
	File   string
	Format string // raw or qcow2
	CDROM  bool
}

// Spec says what is started.
type Spec struct {
	VMID int
	Dir  string // of sockets, scripts and the console's log, which are named after VMID; a short path
	Conf Config // as it is in effect
	// Disks are the images of all drives of Conf, by drive.
	Disks map[string]Disk
	KVM   bool // use it, unless Conf says no; a /dev/kvm that is there may not work
}

func (s Spec) file(suffix string) string {
	return filepath.Join(s.Dir, fmt.Sprintf("%d.%s", s.VMID, suffix))
}

// Console is the file with all that the first serial port wrote.
func (s Spec) Console() string { return s.file("console.log") }

var driveName = regexp.MustCompile(`^(scsi|virtio|ide)(\d+)$`)

// known are the options that either become devices here or make no
// difference to a machine. Any other is refused: a test that sets it would
// prove nothing.
var known = map[string]bool{
	"agent": true, "affinity": true, "balloon": true, "boot": true, "cicustom": true, "cipassword": true, "ciupgrade": true,
	"ciuser": true, "cores": true, "cpulimit": true, "cpuunits": true, "description": true, "digest": true, "kvm": true,
	"machine": true, "memory": true, "meta": true, "name": true, "nameserver": true, "onboot": true, "ostype": true,
	"parent": true, "protection": true, "scsihw": true, "searchdomain": true, "serial0": true, "smbios1": true, "sockets": true,
	"sshkeys": true, "startup": true, "tags": true, "template": true, "vga": true, "vmgenid": true, "cpu": true,
}

var numbered = regexp.MustCompile(`^(net|ipconfig|unused)\d+$`)

func (s Spec) check() error {
	for _, key := range slices.Sorted(maps.Keys(s.Conf)) {
		if known[key] || numbered.MatchString(key) {
			continue
		}
		if !driveName.MatchString(key) {
			return fmt.Errorf("the fake node does not support the option %s", key)
		}
		if _, ok := s.Disks[key]; !ok {
			return fmt.Errorf("drive %s has no image file", key)
		}
	}
	switch hw := s.Conf["scsihw"]; hw {
	case "virtio-scsi-pci", "virtio-scsi-single", "":
	default:
		return fmt.Errorf("the fake node does not support %s", hw)
	}
	if m := s.Conf["machine"]; m != "" && !strings.HasPrefix(m, "pc") {
		return fmt.Errorf("the fake node does not support %s", m)
	}
	return nil
}

func or(value, fallback string) string {
	if value == "" {
		return fallback
	}
	return value
}

// Emulated is the processor of a VM without hardware virtualization: what
// programs for any x86-64 need. The more it could, the more of it would be
// emulated slowly, and the more drivers would be loaded.
const Emulated = "qemu64,-svm,+rdrand"

// EmulatedHost is the emulated CPU for the type host.
const EmulatedHost = "qemu64,+svm,+rdrand"

// command is the program with its arguments, as Proxmox VE gives them.
func (s Spec) command() []string {
	var a []string
	if s.Conf["affinity"] != "" {
		a = append(a, "taskset", "--cpu-list", "--all-tasks", s.Conf["affinity"])
	}
	// A CPU that runs what another CPU patches at the same time may freeze the guest,
	// where each has a thread of its own.
	accel, cpu := "tcg,thread=single,tb-size=128", Emulated
	if props(s.Conf["cpu"])[""] == "host" { // as of a host with virtualization
		cpu = EmulatedHost
	}
	if s.KVM && s.Conf.on("kvm", true) {
		accel, cpu = "kvm", or(props(s.Conf["cpu"])[""], "kvm64")
	}
	cores, sockets := or(s.Conf["cores"], "1"), or(s.Conf["sockets"], "1")
	memory := props(or(s.Conf["memory"], "512"))
	a = append(a, "qemu-system-x86_64",
		"-name", s.Conf["name"]+",debug-threads=on", "-no-shutdown", "-nodefaults",
		"-no-user-config", "-display", "none", "-accel", accel, "-cpu", cpu, "-machine", "pc",
		"-chardev", "socket,id=qmp,path="+s.file("qmp")+",server=on,wait=off", "-mon", "chardev=qmp,mode=control",
		"-pidfile", s.file("pid"),
		"-smp", fmt.Sprintf("cpus=%s,sockets=%s", times(cores, sockets), sockets),
		"-m", or(memory[""], memory["current"]), "-boot", "menu=on,strict=on,reboot-timeout=1000",
		"-device", "virtio-rng-pci", "-rtc", "base=utc")
	if id := props(s.Conf["smbios1"])["uuid"]; id != "" {
		a = append(a, "-smbios", "type=1,uuid="+id)
	}
	if id := s.Conf["vmgenid"]; id != "" {
		a = append(a, "-device", "vmgenid,guid="+id)
	}
	if s.Conf["balloon"] != "0" {
		a = append(a, "-device", "virtio-balloon-pci,id=balloon0,bus=pci.0,addr=0x3")
	}
	if s.Conf["serial0"] == "socket" {
		a = append(a, "-chardev", "socket,id=serial0,path="+s.file("serial0")+",server=on,wait=off,logfile="+s.Console()+",logappend=on",
			"-device", "isa-serial,chardev=serial0")
	}
	if s.Conf.AgentEnabled() {
		a = append(a, "-chardev", "socket,path="+s.file("qga")+",server=on,wait=off,id=qga0",
			"-device", "virtio-serial,id=qga0,bus=pci.0,addr=0x8", "-device", "virtserialport,chardev=qga0,name=org.qemu.guest_agent.0")
	}
	return slices.Concat(a, s.drives(), s.cards())
}

func times(a, b string) string {
	var x, y int
	_, _ = fmt.Sscan(a, &x)
	_, _ = fmt.Sscan(b, &y)
	return fmt.Sprint(max(1, x) * max(1, y))
}

// bootIndex is the place of a device in the option boot; "" when it has none.
func (c Config) bootIndex(device string) string {
	order := props(c["boot"])["order"]
	if i := slices.Index(strings.Split(order, ";"), device); i >= 0 && order != "" {
		return fmt.Sprintf(",bootindex=%d", 100+i)
	}
	return ""
}

func (s Spec) drives() []string {
	var a []string
	scsi := false
	for _, slot := range slices.Sorted(maps.Keys(s.Disks)) {
		d := s.Disks[slot]
		m := driveName.FindStringSubmatch(slot)
		if m == nil {
			continue
		}
		opts := props(s.Conf[slot])
		drive := "file=" + d.File + ",if=none,id=drive-" + slot + ",format=" + d.Format + ",file.locking=off" // the default of Proxmox VE's QEMU
		if d.CDROM {
			drive += ",media=cdrom,readonly=on"
		} else {
			drive += ",detect-zeroes=on,cache=" + or(opts["cache"], "unsafe") + ",discard=" + or(opts["discard"], "ignore")
		}
		tail := ",drive=drive-" + slot + ",id=" + slot + s.Conf.bootIndex(slot)
		if id := opts["serial"]; id != "" {
			tail += ",serial=" + id
		}
		var device string
		switch kind, n := m[1], m[2]; kind {
		case "scsi":
			device = "scsi-" + map[bool]string{true: "cd", false: "hd"}[d.CDROM] + ",bus=virtioscsi0.0,channel=0,scsi-id=0,lun=" + n + tail
			if !scsi {
				scsi = true
				a = append(a, "-device", "virtio-scsi-pci,id=virtioscsi0,bus=pci.0,addr=0x5")
			}
		case "virtio":
			device = "virtio-blk-pci" + tail
		case "ide":
			var i int
			_, _ = fmt.Sscan(n, &i)
			device = fmt.Sprintf("ide-%s,bus=ide.%d,unit=%d", map[bool]string{true: "cd", false: "hd"}[d.CDROM], i/2, i%2) + tail
		}
		a = append(a, "-drive", drive, "-device", device)
	}
	return a
}

// tap is the interface of network device n.
func (s Spec) tap(n string) string { return fmt.Sprintf("tap%di%s", s.VMID, n) }

func (s Spec) cards() []string {
	var a []string
	for i, n := range s.Conf.netNumbers() {
		model, mac := s.Conf.MAC(n)
		if model == "virtio" {
			model = "virtio-net-pci"
		}
		a = append(a, "-netdev", "type=tap,id=net"+n+",ifname="+s.tap(n)+",script="+s.file("net"+n+"-up")+",downscript=no",
			"-device", fmt.Sprintf("%s,mac=%s,netdev=net%s,bus=pci.0,addr=0x%x,id=net%s%s", model, mac, n, 0x12+i, n, s.Conf.bootIndex("net"+n)))
	}
	return a
}

// bridgeScript plugs an interface into its bridge, through a firewall bridge
// of its own where the device has firewall=1.
const bridgeScript = `#!/bin/sh -e
PATH=$PATH:/usr/sbin:/sbin
tap=$1 bridge=%[1]s up=%[2]s in=%[3]s fw=%[4]s
if [ ! -d /sys/class/net/$bridge/bridge ]; then echo "bridge '$bridge' does not exist" >&2; exit 2; fi
if [ -n "$fw" ]; then
  ip link del $up 2>/dev/null || true
  ip link del $fw 2>/dev/null || true
  ip link add $fw type bridge
  ip link set $fw up
  ip link add $up type veth peer name $in
  ip link set $in master $fw up
  ip link set $up master $bridge up
  bridge=$fw
fi
ip link set $tap up promisc on
ip link set $tap master $bridge
`

// plugs writes the scripts that QEMU calls for its interfaces.
func (s Spec) plugs() error {
	for _, n := range s.Conf.netNumbers() {
		p := props(s.Conf["net"+n])
		bridge := p["bridge"]
		if !plainName.MatchString(bridge) {
			return fmt.Errorf("net%s is on no bridge", n)
		}
		up, in, fw := `""`, `""`, `""`
		if p["firewall"] == "1" {
			up, in, fw = fmt.Sprintf("fwpr%dp%s", s.VMID, n), fmt.Sprintf("fwln%di%s", s.VMID, n), s.firewallBridge(n)
		}
		text := fmt.Sprintf(bridgeScript, bridge, up, in, fw)
		if err := os.WriteFile(s.file("net"+n+"-up"), []byte(text), 0o700); err != nil {
			return err
		}
	}
	return nil
}

func (s Spec) firewallBridge(n string) string { return fmt.Sprintf("fwbr%di%s", s.VMID, n) }

var plainName = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9._-]{0,14}$`)

package proxmox

import (
	"maps"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
	"github.com/agentlab-vm/agentlab/internal/lazyre"
)

// The audit before every start: a list of the options that the configuration
// of a sandbox may have. Any other option (a path of the host, a
// passed-through device, a second network device, arguments for QEMU, an
// option of a later version) may bypass the isolation, so the sandbox is not
// started.

// lockClone is the property lock of a VM that is being cloned.
const lockClone = "clone"

// harmless lists options that may have any value of the given form. They
// affect the emulation, display or description of the VM and give no access to
// the host.
var harmless = map[string]*lazyre.Regexp{
	"acpi": flag, "boot": words, "bootdisk": words, "ciupgrade": flag, "ciuser": words, "cores": number,
	"cpu":      lazyre.New(`^(cputype=)?[A-Za-z0-9][A-Za-z0-9._-]*(,(flags|hidden|phys-bits)=[A-Za-z0-9+;._-]+)*$`),
	"cpulimit": number, "cpuunits": number, "description": anything, "digest": words, "hotplug": words,
	"ipconfig0": lazyre.New(`^[0-9A-Za-z=,:./]*$`), "keyboard": words, "kvm": flag, "localtime": flag,
	"bios": lazyre.New(`^(seabios|ovmf)$`), "citype": lazyre.New(`^nocloud$`), // the only seed type that templates support
	"machine": lazyre.New(`^(type=)?(pc|q35|pc-(i440fx|q35)-[0-9.]+(\+pve[0-9]+)?)$`),
	"memory":  number, "balloon": number, "shares": number, "meta": anything, "name": words, "nameserver": lazyre.New(`^[0-9A-Fa-f:. ]*$`),
	"numa": flag, "ostype": words, "parent": words, "reboot": flag, "scsihw": words, "searchdomain": words, "smbios1": anything,
	"sockets": lazyre.New(`^1$`), "sshkeys": anything, "tablet": flag, "tags": anything, "vcpus": number, "vmgenid": words,
	"agent": lazyre.New(`^[A-Za-z0-9_,=-]*$`),
	"rng0":  lazyre.New(`^(source=)?/dev/u?random(,(max_bytes|period)=[0-9]+)*$`),
	"vga":   lazyre.New(`^(type=)?(cirrus|none|qxl|serial0|std|virtio|vmware)(,memory=[0-9]+)?$`),
	// The console of cloud images: a socket that only root on the node may
	// open.
	"serial0": lazyre.New(`^socket$`),
}

var (
	anything = lazyre.New(`(?s)^.*$`)
	flag     = lazyre.New(`^[01]$`)
	number   = lazyre.New(`^(current=)?[0-9]+(\.[0-9]+)?$`)
	words    = lazyre.New(`^[A-Za-z0-9._;,=+ -]*$`)
)

// bootDisks are the slots in which the single disk of a sandbox may be.
var bootDisks = []string{"scsi0", "virtio0", "sata0", "ide0"}

// driveOptions are the options that a disk may have in addition to its volume.
var driveOptions = []string{"aio", "backup", "cache", "detect_zeroes", "discard", "format", "iothread", "queues", "replicate", "size", "ssd"}

var (
	unusedOption = lazyre.New(`^unused[0-9]+$`)
	cdSlot       = lazyre.New(`^(ide[0-3]|sata[0-5]|scsi[0-9]+)$`)
)

// audit returns an error if a configuration must not be started. have is the
// configuration from the node. want has the options with a required value; ""
// means that the option must not be set.
func audit(have pve.Config, want map[string]string, vmid int) error {
	disks := 0
	for _, key := range slices.Sorted(maps.Keys(have)) {
		value := have[key]
		if exact, ok := want[key]; ok {
			if !sameOption(key, value, exact) {
				return refuse(vmid, key, value)
			}
			continue
		}
		switch form := harmless[key]; {
		case form != nil && form.MatchString(value), unusedOption.MatchString(key):
		case slices.Contains(bootDisks, key) && ownDisk(value, vmid):
			disks++
		case key == "efidisk0" && ownDisk(value, vmid):
		case cdSlot.MatchString(key) && ownCloudInit(value, vmid):
		case cdSlot.MatchString(key) && emptyCD(value):
		default:
			return refuse(vmid, key, value)
		}
	}
	for _, key := range slices.Sorted(maps.Keys(want)) {
		if _, there := have[key]; !there && want[key] != "" && !sameOption(key, "", want[key]) {
			return refuse(vmid, key, "")
		}
	}
	if disks != 1 {
		return agentlab.Errorf(agentlab.CodeDenied, "VM %d has %d boot disks, and a sandbox must have exactly one", vmid, disks).
			WithHint("the VM was changed manually: undo the change or destroy the sandbox")
	}
	return nil
}

func refuse(vmid int, key, value string) error {
	what := strconv.Quote(clip(value))
	if value == "" {
		what = "not set"
	}
	return agentlab.Errorf(agentlab.CodeDenied, "VM %d does not have the expected configuration: %s is %s", vmid, key, what).
		WithField(key).WithHint("the VM was changed manually: undo the change or destroy the sandbox; if the option is from the template, the template cannot be used")
}

// clip shortens text from a node for a message.
func clip(s string) string { return agentlab.OneLine(s, 120) }

// zeroOptions are options for which unset and 0 are the same.
var zeroOptions = []string{"onboot", "protection", "template"}

// sameOption compares two values like Proxmox: the order of the parts of a
// property string and the case of an address are ignored.
func sameOption(key, have, want string) bool {
	if have == want {
		return true
	}
	if slices.Contains(zeroOptions, key) {
		return (have == "" || have == "0") && (want == "" || want == "0")
	}
	if have == "" || want == "" {
		return false
	}
	switch key {
	case "net0", "ipconfig0", "cicustom":
		return slices.Equal(sortedProps(have), sortedProps(want))
	case volumeSlot:
		props := slices.DeleteFunc(sortedProps(have), func(p string) bool { return strings.HasPrefix(p, "size=") })
		return slices.Equal(props, sortedProps(want))
	case "cpulimit", "memory", "balloon", "cores":
		a, err1 := strconv.ParseFloat(strings.TrimPrefix(have, "current="), 64)
		b, err2 := strconv.ParseFloat(want, 64)
		return err1 == nil && err2 == nil && a == b
	case "tags":
		return slices.Equal(slices.Sorted(slices.Values(splitTags(have))), slices.Sorted(slices.Values(splitTags(want))))
	case "sshkeys":
		a, err1 := url.PathUnescape(have)
		b, err2 := url.PathUnescape(want)
		return err1 == nil && err2 == nil && strings.TrimSpace(a) == strings.TrimSpace(b)
	case "description":
		return strings.TrimSpace(have) == strings.TrimSpace(want)
	}
	return false
}

func sortedProps(s string) []string {
	var out []string
	for _, p := range pve.ParseProps(s) {
		out = append(out, p.Key+"="+strings.ToLower(p.Value))
	}
	slices.Sort(out)
	return out
}

func splitTags(s string) []string {
	return strings.FieldsFunc(s, func(r rune) bool { return r == ';' || r == ',' || r == ' ' })
}

// ownDisk reports whether a drive is a disk on a volume with the VM's own
// number, with only harmless options.
func ownDisk(value string, vmid int) bool {
	volid, ok := driveVolume(value)
	if !ok || volumeOwner(volid) != vmid {
		return false
	}
	for _, p := range pve.ParseProps(value) {
		if p.Key != "" && p.Key != "file" && p.Key != "efitype" && p.Key != "pre-enrolled-keys" && p.Key != "ms-cert" && !slices.Contains(driveOptions, p.Key) {
			return false
		}
	}
	return true
}

// ownCloudInit reports whether a drive is the VM's own cloud-init medium.
func ownCloudInit(value string, vmid int) bool {
	volid, ok := driveVolume(value)
	media, _ := pve.ParseProps(value).Get("media")
	return ok && media == "cdrom" && volumeOwner(volid) == vmid && isCloudInit(volid)
}

func isCloudInit(volid string) bool { return strings.Contains(lastComponent(volid), "cloudinit") }

func emptyCD(value string) bool {
	volid, _ := pve.ParseProps(value).Get("")
	media, _ := pve.ParseProps(value).Get("media")
	return volid == "none" && media == "cdrom"
}

// driveVolume returns the volume ID of a drive. ok is false for a path of the
// host.
func driveVolume(value string) (string, bool) {
	props := pve.ParseProps(value)
	volid, ok := props.Get("")
	if !ok {
		volid, ok = props.Get("file")
	}
	storage, name, colon := strings.Cut(volid, ":")
	return volid, ok && colon && storage != "" && name != "" && !strings.HasPrefix(volid, "/")
}

func lastComponent(volid string) string { return volid[strings.LastIndexAny(volid, "/:")+1:] }

var ownedName = lazyre.New(`^(vm|base)-([1-9][0-9]*)-`)

// volumeOwner returns the number of the VM that a volume belongs to in
// Proxmox: the number in its name or, if volumes are files, that of the
// directory; 0 if there is none.
func volumeOwner(volid string) int {
	_, name, _ := strings.Cut(volid, ":")
	last := lastComponent(volid)
	if strings.Contains(last, ".") { // a file: STORAGE:[BASE/]VMID/NAME.EXT
		dir := strings.TrimSuffix(strings.TrimSuffix(name, last), "/")
		n, err := strconv.Atoi(dir[strings.LastIndex(dir, "/")+1:])
		if err != nil {
			return 0
		}
		return n
	}
	m := ownedName.FindStringSubmatch(last)
	if m == nil {
		return 0
	}
	n, err := strconv.Atoi(m[2])
	if err != nil {
		return 0
	}
	return n
}

// volumesOf lists the volumes in a configuration with the VM's own number,
// which are destroyed with the VM.
func volumesOf(cfg pve.Config, vmid int) []string {
	var out []string
	for key, value := range cfg {
		if !driveOption.MatchString(key) {
			continue
		}
		if volid, ok := driveVolume(value); ok && volumeOwner(volid) == vmid {
			out = append(out, volid)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

var driveOption = lazyre.New(`^(ide|sata|scsi|virtio|efidisk|tpmstate|unused)[0-9]+$`)

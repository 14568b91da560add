package proxmox

import (
	"maps"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
)

// The audit before every start: a list of what the configuration of a sandbox
// may hold. Whatever is not on it (a path of the host, a device passed
// through, a second network device, arguments for QEMU, an option that a later
// version brings) is a way around the isolation, or may be one, and nothing
// starts.

// lockClone is the property lock of a VM that is being cloned.
const lockClone = "clone"

// harmless are options that may have any value of this form: they say how the
// VM is emulated, shown or described, and reach nothing of the host.
var harmless = map[string]*regexp.Regexp{
	"acpi": flag, "boot": words, "bootdisk": words, "ciupgrade": flag, "ciuser": words, "cores": number,
	"cpu":      regexp.MustCompile(`^(cputype=)?[A-Za-z0-9][A-Za-z0-9._-]*(,(flags|hidden|phys-bits)=[A-Za-z0-9+;._-]+)*$`),
	"cpulimit": number, "cpuunits": number, "description": anything, "digest": words, "hotplug": words,
	"ipconfig0": regexp.MustCompile(`^[0-9A-Za-z=,:./]*$`), "keyboard": words, "kvm": flag, "localtime": flag,
	"bios": regexp.MustCompile(`^(seabios|ovmf)$`), "citype": regexp.MustCompile(`^nocloud$`), // the only seed that templates look for
	"machine": regexp.MustCompile(`^(type=)?(pc|q35|pc-(i440fx|q35)-[0-9.]+(\+pve[0-9]+)?)$`),
	"memory":  number, "balloon": number, "shares": number, "meta": anything, "name": words, "nameserver": regexp.MustCompile(`^[0-9A-Fa-f:. ]*$`),
	"numa": flag, "ostype": words, "parent": words, "reboot": flag, "scsihw": words, "searchdomain": words, "smbios1": anything,
	"sockets": regexp.MustCompile(`^1$`), "sshkeys": anything, "tablet": flag, "tags": anything, "vcpus": number, "vmgenid": words,
	"agent": regexp.MustCompile(`^[A-Za-z0-9_,=-]*$`),
	"rng0":  regexp.MustCompile(`^(source=)?/dev/u?random(,(max_bytes|period)=[0-9]+)*$`),
	"vga":   regexp.MustCompile(`^(type=)?(cirrus|none|qxl|serial0|std|virtio|vmware)(,memory=[0-9]+)?$`),
	// The console of cloud images: a socket that root on the node may open.
	"serial0": regexp.MustCompile(`^socket$`),
}

var (
	anything = regexp.MustCompile(`(?s)^.*$`)
	flag     = regexp.MustCompile(`^[01]$`)
	number   = regexp.MustCompile(`^(current=)?[0-9]+(\.[0-9]+)?$`)
	words    = regexp.MustCompile(`^[A-Za-z0-9._;,=+ -]*$`)
)

// bootDisks are the places where the one disk of a sandbox may be.
var bootDisks = []string{"scsi0", "virtio0", "sata0", "ide0"}

// driveOptions are what may be said of a disk beside its volume.
var driveOptions = []string{"aio", "backup", "cache", "detect_zeroes", "discard", "format", "iothread", "queues", "replicate", "size", "ssd"}

var (
	unusedOption = regexp.MustCompile(`^unused[0-9]+$`)
	cdSlot       = regexp.MustCompile(`^(ide[0-3]|sata[0-5]|scsi[0-9]+)$`)
)

// audit tells what in a configuration keeps a sandbox from being started.
// have is what the node says, want the options that must be exactly so, where
// "" is an option that must not be set.
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
		return agentlab.Errorf(agentlab.CodeDenied, "VM %d has %d disks of its own to boot from, and a sandbox has one", vmid, disks).
			WithHint("it was changed by hand: destroy the sandbox, or undo the change")
	}
	return nil
}

func refuse(vmid int, key, value string) error {
	what := strconv.Quote(clip(value))
	if value == "" {
		what = "not set"
	}
	return agentlab.Errorf(agentlab.CodeDenied, "VM %d is not configured as its sandbox should be: %s is %s; it is not started", vmid, key, what).
		WithField(key).WithHint("it was changed by hand: undo that, or destroy the sandbox; a template with such an option cannot be used")
}

// clip shortens what came from a node for a message.
func clip(s string) string { return agentlab.OneLine(s, 120) }

// zeroOptions are those for which not set and 0 are the same.
var zeroOptions = []string{"onboot", "protection", "template"}

// sameOption compares two values as Proxmox means them: the order of a
// property string's parts does not count, nor does the case of an address.
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

// ownDisk tells whether a drive is a disk on a volume that bears the VM's own
// number, with no options but harmless ones.
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

// ownCloudInit tells whether a drive is the VM's own cloud-init medium.
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

// driveVolume returns the volume id of a drive; a path of the host is none.
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

var ownedName = regexp.MustCompile(`^(vm|base)-([1-9][0-9]*)-`)

// volumeOwner is the number of the VM that a volume belongs to, as Proxmox
// sees it: the one in its name, or, where volumes are files, the folder's. 0
// when there is none.
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

// volumesOf lists the volumes that a configuration names and that bear the
// VM's own number: what is destroyed with it.
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

var driveOption = regexp.MustCompile(`^(ide|sata|scsi|virtio|efidisk|tpmstate|unused)[0-9]+$`)

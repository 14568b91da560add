package proxmox

import (
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
	"github.com/agentlab-vm/agentlab/internal/lazyre"
)

// A clone inherits nearly all of its template: protection, onboot, tags,
// cicustom, hookscript, args, passwords, keys, affinity. The first change sets
// the options that matter for a sandbox and deletes others that could do harm.

// inheritedOptions lists options that a sandbox keeps from its template: the emulated
// hardware that its disk was made for. All others are deleted.
var inheritedOptions = []string{
	"acpi", "bios", "boot", "bootdisk", "cpu", "digest", "efidisk0", "hotplug", "keyboard", "kvm", "localtime",
	"machine", "meta", "numa", "ostype", "reboot", "rng0", "scsihw", "serial0", "smbios1", "tablet", "template", "vga", "vmgenid",
}

var inheritedDrives = lazyre.New(`^(ide|sata|scsi|virtio)[0-9]+$`)

// wanted returns the options of a sandbox with a required value; "" means that
// the option must not be set.
func (d *Driver) wanted(h *handle) map[string]string {
	spec, cores := h.Spec, h.Spec.Resources.Cores
	balloon := 0
	if h.options.Balloon {
		balloon = max(spec.Resources.MemoryMB/2, 128)
	}
	want := map[string]string{
		"name": spec.Name, "description": description(h.id(), d.installation), "tags": tags(spec.UID),
		"cores": strconv.Itoa(cores), "cpulimit": strconv.Itoa(min(cores, 128)),
		"memory": strconv.Itoa(spec.Resources.MemoryMB), "balloon": strconv.Itoa(balloon),
		"net0": d.net0(h), "ipconfig0": d.ipconfig(h), "nameserver": d.cfg.Nameserver.String(),
		"onboot": "0", "protection": "0", "agent": "enabled=1", "ciuser": guestUser, "ciupgrade": "0",
		"affinity": h.options.CPUList, "cicustom": "", "sshkeys": "", "cipassword": "",
		"hookscript": "", "args": "", "startup": "", "citype": "", "lock": "", "template": "", "searchdomain": "",
	}
	if len(d.cfg.SSHKeys) > 0 {
		want["sshkeys"] = pve.EncodeSSHKeys(strings.Join(d.cfg.SSHKeys, "\n"))
	}
	if h.CPU != "" {
		want["cpu"] = h.CPU
	}
	if h.SnippetVolume != "" {
		want["cicustom"] = "user=" + h.SnippetVolume
	}
	return want
}

// guestUser is the user that agents run as.
const guestUser = "agent"

// net0 returns the sandbox's network device. It always includes the MAC
// address; otherwise Proxmox would choose a new one at each change.
func (d *Driver) net0(h *handle) string {
	model := h.options.NICModel
	if model == "" {
		model = d.cfg.Model
	}
	net := model + "=" + strings.ToUpper(h.MAC) + ",bridge=" + d.cfg.Bridge
	if d.firewalled(h) {
		net += ",firewall=1"
	}
	return net
}

func (d *Driver) firewalled(h *handle) bool {
	return d.cfg.Firewall || h.options.FirewallGroup != ""
}

// ipconfig returns the cloud-init configuration of the device. With a gateway
// in addition to ip=dhcp the guest would have no network.
func (d *Driver) ipconfig(h *handle) string {
	parts := []string{"ip=dhcp"}
	if !d.cfg.DHCP {
		parts = []string{"ip=" + netip.PrefixFrom(h.Spec.IPv4, d.cfg.Subnet4.Bits()).String(), "gw=" + d.cfg.Gateway4.String()}
	}
	if h.Spec.IPv6.IsValid() {
		parts = append(parts, "ip6="+netip.PrefixFrom(h.Spec.IPv6, d.cfg.Subnet6.Bits()).String(), "gw6="+d.cfg.Gateway6.String())
	}
	return strings.Join(parts, ",")
}

// changes returns the changes from the configuration inherited to want.
func changes(inherited pve.Config, want map[string]string) pve.Changes {
	ch := pve.Changes{Set: map[string]string{}}
	for key, value := range want {
		if value != "" {
			ch.Set[key] = value
		}
	}
	for key := range inherited {
		_, set := ch.Set[key]
		if set || slices.Contains(inheritedOptions, key) || inheritedDrives.MatchString(key) || key == "lock" || unusedOption.MatchString(key) || isSnapshotOption(key) {
			continue
		}
		ch.Delete = append(ch.Delete, key)
	}
	slices.Sort(ch.Delete)
	return ch
}

// isSnapshotOption reports whether a clone does not copy an option from its
// source.
func isSnapshotOption(key string) bool {
	return slices.Contains([]string{"parent", "snaptime", "vmstate", "snapstate", "runningcpu", "runningmachine", "running-nets-host-mtu"}, key)
}

// bootDisk returns the slot of the single disk of a template.
func bootDisk(cfg pve.Config, vmid int) (slot string, ok bool) {
	for _, key := range slices.Sorted(maps.Keys(cfg)) {
		if slices.Contains(bootDisks, key) && ownDisk(cfg[key], vmid) {
			if slot != "" {
				return "", false
			}
			slot = key
		}
	}
	return slot, slot != ""
}

// driveSize returns the size of a drive in bytes, 0 if it is not known.
func driveSize(value string) int64 {
	text, ok := pve.ParseProps(value).Get("size")
	if !ok || text == "" {
		return 0
	}
	shift := map[byte]uint{'K': 10, 'M': 20, 'G': 30, 'T': 40}
	unit, has := shift[text[len(text)-1]]
	if has {
		text = text[:len(text)-1]
	}
	n, err := strconv.ParseFloat(text, 64)
	if err != nil || n < 0 || n > 1<<40 {
		return 0
	}
	return int64(n * float64(int64(1)<<unit))
}

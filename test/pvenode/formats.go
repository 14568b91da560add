package pvenode

import (
	"net"
	"net/netip"
	"net/url"
	"regexp"
	"strconv"
	"strings"
)

var (
	nodeRe      = regexp.MustCompile(`^[a-zA-Z0-9]([a-zA-Z0-9-]*[a-zA-Z0-9])?$`)
	storageIDRe = regexp.MustCompile(`(?i)^[a-z][a-z0-9\-_.]*[a-z0-9]$`)
	configIDRe  = regexp.MustCompile(`(?i)^[a-z][a-z0-9_-]+$`)
	dnsRe       = regexp.MustCompile(`^[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?(\.[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?)*$`)
	tagRe       = regexp.MustCompile(`(?i)^[a-z0-9_][a-z0-9_\-+.]*$`)
	volidRe     = regexp.MustCompile(`^[a-zA-Z][a-zA-Z0-9\-_.]*[a-zA-Z0-9]:.+$`)
	cpusetRe    = regexp.MustCompile(`^\d+(-\d+)?(,\d+(-\d+)?)*$`)
	bridgeRe    = regexp.MustCompile(`^[-_.\w]+$`)
	poolIDRe    = regexp.MustCompile(`(?i)^[a-z0-9.\-_]+(/[a-z0-9.\-_]+){0,2}$`)
)

func formatNode(_ *Node, s string) string {
	if !nodeRe.MatchString(s) {
		return "value does not look like a valid node name\n"
	}
	return ""
}

func formatVMID(_ *Node, s string) string {
	i, err := strconv.Atoi(s)
	if err != nil || i < 100 || i > 999999999 {
		return "value does not look like a valid VM ID\n"
	}
	return ""
}

func formatStorageID(_ *Node, s string) string {
	if !storageIDRe.MatchString(s) {
		return "storage ID '" + s + "' contains illegal characters\n"
	}
	return ""
}

func formatConfigID(_ *Node, s string) string {
	if !configIDRe.MatchString(s) {
		return "invalid configuration ID '" + s + "'\n"
	}
	return ""
}

func formatPool(_ *Node, s string) string {
	if !poolIDRe.MatchString(s) {
		return "value does not look like a valid pool ID\n"
	}
	return ""
}

func formatDNSName(_ *Node, s string) string {
	if !dnsRe.MatchString(s) {
		return "value does not look like a valid DNS name\n"
	}
	return ""
}

func formatTags(_ *Node, s string) string {
	for _, t := range splitList(s) {
		if !tagRe.MatchString(t) {
			return "invalid characters in tag\n"
		}
	}
	return ""
}

func formatVolid(_ *Node, s string) string {
	if !volidRe.MatchString(s) {
		return "unable to parse volume ID '" + s + "'\n"
	}
	return ""
}

func formatCPUSet(_ *Node, s string) string {
	if !cpusetRe.MatchString(s) {
		return "unable to parse cpuset option\n"
	}
	return ""
}

func formatMAC(_ *Node, s string) string {
	m, err := net.ParseMAC(s)
	if err != nil || len(m) != 6 || m[0]&1 != 0 || strings.Count(s, ":") != 5 {
		return "value does not look like a valid unicast MAC address\n"
	}
	return ""
}

func formatIPv4Config(_ *Node, s string) string {
	if s == "dhcp" || s == "manual" {
		return ""
	}
	p, err := netip.ParsePrefix(s)
	if err != nil || !p.Addr().Is4() || p.Bits() < 8 {
		return "value does not look like a valid ipv4 network configuration\n"
	}
	return ""
}

func formatIPv6Config(_ *Node, s string) string {
	if s == "dhcp" || s == "auto" {
		return ""
	}
	p, err := netip.ParsePrefix(s)
	if err != nil || !p.Addr().Is6() {
		return "value does not look like a valid ipv6 network configuration\n"
	}
	return ""
}

func formatIPv4(_ *Node, s string) string {
	if a, err := netip.ParseAddr(s); err != nil || !a.Is4() {
		return "value does not look like a valid ipv4 address\n"
	}
	return ""
}

func formatIPv6(_ *Node, s string) string {
	if a, err := netip.ParseAddr(s); err != nil || !a.Is6() {
		return "value does not look like a valid ipv6 address\n"
	}
	return ""
}

func formatAddressList(_ *Node, s string) string {
	for _, a := range splitList(s) {
		if _, err := netip.ParseAddr(a); err != nil {
			return "value does not look like a valid address: " + a + "\n"
		}
	}
	return ""
}

// formatURLEncoded is that of sshkeys: percent-encoded, a blank never "+".
func formatURLEncoded(_ *Node, s string) string {
	for i := 0; i < len(s); i++ {
		ch := s[i]
		switch {
		case ch >= 'a' && ch <= 'z', ch >= 'A' && ch <= 'Z', ch >= '0' && ch <= '9', strings.IndexByte("-_.!~*'()", ch) >= 0:
		case ch == '%' && i+2 < len(s) && isHex(s[i+1]) && isHex(s[i+2]):
			i += 2
		default:
			return "invalid urlencoded string: " + s + "\n"
		}
	}
	if _, err := url.PathUnescape(s); err != nil {
		return "invalid urlencoded string: " + s + "\n"
	}
	return ""
}

func isHex(b byte) bool {
	return b >= '0' && b <= '9' || b >= 'a' && b <= 'f' || b >= 'A' && b <= 'F'
}

// formatDriveFile is what may stand for a volume: a new one, one that is
// there, a path, or the physical drive.
func formatDriveFile(n *Node, s string) string {
	if s == "none" || s == "cdrom" || strings.HasPrefix(s, "/") || newDiskRe.MatchString(s) {
		return ""
	}
	return formatVolid(n, s)
}

// bootDevRe are drives, network and passed-through devices.
var bootDevRe = regexp.MustCompile(`^(ide[0-3]|sata[0-5]|scsi([12]?\d|30)|virtio(\d|1[0-5])|net([12]?\d|3[01])|usb(\d|1[0-3])|hostpci(\d|1[0-5]))$`)

// formatBootOrder is a list of boot devices.
func formatBootOrder(_ *Node, s string) string {
	for _, dev := range splitList(s) {
		if !bootDevRe.MatchString(dev) {
			return "invalid boot device '" + dev + "'\n"
		}
	}
	return ""
}

// cpuTypes are the models that this node knows; the real list is longer.
var cpuTypes = setOf("host", "max", "kvm64", "kvm32", "qemu64", "qemu32", "x86-64-v2", "x86-64-v2-AES", "x86-64-v3", "x86-64-v4",
	"Nehalem", "Westmere", "SandyBridge", "IvyBridge", "Haswell", "Broadwell", "Skylake-Client", "Skylake-Server", "Cascadelake-Server",
	"Icelake-Server", "SapphireRapids", "EPYC", "EPYC-Rome", "EPYC-Milan", "EPYC-Genoa", "Opteron_G5", "Penryn", "Conroe")

func formatCPUType(_ *Node, s string) string {
	if !cpuTypes[s] {
		return "Built-in cputype '" + s + "' is not defined (missing 'custom-' prefix?)\n"
	}
	return ""
}

package machine

import (
	"crypto/sha1" //nolint:gosec // Proxmox's instance-id is one; nothing is protected by it
	"encoding/hex"
	"fmt"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
)

// Config is a VM's configuration as its file has it: option to value.
type Config map[string]string

// props are the parts of a value such as "virtio=AA:…,bridge=vmbr1": key to
// value, and what stands without a key under "".
func props(value string) map[string]string {
	out := map[string]string{}
	for part := range strings.SplitSeq(value, ",") {
		k, v, ok := strings.Cut(part, "=")
		if !ok {
			k, v = "", k
		}
		out[k] = v
	}
	return out
}

// on tells whether a boolean option is set.
func (c Config) on(key string, fallback bool) bool {
	switch c[key] {
	case "":
		return fallback
	case "0":
		return false
	}
	return true
}

// AgentEnabled tells whether the option agent gives the VM an agent's port.
func (c Config) AgentEnabled() bool {
	p := props(c["agent"])
	return p[""] == "1" || p["enabled"] == "1"
}

// UserData is the user-data that Proxmox VE makes of a VM's options when
// cicustom names no other. The name of the VM is its hostname.
func UserData(c Config, vmid int) string {
	host := c["name"]
	if host == "" {
		host = fmt.Sprintf("VM%d", vmid)
	}
	var b strings.Builder
	b.WriteString("#cloud-config\n")
	short, _, qualified := strings.Cut(host, ".")
	if domain := c["searchdomain"]; domain != "" && !qualified {
		host += "." + domain
	}
	fmt.Fprintf(&b, "hostname: %s\nmanage_etc_hosts: true\nfqdn: %s\n", short, host)
	user := c["ciuser"]
	if user != "" {
		fmt.Fprintf(&b, "user: %s\n", user)
	}
	if user == "root" {
		b.WriteString("disable_root: False\n")
	}
	if p := c["cipassword"]; p != "" {
		fmt.Fprintf(&b, "password: %s\n", p)
	}
	if keys, err := url.PathUnescape(c["sshkeys"]); err == nil && c["sshkeys"] != "" {
		b.WriteString("ssh_authorized_keys:\n")
		for key := range strings.Lines(keys) {
			if key = strings.TrimRight(key, "\n"); strings.TrimSpace(key) != "" {
				fmt.Fprintf(&b, "  - %s\n", key)
			}
		}
	}
	b.WriteString("chpasswd:\n  expire: False\n")
	if user != "root" {
		b.WriteString("users:\n  - default\n")
	}
	if c.on("ciupgrade", true) {
		b.WriteString("package_upgrade: true\n")
	}
	return b.String()
}

// netNumbers are the numbers of a VM's network devices, in the order of their
// names' text, as Proxmox VE walks them.
func (c Config) netNumbers() []string {
	var out []string
	for key := range c {
		if n, ok := strings.CutPrefix(key, "net"); ok {
			if _, err := strconv.Atoi(n); err == nil {
				out = append(out, n)
			}
		}
	}
	slices.Sort(out)
	return out
}

// MAC returns the address of network device n, and its model.
func (c Config) MAC(n string) (model, mac string) {
	for k, v := range props(c["net"+n]) {
		switch {
		case k == "model" || k == "":
			model = v
		case k == "macaddr":
			mac = v
		case strings.Count(v, ":") == 5:
			return k, v
		}
	}
	return model, mac
}

// NetworkData is the network configuration that Proxmox VE makes of the
// options ipconfigN. A device without one gets no entry; "ip=dhcp" with a
// gateway yields an entry without any address. servers and search take the
// place of nameserver and searchdomain where those are unset: Proxmox VE takes
// them from the host's resolv.conf.
func NetworkData(c Config, servers, search []string) string {
	const i = "    "
	var b strings.Builder
	b.WriteString("version: 1\nconfig:\n")
	for _, n := range c.netNumbers() {
		text := c["ipconfig"+n]
		if text == "" {
			continue
		}
		_, mac := c.MAC(n)
		fmt.Fprintf(&b, i+"- type: physical\n"+i+"  name: eth%s\n"+i+"  mac_address: '%s'\n"+i+"  subnets:\n", n, strings.ToLower(mac))
		ip := props(text)
		if (ip["ip"] == "dhcp" && ip["gw"] != "") || (ip["ip6"] == "dhcp" && ip["gw6"] != "") {
			continue
		}
		subnet4(&b, ip["ip"], ip["gw"])
		subnet6(&b, ip["ip6"], ip["gw6"])
	}
	if s := strings.FieldsFunc(c["nameserver"], listSeparator); len(s) > 0 {
		servers = s
	}
	if s := strings.FieldsFunc(c["searchdomain"], listSeparator); len(s) > 0 {
		search = s
	}
	if len(servers) > 0 || len(search) > 0 {
		b.WriteString(i + "- type: nameserver\n")
		list(&b, "address", servers)
		list(&b, "search", search)
	}
	return b.String()
}

func listSeparator(r rune) bool { return strings.ContainsRune(" ,;\t", r) }

func list(b *strings.Builder, name string, values []string) {
	if len(values) == 0 {
		return
	}
	fmt.Fprintf(b, "      %s:\n", name)
	for _, v := range values {
		fmt.Fprintf(b, "      - '%s'\n", v)
	}
}

func subnet4(b *strings.Builder, ip, gw string) {
	const i = "      "
	switch p, err := netip.ParsePrefix(ip); {
	case ip == "dhcp":
		b.WriteString(i + "- type: dhcp4\n")
	case err == nil:
		mask := [4]byte{}
		for n := range p.Bits() {
			mask[n/8] |= 0x80 >> (n % 8)
		}
		fmt.Fprintf(b, i+"- type: static\n"+i+"  address: '%s'\n"+i+"  netmask: '%s'\n", p.Addr(), netip.AddrFrom4(mask))
		if gw != "" {
			fmt.Fprintf(b, i+"  gateway: '%s'\n", gw)
		}
	}
}

func subnet6(b *strings.Builder, ip, gw string) {
	const i = "      "
	switch ip {
	case "":
	case "auto":
		b.WriteString(i + "- type: ipv6_slaac\n")
	case "dhcp":
		b.WriteString(i + "- type: dhcp6\n")
	default:
		fmt.Fprintf(b, i+"- type: static6\n"+i+"  address: '%s'\n", ip)
		if gw != "" {
			fmt.Fprintf(b, i+"  gateway: '%s'\n", gw)
		}
	}
}

// MetaData is the meta-data that Proxmox VE makes: any change of the other two
// makes the guest a new instance.
func MetaData(user, network string) string {
	sum := sha1.Sum([]byte(user + network)) //nolint:gosec // see above
	return "instance-id: " + hex.EncodeToString(sum[:]) + "\n"
}

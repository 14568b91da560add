package pvenode

import (
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"strings"
)

// hostNameservers are those of the node's own resolv.conf, which guests get
// when their config names none.
var hostNameservers = []string{"192.0.2.53"}

// cloudinitUser is the user-data that the node makes itself.
func cloudinitUser(conf map[string]string, vmid int, mask bool) string {
	hostname := conf["name"]
	if hostname == "" {
		hostname = "VM" + itoa(vmid)
	}
	fqdn := hostname
	if short, _, dotted := strings.Cut(hostname, "."); dotted {
		hostname = short
	} else if s := conf["searchdomain"]; s != "" {
		fqdn = hostname + "." + s
	}
	var b strings.Builder
	fmt.Fprintf(&b, "#cloud-config\nhostname: %s\nmanage_etc_hosts: true\nfqdn: %s\n", hostname, fqdn)
	name, named := conf["ciuser"]
	if named {
		fmt.Fprintf(&b, "user: %s\n", name)
		if name == "root" {
			b.WriteString("disable_root: False\n")
		}
	}
	if p, ok := conf["cipassword"]; ok {
		if mask {
			p = "**********"
		}
		fmt.Fprintf(&b, "password: %s\n", p)
	}
	if keys, ok := conf["sshkeys"]; ok {
		if plain, err := url.PathUnescape(keys); err == nil {
			keys = plain
		}
		b.WriteString("ssh_authorized_keys:\n")
		for _, k := range strings.Split(keys, "\n") {
			if strings.TrimSpace(k) != "" {
				fmt.Fprintf(&b, "  - %s\n", k)
			}
		}
	}
	b.WriteString("chpasswd:\n  expire: False\n")
	if name != "root" {
		b.WriteString("users:\n  - default\n")
	}
	if up, ok := conf["ciupgrade"]; !ok || up == "1" {
		b.WriteString("package_upgrade: true\n")
	}
	return b.String()
}

// cloudinitNetwork is the network-config that the node makes. Of an interface
// whose ipconfig says what cannot be, only the head is written, and one
// without ipconfig is left out.
func cloudinitNetwork(conf map[string]string) string {
	var b strings.Builder
	b.WriteString("version: 1\nconfig:\n")
	for _, k := range sortedKeys(conf) {
		id, ok := strings.CutPrefix(k, "net")
		if !ok || strings.Trim(id, "0123456789") != "" || id == "" || conf["ipconfig"+id] == "" {
			continue
		}
		fmt.Fprintf(&b, "    - type: physical\n      name: eth%s\n      mac_address: '%s'\n      subnets:\n", id, strings.ToLower(macOf(conf[k])))
		writeSubnets(&b, parseIPConfig(conf["ipconfig"+id]))
	}
	servers := hostNameservers
	if s := strings.Fields(conf["nameserver"]); len(s) > 0 {
		servers = s
	}
	b.WriteString("    - type: nameserver\n      address:\n")
	for _, s := range servers {
		fmt.Fprintf(&b, "      - '%s'\n", s)
	}
	if domains := strings.Fields(conf["searchdomain"]); len(domains) > 0 {
		b.WriteString("      search:\n")
		for _, d := range domains {
			fmt.Fprintf(&b, "      - '%s'\n", d)
		}
	}
	return b.String()
}

// macOf is the MAC of a network device's option.
func macOf(device string) string {
	for _, part := range strings.Split(device, ",") {
		_, v, _ := strings.Cut(part, "=")
		if _, err := net.ParseMAC(v); err == nil && strings.Count(v, ":") == 5 {
			return v
		}
	}
	return ""
}

// parseIPConfig reads an ipconfig option; nil when its parts contradict each
// other, of which the node only warns.
func parseIPConfig(s string) map[string]string {
	c := map[string]string{}
	for _, part := range strings.Split(s, ",") {
		k, v, _ := strings.Cut(part, "=")
		c[k] = v
	}
	static6 := strings.Contains(c["ip6"], ":")
	switch {
	case c["gw"] != "" && (c["ip"] == "" || c["ip"] == "dhcp"), c["gw6"] != "" && !static6:
		return nil
	case c["ip"] == "" && c["ip6"] == "":
		return map[string]string{"ip": "dhcp", "ip6": "dhcp"}
	}
	return c
}

func writeSubnets(b *strings.Builder, c map[string]string) {
	switch ip := c["ip"]; ip {
	case "":
	case "dhcp":
		b.WriteString("      - type: dhcp4\n")
	default:
		p, err := netip.ParsePrefix(ip)
		if err != nil {
			return
		}
		mask := net.CIDRMask(p.Bits(), 32)
		fmt.Fprintf(b, "      - type: static\n        address: '%s'\n        netmask: '%s'\n", p.Addr(), net.IP(mask))
		if c["gw"] != "" {
			fmt.Fprintf(b, "        gateway: '%s'\n", c["gw"])
		}
	}
	switch ip := c["ip6"]; ip {
	case "":
	case "dhcp":
		b.WriteString("      - type: dhcp6\n")
	case "auto":
		b.WriteString("      - type: ipv6_slaac\n")
	default:
		fmt.Fprintf(b, "      - type: static6\n        address: '%s'\n", ip)
		if c["gw6"] != "" {
			fmt.Fprintf(b, "        gateway: '%s'\n", c["gw6"])
		}
	}
}

// cloudinitMeta is the meta-data: any change of the others makes the guest a
// new instance.
func cloudinitMeta(user, network string) string {
	return "instance-id: " + digestOf(user+network) + "\n"
}

// cloudinitTexts are the three files that the node makes of a configuration.
func cloudinitTexts(conf map[string]string, vmid int) (user, network, meta string) {
	user, network = cloudinitUser(conf, vmid, false), cloudinitNetwork(conf)
	return user, network, cloudinitMeta(user, network)
}

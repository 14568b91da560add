package hostscripts

import (
	"slices"
	"strings"
	"testing"
)

const interfaces = "auto lo\niface lo inet loopback\n\nauto vmbr0\niface vmbr0 inet static\n    address 192.168.1.10/24\n    gateway 192.168.1.1\n    bridge-ports eno1\n    bridge-stp off\n    bridge-fd 0\n\nsource /etc/network/interfaces.d/*\n"

// node is a host with the network of a fresh Proxmox VE.
func node(t *testing.T, with ...string) *host {
	h := newHost(t, append([]string{"ifup", "ifdown"}, with...)...)
	h.write("/etc/network/interfaces", interfaces)
	h.ok("mkdir", "-p", "/etc/network/interfaces.d")
	h.ok("bash", "-c", `ip link add eno1 type veth peer name xeno1 && ip link add vmbr0 type bridge && ip link set eno1 master vmbr0 && ip link set eno1 up &&
ip link set vmbr0 up && ip addr add 192.168.1.10/24 dev vmbr0 && ip route add default via 192.168.1.1 && ip link set xeno1 up && ip -6 route add default via fe80::1 dev vmbr0 proto ra`)
	return h
}

func contains(t *testing.T, what string, list []string, parts ...string) {
	t.Helper()
	for _, p := range parts {
		if !slices.ContainsFunc(list, func(s string) bool { return strings.Contains(s, p) }) {
			t.Errorf("%s: no %q in %q", what, p, list)
		}
	}
}

func TestBridge(t *testing.T) {
	h := node(t)
	commands := h.applied("net/setup_vmbr1.sh")
	contains(t, "commands", commands, "write /etc/network/interfaces.d/agentlab 0644", "ifup vmbr1", "write /etc/sysctl.d/80-agentlab.conf 0644")
	for _, want := range []string{" 10.77.0.1/16 ", " fd77:a91a:4d00::1/64 "} {
		if got := h.ok("ip", "-o", "addr", "show", "dev", "vmbr1"); !strings.Contains(got, want) {
			t.Errorf("vmbr1 has not %s: %s", want, got)
		}
	}
	// Without rules nothing is routed yet; after a boot everything is as now.
	if got := h.ok("cat", "/proc/sys/net/ipv4/ip_forward"); got != "0\n" {
		t.Errorf("forwarding began without a firewall: %s", got)
	}
	kernel := h.read("/etc/sysctl.d/80-agentlab.conf")
	for _, want := range []string{"net.ipv4.ip_forward = 1\n", "net.ipv6.conf.all.forwarding = 1\n", "net/ipv6/conf/vmbr0/accept_ra = 2\n"} {
		if !strings.Contains(kernel, want) {
			t.Errorf("%q lacks %q", kernel, want)
		}
	}

	commands = h.applied("net/apply.sh")
	contains(t, "commands", commands, "network apply --system")
	if got := h.ok("nft", "list", "tables"); !strings.Contains(got, "table inet agentlab") || !strings.Contains(got, "table bridge agentlab") {
		t.Errorf("rules: %s", got)
	}
	if got := h.ok("cat", "/proc/sys/net/ipv4/ip_forward"); got != "1\n" {
		t.Errorf("forwarding is off: %s", got)
	}
	h.settled("net/setup_vmbr1.sh") // accept_ra is 2 now, and stays in the file

	// Rules that were partly removed are restored.
	h.ok("nft", "delete", "table", "bridge", "agentlab")
	h.applied("net/apply.sh")

	// A VM on the bridge keeps it.
	h.ok("bash", "-c", "ip link add tap1000i0 type veth peer name xtap1000i0 && ip link set tap1000i0 master vmbr1")
	if r := h.script("net/setup_vmbr1.sh", "--remove", "--apply"); r.code != 1 || !strings.Contains(r.stderr, "VMs are connected to vmbr1: tap1000i0") {
		t.Errorf("%+v", r)
	}
	h.settled("net/setup_vmbr1.sh")
	h.ok("ip", "link", "delete", "tap1000i0")

	h.applied("net/apply.sh", "--remove")
	if got := h.ok("nft", "list", "tables"); strings.Contains(got, "agentlab") {
		t.Errorf("rules are left: %s", got)
	}
	h.applied("net/setup_vmbr1.sh", "--remove")
	if h.do("ip", "link", "show", "vmbr1").code == 0 || h.has("/etc/network/interfaces.d/agentlab") || h.has("/etc/sysctl.d/80-agentlab.conf") {
		t.Error("the bridge is left")
	}
	if got := h.read("/etc/network/interfaces"); got != interfaces {
		t.Errorf("the host's own interfaces were changed: %s", got)
	}
	if got := h.ok("ip", "-o", "addr", "show", "dev", "vmbr0"); !strings.Contains(got, "192.168.1.10/24") {
		t.Errorf("the host lost its address: %s", got)
	}
}

// What would break the host's network, or let more than sandboxes onto the
// bridge, is refused, and nothing is changed.
func TestBridgeRefused(t *testing.T) {
	for _, tc := range []struct{ name, prepare, want string }{
		{"port", "ip link add vmbr1 type bridge && ip link add eno2 type veth peer name xeno2 && ip link set eno2 master vmbr1", "ports that do not belong to VMs: eno2"},
		{"no bridge", "ip link add vmbr1 type veth peer name xvmbr1", "not a bridge"},
		{"route", "ip link add wg0 type veth peer name xwg0 && ip link set wg0 up && ip link set xwg0 up && ip route add 10.77.8.0/24 dev wg0", "overlaps with an existing route: 10.77.8.0/24 dev wg0"},
		{"route in another table", "ip link add ts0 type veth peer name xts0 && ip link set ts0 up && ip link set xts0 up && ip route add 10.77.0.0/16 dev ts0 table 52", "overlaps with an existing route: 10.77.0.0/16 dev ts0"},
		{"configured elsewhere", "printf 'auto vmbr1\\niface vmbr1 inet manual\\n    bridge-ports none\\n' >>/etc/network/interfaces", "configured in /etc/network/interfaces"},
		{"no source line", "sed -i /^source/d /etc/network/interfaces", "does not include /etc/network/interfaces.d"},
		{"no ifupdown", "rm /etc/network/interfaces", "not configured with ifupdown"},
		{"bad configuration", "mkdir -p /etc/agentlab && echo 'host_network: {bridge: \"v; rm -rf /\"}' >/etc/agentlab/config.yaml", "cannot read config.yaml"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			h := node(t)
			h.ok("bash", "-c", tc.prepare)
			before := h.changes()
			for _, arg := range []string{"--dry-run", "--apply"} {
				if r := h.script("net/setup_vmbr1.sh", arg); r.code != 1 || !strings.Contains(r.stderr, tc.want) {
					t.Errorf("%s: %+v", arg, r)
				}
			}
			differ(t, "changed though it was refused", before, h.changes())
		})
	}
}

// A bridge that was configured by hand, and correctly, is not changed; names
// and networks come from config.yaml.
func TestUserDefinedBridge(t *testing.T) {
	h := node(t)
	h.write("/etc/agentlab/config.yaml", "host_network: {bridge: labbr, subnet: 10.99.0.0/20, subnet6: \"\"}\n")
	contains(t, "commands", h.applied("net/setup_vmbr1.sh"), "ifup labbr")
	if got := h.ok("ip", "-o", "addr", "show", "dev", "labbr"); !strings.Contains(got, " 10.99.0.1/20 ") || strings.Contains(got, "fd77") {
		t.Error(got)
	}
	h.applied("net/setup_vmbr1.sh", "--remove")
	h.write("/etc/network/interfaces", interfaces+"auto labbr\niface labbr inet static\n    address 10.99.0.1/20\n    bridge-ports none\n")
	h.ok("ifup", "labbr")
	for _, c := range h.applied("net/setup_vmbr1.sh") {
		if strings.Contains(c, "interfaces") || strings.Contains(c, "ifup") {
			t.Errorf("a bridge that is as it should be is configured: %s", c)
		}
	}
	h.applied("net/setup_vmbr1.sh", "--remove")
	if h.do("ip", "link", "show", "labbr").code != 0 {
		t.Error("a user-defined bridge was removed")
	}
}

func TestTailscaleRouter(t *testing.T) {
	h := node(t, "tailscale")
	refused := func(want string) {
		t.Helper()
		if r := h.script("net/setup_tailscale_router.sh", "--apply"); r.code != 1 || !strings.Contains(r.stderr, want) {
			t.Errorf("%+v", r)
		}
	}
	refused("not in a tailnet")
	h.write("/run/tailscale.json", `{"State":"NeedsLogin"}`)
	refused("not in a tailnet")
	h.write("/run/tailscale.json", `{"State":"Running","AdvertiseRoutes":["192.168.1.0/24"],"Approved":["192.168.1.0/24"]}`)
	refused("interface tailscale0 does not exist")
	h.ok("ip", "link", "add", "tailscale0", "type", "veth", "peer", "name", "xts")
	if got, want := h.applied("net/setup_tailscale_router.sh"), "tailscale set --advertise-routes=192.168.1.0/24,10.77.0.0/16,fd77:a91a:4d00::/64"; !slices.Equal(got, []string{want}) {
		t.Errorf("%q, want %s", got, want)
	}
	// A peer that has the route does not make ours approved.
	if r := h.script("net/setup_tailscale_router.sh"); !strings.Contains(r.stderr, "10.77.0.0/16 is not approved") {
		t.Errorf("%+v", r)
	}
	state := h.read("/run/tailscale.json")
	h.write("/run/tailscale.json", strings.Replace(state, `"Approved":[`, `"Approved":["10.77.0.0/16","fd77:a91a:4d00::/64",`, 1))
	if r := h.script("net/setup_tailscale_router.sh"); strings.Contains(r.stderr, "not approved") {
		t.Errorf("%+v", r)
	}
	if got, want := h.applied("net/setup_tailscale_router.sh", "--remove"), "tailscale set --advertise-routes=192.168.1.0/24"; !slices.Equal(got, []string{want}) {
		t.Errorf("%q, want %s", got, want)
	}
	h.write("/etc/agentlab/config.yaml", "host_network: {tailscale: \"\"}\n")
	refused("host_network.tailscale of config.yaml is empty")
}

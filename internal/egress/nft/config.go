package nft

import (
	"net"
	"net/netip"
	"regexp"
	"slices"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
)

// tableName is the name of each of our tables. Whatever bears it is ours.
const tableName = "agentlab"

// Config is the network of a host as its sandboxes see it. Bridge, Subnet4 and
// Gateway4 are required.
type Config struct {
	Bridge   string // the bridge that only sandboxes are on, e.g. "vmbr1"
	Subnet4  netip.Prefix
	Gateway4 netip.Addr   // the host's address on the bridge, in Subnet4
	Subnet6  netip.Prefix // zero: sandboxes have no IPv6
	Gateway6 netip.Addr
	// Uplink is the interface that the internet is behind; "" means any but
	// Bridge and Tailscale.
	Uplink string
	// Tailscale is the interface whose hosts may open connections to
	// sandboxes, and which sandboxes may open none to; "" means none.
	Tailscale  string
	GuestPorts []uint16 // TCP ports of the guest plane on the gateway
	Reserved   []uint16 // ports of the host that no policy opens
	ProxyPort  uint16   // TCP port of our proxy for flows that must name their host
	LogGroup   uint16   // NFLOG group that decisions are told to; 0: none
	// HostNets are the networks that the host is directly on. Sandboxes do
	// not reach them even where their addresses are public.
	HostNets []netip.Prefix
	// HostAddrs are the host's own IPv4 addresses, which a NAT64 could lead
	// back to it.
	HostAddrs []netip.Addr
	// Translators are NAT64 prefixes of the host's network. Sandboxes reach
	// nothing under them.
	Translators []netip.Prefix
	// DHCP answers the sandboxes that ask for it (Sandbox.DHCP) on the bridge.
	DHCP bool
	// BridgeMeta says that the kernel can tell which bridge a frame is on
	// (CONFIG_NFT_BRIDGE_META). Without it frames are told by their port.
	BridgeMeta bool
}

// Sandbox is one sandbox on the bridge.
type Sandbox struct {
	VMID       int
	MAC        net.HardwareAddr
	Port       string // the bridge port that it is behind, e.g. "tap101i0"
	IPv4, IPv6 netip.Addr
	DHCP       bool // it asks for its IPv4 address; needs Config.DHCP
	Policy     *egress.Policy
	// Told is what it was told by a process before this one: guests remember
	// answers for as long as they hold.
	Told []Told
}

// Told is an answer to a DNS question: Name (canonical) stands for Addr until
// then.
type Told struct {
	Name  string     `json:"name"`
	Addr  netip.Addr `json:"addr"`
	Until time.Time  `json:"until"`
}

// ifName is what we take as an interface name: the kernel takes more, but
// nothing that is harmless in a rule needs more.
var ifName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,14}$`)

// Validate checks every value. The error is agentlab.CodeInvalid and names
// the key of the configuration.
func (c Config) Validate() error {
	bad := func(field, format string, args ...any) *agentlab.Error {
		return agentlab.Errorf(agentlab.CodeInvalid, format, args...).WithField("host_network." + field)
	}
	for _, n := range []struct {
		field, name string
		required    bool
	}{{"bridge", c.Bridge, true}, {"uplink", c.Uplink, false}, {"tailscale", c.Tailscale, false}} {
		if (n.required || n.name != "") && !ifName.MatchString(n.name) {
			return bad(n.field, "%q is not the name of a network interface", n.name)
		}
	}
	if c.Uplink == c.Bridge || c.Tailscale == c.Bridge || c.Uplink != "" && c.Uplink == c.Tailscale {
		return bad("bridge", "bridge, uplink and tailscale must be three different interfaces")
	}
	if !c.Subnet4.IsValid() || !c.Subnet4.Addr().Is4() || c.Subnet4.Masked() != c.Subnet4 || c.Subnet4.Bits() > 30 {
		return bad("subnet", "%s is not an IPv4 network of at least four addresses", c.Subnet4)
	}
	if !c.Subnet4.Contains(c.Gateway4) {
		return bad("gateway", "%s is not in %s", c.Gateway4, c.Subnet4)
	}
	if c.Subnet6.IsValid() {
		if !c.Subnet6.Addr().Is6() || c.Subnet6.Masked() != c.Subnet6 || c.Subnet6.Bits() > 64 {
			return bad("subnet6", "%s is not an IPv6 network of 64 bits or fewer", c.Subnet6)
		}
		if !c.Subnet6.Contains(c.Gateway6) {
			return bad("gateway6", "%s is not in %s", c.Gateway6, c.Subnet6)
		}
	}
	for _, p := range c.GuestPorts {
		if p == 0 || p == egress.DNSPort || p == c.ProxyPort {
			return bad("guest_ports", "port %d is taken or no port", p)
		}
	}
	if c.ProxyPort == 0 || c.ProxyPort == egress.DNSPort {
		return bad("proxy_port", "%d is taken or no port", c.ProxyPort)
	}
	return nil
}

// Validate checks a sandbox against the network and against its neighbours,
// so that no two can be taken for each other.
func (s Sandbox) Validate(c Config, others []Sandbox) error {
	bad := func(field, format string, args ...any) *agentlab.Error {
		return agentlab.Errorf(agentlab.CodeInvalid, "sandbox %d: "+format, append([]any{s.VMID}, args...)...).WithField(field)
	}
	if len(s.MAC) != 6 || s.MAC[0]&1 != 0 || slices.Equal(s.MAC, make([]byte, 6)) {
		return bad("MAC", "%q is not the address of one Ethernet interface", s.MAC)
	}
	if !ifName.MatchString(s.Port) {
		return bad("Port", "%q is not the name of a network interface; without its port nobody knows a sandbox from another", s.Port)
	}
	if !s.IPv4.Is4() || !c.Subnet4.Contains(s.IPv4) || s.IPv4 == c.Gateway4 {
		return bad("IPv4", "%s is not an address for a sandbox of %s", s.IPv4, c.Subnet4)
	}
	if s.IPv6.IsValid() && (!c.Subnet6.IsValid() || !c.Subnet6.Contains(s.IPv6) || s.IPv6 == c.Gateway6 || s.IPv6.Zone() != "") {
		return bad("IPv6", "%s is not an address for a sandbox of %s", s.IPv6, c.Subnet6)
	}
	if s.Policy == nil {
		return bad("Policy", "missing")
	}
	if s.DHCP && !c.DHCP {
		return bad("DHCP", "nobody answers DHCP on %s", c.Bridge)
	}
	for _, o := range others {
		if o.VMID == s.VMID {
			continue
		}
		if slices.Equal(o.MAC, s.MAC) || o.IPv4 == s.IPv4 || s.IPv6.IsValid() && o.IPv6 == s.IPv6 || o.Port == s.Port {
			return bad("MAC", "sandbox %d has the same address or port", o.VMID).
				WithHint("every sandbox needs a MAC, an IPv4, an IPv6 address and a port of its own")
		}
	}
	return nil
}

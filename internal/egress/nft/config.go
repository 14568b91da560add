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

// tableName is the name of each of AgentLab's tables. Every table with this
// name belongs to AgentLab.
const tableName = "agentlab"

// Config is the network configuration of a host for its sandboxes. Bridge,
// Subnet4 and Gateway4 are required.
type Config struct {
	Bridge   string // a bridge with only sandboxes, e.g. "vmbr1"
	Subnet4  netip.Prefix
	Gateway4 netip.Addr   // the host's address on the bridge, in Subnet4
	Subnet6  netip.Prefix // zero means that sandboxes have no IPv6
	Gateway6 netip.Addr
	// Uplink is the interface to the internet; "" means any interface
	// except Bridge and Tailscale.
	Uplink string
	// Tailscale is an interface whose hosts may open connections to
	// sandboxes, but not the reverse; "" means none.
	Tailscale  string
	GuestPorts []uint16 // TCP ports of the guest plane on the gateway
	Reserved   []uint16 // ports of the host that no policy can allow
	ProxyPort  uint16   // TCP port of AgentLab's proxy for flows that need a host name
	LogGroup   uint16   // NFLOG group for decisions; 0 means none
	// HostNets are the networks that the host is directly connected to.
	// Sandboxes cannot reach them even if their addresses are public.
	HostNets []netip.Prefix
	// HostAddrs are the host's own IPv4 addresses, which could also be
	// reached through a NAT64.
	HostAddrs []netip.Addr
	// Translators are NAT64 prefixes of the host's network. Sandboxes
	// cannot reach addresses under them.
	Translators []netip.Prefix
	// DHCP enables the DHCP server on the bridge, for sandboxes with
	// Sandbox.DHCP.
	DHCP bool
	// BridgeMeta means that the kernel can match the bridge of a frame
	// (CONFIG_NFT_BRIDGE_META). Without it frames are matched by their
	// port.
	BridgeMeta bool
}

// Sandbox is one sandbox on the bridge.
type Sandbox struct {
	VMID       int
	MAC        net.HardwareAddr
	Port       string // its bridge port, e.g. "tap101i0"
	IPv4, IPv6 netip.Addr
	DHCP       bool // it requests its IPv4 address by DHCP; needs Config.DHCP
	Policy     *egress.Policy
	// Answers lists DNS answers of an earlier process: guests use answers as
	// long as they are valid.
	Answers []Answer
}

// Answer is a DNS answer: the canonical Name resolves to Addr until Until.
type Answer struct {
	Name  string     `json:"name"`
	Addr  netip.Addr `json:"addr"`
	Until time.Time  `json:"until"`
}

// ifName matches valid interface names. The kernel allows more characters, but
// those could be harmful in a rule.
var ifName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,14}$`)

// Validate checks every value. The error has agentlab.CodeInvalid and the key
// of the configuration.
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
			return bad("guest_ports", "port %d is in use or out of range", p)
		}
	}
	if c.ProxyPort == 0 || c.ProxyPort == egress.DNSPort {
		return bad("proxy_port", "%d is in use or out of range", c.ProxyPort)
	}
	return nil
}

// Validate checks a sandbox against the network and against the other
// sandboxes, so that no two can be confused.
func (s Sandbox) Validate(c Config, others []Sandbox) error {
	bad := func(field, format string, args ...any) *agentlab.Error {
		return agentlab.Errorf(agentlab.CodeInvalid, "sandbox %d: "+format, append([]any{s.VMID}, args...)...).WithField(field)
	}
	if len(s.MAC) != 6 || s.MAC[0]&1 != 0 || slices.Equal(s.MAC, make([]byte, 6)) {
		return bad("MAC", "%q is not the address of one Ethernet interface", s.MAC)
	}
	if !ifName.MatchString(s.Port) {
		return bad("Port", "%q is not the name of a network interface; sandboxes are identified by their ports", s.Port)
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
		return bad("DHCP", "no DHCP server is configured on %s", c.Bridge)
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

package config

import (
	"net/netip"

	"github.com/agentlab-vm/agentlab"
)

// HostNetwork is the bridge that sandboxes are connected to. Backends that
// give each sandbox a private network do not use it.
type HostNetwork struct {
	Bridge     string `yaml:"bridge" doctor:"show" doc:"Bridge of the sandboxes, without other ports; 'agentlab host network apply' creates it if it is missing."`
	Subnet     string `yaml:"subnet" doctor:"show" doc:"IPv4 network of the sandboxes; its first address is the address of the host."`
	Subnet6    string `yaml:"subnet6" doctor:"show" doc:"IPv6 network of the sandboxes: unique local addresses (fc00::/7), 64 bits; its first address is the address of the host. Empty means no IPv6."`
	Uplink     string `yaml:"uplink" doctor:"show" doc:"Interface of the host that leads to the internet, for example vmbr0; empty means any except the bridge and the tailscale interface."`
	Tailscale  string `yaml:"tailscale" doctor:"show" doc:"Interface of Tailscale: hosts behind it may open connections to sandboxes, but sandboxes may not open connections to them. Empty means that no host may."`
	GuestPorts []int  `yaml:"guest_ports" doc:"TCP ports of the controller that sandboxes may reach on the bridge."`
	ProxyPort  int    `yaml:"proxy_port" doc:"TCP port on the bridge, 1 to 65535, that receives connections whose host name must be checked; sandboxes cannot connect to it directly."`
	LogGroup   int    `yaml:"log_group" doc:"NFLOG group of the kernel's decisions, 1 to 65535; 0 means that they are not recorded."`
}

var defaultHostNetwork = HostNetwork{
	Bridge: "vmbr1", Subnet: "10.77.0.0/16", Subnet6: "fd77:a91a:4d00::/64", Tailscale: "tailscale0",
	GuestPorts: []int{8844, 8846}, ProxyPort: 8847, LogGroup: 8847,
}

// Prefixes returns the networks; the second is zero without IPv6.
func (h HostNetwork) Prefixes() (v4, v6 netip.Prefix, err error) {
	bad := func(key, value, why string) error {
		return agentlab.Errorf(agentlab.CodeInvalid, "%q is not %s", value, why).WithField("host_network." + key)
	}
	v4, err = netip.ParsePrefix(h.Subnet)
	if err != nil || !v4.Addr().Is4() || v4 != v4.Masked() || v4.Bits() < 8 || v4.Bits() > 30 || !v4.Addr().IsPrivate() {
		return v4, v6, bad("subnet", h.Subnet, "a private IPv4 network, such as 10.77.0.0/16")
	}
	if h.Subnet6 == "" {
		return v4, v6, nil
	}
	v6, err = netip.ParsePrefix(h.Subnet6)
	if err != nil || !v6.Addr().Is6() || v6 != v6.Masked() || v6.Bits() != 64 || !v6.Addr().IsPrivate() {
		return v4, v6, bad("subnet6", h.Subnet6, "a network of unique local IPv6 addresses and 64 bits, such as fd77:a91a:4d00::/64")
	}
	return v4, v6, nil
}

// Gateways returns the host's addresses on the bridge, which are the first
// addresses of its networks; the second is zero without IPv6.
func (h HostNetwork) Gateways() (v4, v6 netip.Addr, err error) {
	n4, n6, err := h.Prefixes()
	if err == nil {
		v4 = n4.Addr().Next()
	}
	if err == nil && n6.IsValid() {
		v6 = n6.Addr().Next()
	}
	return v4, v6, err
}

// GuestsUseDHCP reports whether guests on the bridge get their addresses by DHCP,
// as a backend's section says.
func (c Config) GuestsUseDHCP() bool {
	for _, in := range c.instances {
		if d, ok := in.Section.(interface{ GuestsUseDHCP() bool }); ok && d.GuestsUseDHCP() {
			return true
		}
	}
	return false
}

// validate checks all but the names of interfaces, which package nft checks.
func (h HostNetwork) validate() error {
	if _, _, err := h.Prefixes(); err != nil {
		return err
	}
	port := func(key string, n, lo int) error {
		if n < lo || n > 65535 {
			return agentlab.Errorf(agentlab.CodeInvalid, "%d is not between %d and 65535", n, lo).WithField("host_network." + key)
		}
		return nil
	}
	for _, p := range h.GuestPorts {
		if err := port("guest_ports", p, 1); err != nil {
			return err
		}
	}
	if err := port("proxy_port", h.ProxyPort, 1); err != nil {
		return err
	}
	return port("log_group", h.LogGroup, 0)
}

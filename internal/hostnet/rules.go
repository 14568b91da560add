package hostnet

import (
	"log/slog"

	"github.com/agentlab-vm/agentlab/internal/config"
	"github.com/agentlab-vm/agentlab/internal/egress/nft"
)

// ForHost returns the network of this machine as config.yaml describes it.
func ForHost(c config.Config, p config.Paths, log *slog.Logger) *Local {
	return New(Config{Network: func() (nft.Config, error) { return Rules(c) }, Dir: p.Network(), Logger: log})
}

// Rules returns the configuration that the rules of the bridge are rendered
// from.
func Rules(c config.Config) (nft.Config, error) {
	h := c.HostNetwork
	v4, v6, err := h.Prefixes()
	if err != nil {
		return nft.Config{}, err
	}
	gw4, gw6, err := h.Gateways()
	if err != nil {
		return nft.Config{}, err
	}
	out := nft.Config{
		Bridge: h.Bridge, Subnet4: v4, Gateway4: gw4, Subnet6: v6, Gateway6: gw6, Uplink: h.Uplink, Tailscale: h.Tailscale,
		ProxyPort: uint16(h.ProxyPort), LogGroup: uint16(h.LogGroup),
		Reserved: append(c.APIPorts(), uint16(h.ProxyPort)),
		DHCP:     c.GuestsUseDHCP(),
	}
	for _, p := range h.GuestPorts {
		out.GuestPorts = append(out.GuestPorts, uint16(p))
	}
	return out, out.Validate()
}

//go:build !linux

package gate

import (
	"context"
	"net"
	"net/netip"

	"github.com/agentlab-vm/agentlab/internal/hostos"
)

// dialICMP returns an error: pings are sent on Linux only.
func (h *HostDialer) dialICMP(context.Context, netip.Addr) (net.Conn, error) {
	return nil, hostos.Unsupported("pings cannot be sent")
}

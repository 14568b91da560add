//go:build !linux

package nft

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"syscall"

	"github.com/agentlab-vm/agentlab/internal/egress/gate"
	"github.com/agentlab-vm/agentlab/internal/hostos"
)

// A bridge host runs Linux. On other systems nothing is read or changed, and everything
// that needs the kernel's network is an error.

func errNoBridge() error { return hostos.Unsupported("sandboxes cannot be on a bridge") }

func bridgePorts(string) ([]string, error)                       { return nil, errNoBridge() }
func bridgeIndex(string) int                                     { return 0 }
func pinNeighbours(string, Sandbox) error                        { return errNoBridge() }
func unpinNeighbours(string, Sandbox) error                      { return errNoBridge() }
func prepare(Config, *slog.Logger) error                         { return errNoBridge() }
func fixAddress(string, *slog.Logger) error                      { return errNoBridge() }
func downBridge(string) error                                    { return errNoBridge() }
func removeBridge(string) error                                  { return errNoBridge() }
func cutFlows(Sandbox) error                                     { return errNoBridge() }
func originalDst(net.Conn) (netip.AddrPort, error)               { return netip.AddrPort{}, errNoBridge() }
func (kernel) tables() ([]string, error)                         { return nil, errNoBridge() }
func (kernel) inScratch(context.Context, string) (string, error) { return "", errNoBridge() }
func (m *Manager) auditLog(context.Context) error                { return errNoBridge() }
func (m *Manager) watch(context.Context, int) error              { return errNoBridge() }

// BridgeUp returns an error.
func (m *Manager) BridgeUp() error { return errNoBridge() }

// onBridge returns a configuration with which no socket is opened.
func (m *Manager) onBridge() net.ListenConfig {
	return net.ListenConfig{Control: func(string, string, syscall.RawConn) error { return errNoBridge() }}
}

// lanDialer makes no connection.
type lanDialer struct {
	*gate.HostDialer
	config Config
	nets   func() ([]netip.Prefix, error)
}

// DialContext implements gate.Dialer.
func (lanDialer) DialContext(context.Context, string, string) (net.Conn, error) {
	return nil, errNoBridge()
}

// DialPrivate implements gate.PrivateDialer.
func (lanDialer) DialPrivate(context.Context, netip.AddrPort) (net.Conn, error) {
	return nil, errNoBridge()
}

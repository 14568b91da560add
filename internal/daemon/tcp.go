package daemon

import (
	"context"
	"errors"
	"net"
	"net/netip"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/config"
	"github.com/agentlab-vm/agentlab/internal/server"
)

// openTCP opens the listener for callers with a token, if one is configured.
// It checks the certificate before any client connects.
func (d *Daemon) openTCP(ctx context.Context, a config.API) (err error) {
	if a.Listen == "" {
		return nil
	}
	if a.TLSCert != "" {
		d.tcp, err = server.LoadCertificate(a.TLSCert, a.TLSKey, d.cfg.Clock, func(err error) {
			d.log.Warn("the certificate of the control API could not be read again; the old one is used", "err", err)
		})
		if err != nil {
			return err
		}
	}
	d.tcpListener, err = d.listenTCP(ctx, "api.listen", a.Listen)
	return err
}

// listenTCP listens on the configured ADDRESS:PORT of a key until Close.
func (d *Daemon) listenTCP(ctx context.Context, key, configured string) (net.Listener, error) {
	var lc net.ListenConfig
	network, addr := listenOn(configured)
	l, err := lc.Listen(ctx, network, addr)
	if err != nil {
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "cannot listen on %s: %w", configured, err).WithField(key).
			WithHint("choose another port, or an address of this machine")
	}
	d.undo.add(closeOnce(l))
	return l, nil
}

// closeOnce returns a function that closes a listener if its server has not closed it.
func closeOnce(l net.Listener) func() error {
	return func() error {
		if err := l.Close(); !errors.Is(err, net.ErrClosed) {
			return err
		}
		return nil
	}
}

// listenOn returns the network and address to listen on for the configured
// ADDRESS:PORT. With the network "tcp", 0.0.0.0 would also mean all IPv6
// addresses.
func listenOn(configured string) (network, addr string) {
	a, err := netip.ParseAddrPort(configured)
	if err != nil || !a.Addr().Unmap().Is4() {
		return "tcp", configured
	}
	return "tcp4", netip.AddrPortFrom(a.Addr().Unmap(), a.Port()).String()
}

// TCPAddr returns the address of the TCP listener, nil if there is none.
func (d *Daemon) TCPAddr() net.Addr {
	if d.tcpListener == nil {
		return nil
	}
	return d.tcpListener.Addr()
}

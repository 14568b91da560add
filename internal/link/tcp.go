package link

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"math/big"
	"net"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/connlimit"
)

// Guest control over TCP, for guests with an address and without a
// virtio-serial port: TLS 1.3 with self-signed certificates of both sides. The
// guest accepts only connections with the key in its seed and rejects all
// others in the handshake. The controller accepts any key of the guest: it
// identifies the guest by its address, which the host binds to the guest's
// port. After the handshake the guest writes one byte, accepted.

// ControlPort is the TCP port of guest control in guests that have an address.
const ControlPort = 8845

const (
	controlProtocol = "agentlab-control/1" // ALPN
	accepted        = 0x01

	handshakeLimit = 20 * time.Second // an emulated guest on a busy host is slow
	maxHandshakes  = 32               // at the same time; further ones wait in the kernel
)

// DialTLS authenticates to the guest at the other end of raw with key, and
// returns the stream to its control server. It owns raw, and closes it after
// an error. Codes: denied if the guest rejects the key; unavailable for
// everything else, including the end of ctx.
func DialTLS(ctx context.Context, raw net.Conn, key ed25519.PrivateKey) (net.Conn, error) {
	cert, err := certificate(key)
	if err != nil {
		_ = raw.Close()
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, handshakeLimit)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { _ = raw.Close() })
	c := tls.Client(raw, &tls.Config{
		MinVersion: tls.VersionTLS13, NextProtos: []string{controlProtocol},
		Certificates:       []tls.Certificate{cert},
		InsecureSkipVerify: true, //nolint:gosec // the channel identifies the guest, see above
	})
	var first [1]byte
	if err = c.HandshakeContext(ctx); err == nil {
		_, err = c.Read(first[:])
	}
	if !stop() {
		err = context.Cause(ctx)
	}
	if err == nil && first[0] == accepted && c.ConnectionState().NegotiatedProtocol == controlProtocol {
		return opaqueConn{c}, nil
	}
	_ = raw.Close()
	return nil, dialError(err)
}

func dialError(err error) error {
	if refused(err) {
		return agentlab.Errorf(agentlab.CodeDenied, "the guest does not accept this controller's key").
			WithHint("the key in its seed is different: another installation created it, or the master key was replaced")
	}
	if err == nil {
		err = errors.New("it uses another protocol")
	}
	return agentlab.Errorf(agentlab.CodeUnavailable, "guest control does not answer: %w", err)
}

// refused reports whether err is the alert that ListenTLS sends. crypto/tls
// has no type for alerts of the peer, only their text.
func refused(err error) bool {
	op, ok := errors.AsType[*net.OpError](err)
	return ok && op.Op == "remote error" && op.Err.Error() == "tls: bad certificate"
}

// ListenTLS returns a listener for connections to l whose peer has the private
// key of controller. It owns l; key is the guest's own. Handshakes run in
// parallel and do not block each other.
func ListenTLS(l net.Listener, controller ed25519.PublicKey, key ed25519.PrivateKey) (net.Listener, error) {
	cert, err := certificate(key)
	if err != nil {
		return nil, err
	}
	if len(controller) != ed25519.PublicKeySize {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "the controller's key has %d bytes, not %d", len(controller), ed25519.PublicKeySize).WithField("host_key")
	}
	s := &tlsListener{
		Listener: l, conns: make(chan net.Conn), slots: make(chan struct{}, maxHandshakes),
		config: &tls.Config{
			MinVersion: tls.VersionTLS13, NextProtos: []string{controlProtocol}, Certificates: []tls.Certificate{cert},
			ClientAuth: tls.RequireAnyClientCert, SessionTicketsDisabled: true,
			VerifyConnection: func(st tls.ConnectionState) error { return verify(st, controller) },
		},
	}
	s.ctx, s.cancel = context.WithCancelCause(context.Background())
	s.wg.Go(s.acceptLoop)
	return s, nil
}

// verify requires the controller's key; crypto/tls checks that the peer has
// its private half.
func verify(st tls.ConnectionState, controller ed25519.PublicKey) error {
	if len(st.PeerCertificates) == 0 {
		return errors.New("no certificate")
	}
	if pub, ok := st.PeerCertificates[0].PublicKey.(ed25519.PublicKey); !ok || !pub.Equal(controller) {
		return errors.New("not the controller")
	}
	return nil
}

type tlsListener struct {
	net.Listener
	config *tls.Config
	conns  chan net.Conn
	slots  chan struct{}
	ctx    context.Context // done when the listener has ended, with the error of Accept as cause
	cancel context.CancelCauseFunc
	wg     sync.WaitGroup
}

// Accept implements net.Listener.
func (s *tlsListener) Accept() (net.Conn, error) {
	select {
	case c := <-s.conns:
		return c, nil
	case <-s.ctx.Done():
		return nil, context.Cause(s.ctx)
	}
}

// Close implements net.Listener; accepted connections stay open.
func (s *tlsListener) Close() error {
	s.cancel(net.ErrClosed)
	err := s.Listener.Close()
	s.wg.Wait()
	return err
}

func (s *tlsListener) acceptLoop() {
	for {
		select {
		case s.slots <- struct{}{}:
		case <-s.ctx.Done():
			return
		}
		raw, err := s.Listener.Accept()
		if err != nil {
			<-s.slots
			if connlimit.Temporary(err) {
				select {
				case <-time.After(100 * time.Millisecond):
					continue
				case <-s.ctx.Done():
				}
			}
			s.cancel(err)
			return
		}
		s.wg.Go(func() { s.handshake(raw) })
	}
}

func (s *tlsListener) handshake(raw net.Conn) {
	ctx, cancel := context.WithTimeout(s.ctx, handshakeLimit)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { _ = raw.Close() })
	c := tls.Server(raw, s.config)
	err := c.HandshakeContext(ctx)
	if err == nil {
		_, err = c.Write([]byte{accepted})
	}
	<-s.slots
	if err != nil || !stop() {
		stop()
		_ = raw.Close()
		return
	}
	select {
	case s.conns <- opaqueConn{c}:
	case <-s.ctx.Done():
		_ = raw.Close()
	}
}

// opaqueConn hides that a stream is TLS: otherwise net/http would select its server
// by the negotiated protocol, which it does not support.
type opaqueConn struct{ *tls.Conn }

// certificate returns a self-signed certificate for key. Its names and dates
// have no meaning, because guests' clocks may be wrong.
func certificate(key ed25519.PrivateKey) (tls.Certificate, error) {
	if len(key) != ed25519.PrivateKeySize {
		return tls.Certificate{}, agentlab.Errorf(agentlab.CodeInternal, "a key of guest control has %d bytes", len(key))
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Unix(0, 0), NotAfter: time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC),
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return tls.Certificate{}, agentlab.Errorf(agentlab.CodeInternal, "the certificate of guest control: %w", err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
}

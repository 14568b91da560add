package vnet_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/egress/vnet"
)

func TestTCPCarriesBothWaysAndHalfCloses(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	echo := at(l.net.Host("echo.test"), 7)
	c := l.guest.mustTCP(t, echo)
	payload := make([]byte, 8<<20)
	_, _ = rand.Read(payload)
	go func() {
		_, _ = c.Write(payload)
		_ = c.CloseWrite() // the echo ends its side only when it sees this
	}()
	got, err := io.ReadAll(c)
	if err != nil || sha256.Sum256(got) != sha256.Sum256(payload) {
		t.Errorf("%d bytes came back of %d, %v", len(got), len(payload), err)
	}
	d := l.audit.wait(t, "the flow", func(d decision) bool { return d.Addr == echo })
	if !d.Allow || d.Rule != egress.RuleNAT || d.Proto != egress.TCP || d.Error != "" || d.Time.IsZero() {
		t.Errorf("recorded as %+v", d)
	}
	eventually(t, "the flow is let go", func() bool { return l.Stats().TCPFlows == 0 })
}

func TestHalfCloseFromOutside(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	got := make(chan string, 1)
	addr := l.net.HandleTCP("first.test", 1, func(c net.Conn) {
		_, _ = io.WriteString(c, "bye")
		_ = c.(interface{ CloseWrite() error }).CloseWrite()
		rest, _ := io.ReadAll(c)
		got <- string(rest)
	})
	c := l.guest.mustTCP(t, addr)
	if greeting, err := io.ReadAll(c); string(greeting) != "bye" || err != nil {
		t.Errorf("the guest reads %q, %v", greeting, err)
	}
	if _, err := io.WriteString(c, "still here"); err != nil {
		t.Fatal(err)
	}
	if err := c.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if rest := <-got; rest != "still here" {
		t.Errorf("outside reads %q", rest)
	}
}

func TestResetsPassBothWays(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	ended := make(chan error, 1)
	addr := l.net.HandleTCP("reset.test", 1, func(c net.Conn) {
		_, err := io.ReadAll(c)
		ended <- err
	})
	c := l.guest.mustTCP(t, addr)
	c2 := l.guest.mustTCP(t, l.net.HandleTCP("reset.test", 2, func(c net.Conn) {
		var b [1]byte
		_, _ = c.Read(b[:]) // leaves one byte unread, so that closing resets
	}))
	if _, err := c2.Write([]byte("ab")); err != nil {
		t.Fatal(err)
	}
	if _, err := c2.Read(make([]byte, 1)); err == nil || errors.Is(err, io.EOF) {
		t.Errorf("after a reset outside the guest reads %v", err)
	}
	abort(t, l, c, addr)
	<-ended
	eventually(t, "both flows are let go", func() bool { return l.Stats().TCPFlows == 0 })
}

// abort resets a connection of the guest.
func abort(t *testing.T, l *lab, c *gonet.TCPConn, addr netip.AddrPort) {
	t.Helper()
	for _, ep := range l.guest.RegisteredEndpoints() {
		e, ok := ep.(tcpip.Endpoint)
		if !ok {
			continue
		}
		if remote, err := e.GetRemoteAddress(); err == nil && remote.Port == addr.Port() && remote.Addr.As4() == addr.Addr().As4() {
			e.Abort()
		}
	}
	_ = c.Close()
}

func TestConnectionRefusedIsImmediate(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	closed := at(l.net.Host("echo.test"), 81)
	_, err := l.guest.tcp(t.Context(), closed)
	if err == nil || !strings.Contains(err.Error(), "refused") {
		t.Errorf("connect to a closed port: %v", err)
	}
	d := l.audit.wait(t, "the flow", func(d decision) bool { return d.Addr == closed })
	if !d.Allow || !strings.Contains(d.Error, syscall.ECONNREFUSED.Error()) {
		t.Errorf("recorded as %+v", d)
	}
}

func TestNothingIsAcceptedBeforeItIsDialled(t *testing.T) {
	t.Parallel()
	hang := dialerFunc(func(ctx context.Context, _, _ string) (net.Conn, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	})
	l := newLab(t, func(c *vnet.Config) {
		c.Dialer = hang
		c.Limits.DialTimeout = 100 * time.Millisecond
	})
	_, err := l.guest.tcp(t.Context(), netip.MustParseAddrPort("192.31.196.9:80"))
	if err == nil || !strings.Contains(err.Error(), "refused") {
		t.Errorf("connect to a host that does not answer: %v", err)
	}
	eventually(t, "the flow is let go", func() bool { return l.Stats().TCPFlows == 0 })
}

type dialerFunc func(ctx context.Context, network, addr string) (net.Conn, error)

func (f dialerFunc) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	return f(ctx, network, addr)
}

func TestDialerDecidesLast(t *testing.T) {
	t.Parallel()
	l := newLab(t, func(c *vnet.Config) {
		c.Dialer = dialerFunc(func(_ context.Context, network, addr string) (net.Conn, error) {
			a := netip.MustParseAddrPort(addr).Addr()
			return nil, &net.OpError{Op: "dial", Net: network, Err: &egress.DeniedError{Addr: a, Rule: egress.RuleHostAddr}}
		})
	})
	target := netip.MustParseAddrPort("192.31.196.9:80")
	if _, err := l.guest.tcp(t.Context(), target); err == nil {
		t.Error("it was connected")
	}
	d := l.audit.wait(t, "the flow", func(d decision) bool { return d.Addr == target })
	if d.Allow || d.Rule != egress.RuleHostAddr {
		t.Errorf("recorded as %+v", d)
	}
}

func TestManyFlowsAtOnce(t *testing.T) {
	t.Parallel()
	const flows, size = 200, 64 << 10
	l := newLab(t)
	echo := at(l.net.Host("echo.test"), 7)
	payload := bytes.Repeat([]byte("x"), size)
	var wg sync.WaitGroup
	for i := range flows {
		wg.Go(func() {
			c, err := l.guest.tcp(t.Context(), echo)
			if err != nil {
				t.Errorf("flow %d: %v", i, err)
				return
			}
			defer func() { _ = c.Close() }()
			_ = c.SetDeadline(time.Now().Add(patience))
			go func() {
				_, _ = c.Write(payload)
				_ = c.CloseWrite()
			}()
			if got, err := io.ReadAll(c); err != nil || len(got) != size {
				t.Errorf("flow %d: %d bytes, %v", i, len(got), err)
			}
		})
	}
	wg.Wait()
	eventually(t, "all flows are let go", func() bool { return l.Stats().TCPFlows == 0 })
}

func TestFlowLimitRefusesAndRecovers(t *testing.T) {
	t.Parallel()
	l := newLab(t, func(c *vnet.Config) { c.Limits.TCPFlows = 3 })
	echo := at(l.net.Host("echo.test"), 7)
	var held []*gonet.TCPConn
	for range 3 {
		held = append(held, l.guest.mustTCP(t, echo))
	}
	if _, err := l.guest.tcp(t.Context(), echo); err == nil {
		t.Error("a fourth flow was opened")
	}
	l.audit.wait(t, "the limit", func(d decision) bool { return !d.Allow && d.Rule == egress.RuleLimit })
	_ = held[0].Close()
	eventually(t, "a slot is free", func() bool { return l.Stats().TCPFlows == 2 })
	l.guest.mustTCP(t, echo)
}

func TestSlowGuestStallsOnlyItself(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	var sent atomic.Int64
	stuck := l.net.HandleTCP("fast.test", 1, func(c net.Conn) {
		block := make([]byte, 64<<10)
		for {
			n, err := c.Write(block)
			sent.Add(int64(n))
			if err != nil {
				return
			}
		}
	})
	c := l.guest.mustTCP(t, stuck) // and never reads
	last, still := int64(0), 0
	eventually(t, "the sender is stopped", func() bool {
		if n := sent.Load(); n == 0 || n != last {
			last, still = n, 0
		}
		still++
		return still > 25
	})
	if n := sent.Load(); n > 16<<20 {
		t.Errorf("%d bytes were written to a flow without a reader", n)
	}
	other := l.guest.mustTCP(t, at(l.net.Host("echo.test"), 7))
	if _, err := other.Write([]byte("hi")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(other, make([]byte, 2)); err != nil {
		t.Errorf("another flow: %v", err)
	}
	_ = c.Close()
}

func TestHTTPByName(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	tr := &http.Transport{DialContext: func(ctx context.Context, _, addr string) (net.Conn, error) {
		host, port, _ := net.SplitHostPort(addr)
		reply := l.ask(t, host+".", 1)
		a, _ := netip.AddrFromSlice(answerA(t, reply))
		return l.guest.tcp(ctx, netip.MustParseAddrPort(net.JoinHostPort(a.String(), port)))
	}}
	t.Cleanup(tr.CloseIdleConnections)
	resp, err := (&http.Client{Transport: tr, Timeout: patience}).Get("http://www.test/hello")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	if body, err := io.ReadAll(resp.Body); string(body) != "hello from www.test\n" || err != nil {
		t.Errorf("the site says %q, %v", body, err)
	}
	d := l.audit.wait(t, "the flow", func(d decision) bool { return d.Proto == egress.TCP })
	if d.Name != "www.test" {
		t.Errorf("the flow was recorded without its name: %+v", d)
	}
}

func TestUDP(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	c := l.guest.udp(t, at(l.net.Host("echo.test"), 7))
	buf := make([]byte, 1<<16)
	for _, size := range []int{1, 1400, 8900, 30000} {
		want := make([]byte, size)
		_, _ = rand.Read(want)
		if _, err := c.Write(want); err != nil {
			t.Fatal(err)
		}
		if n, err := c.Read(buf); err != nil || !bytes.Equal(buf[:n], want) {
			t.Errorf("a datagram of %d bytes came back as %d, %v", size, n, err)
		}
	}
	if n := l.Stats().UDPFlows; n != 1 {
		t.Errorf("%d flows for one pair of addresses", n)
	}
}

func TestUDPFlowsEndWhenIdle(t *testing.T) {
	t.Parallel()
	l := newLab(t, func(c *vnet.Config) { c.Limits.UDPIdle = 50 * time.Millisecond })
	c := l.guest.udp(t, at(l.net.Host("echo.test"), 7))
	for range 2 { // the second time it is a new flow
		eventually(t, "an answer comes", func() bool { // on a busy machine a flow can end before
			if _, err := c.Write([]byte("x")); err != nil {
				t.Fatal(err)
			}
			_ = c.SetReadDeadline(time.Now().Add(time.Second))
			_, err := c.Read(make([]byte, 1))
			return err == nil
		})
		eventually(t, "the flow is let go", func() bool { return l.Stats().UDPFlows == 0 })
	}
}

func TestUDPFlowLimit(t *testing.T) {
	t.Parallel()
	l := newLab(t, func(c *vnet.Config) { c.Limits.UDPFlows = 4 })
	host := l.net.Host("echo.test")
	for port := range uint16(100) {
		l.guest.send(t, udpFrame(at(host, 1000+port), []byte("x")))
	}
	l.audit.wait(t, "the limit", func(d decision) bool { return d.Proto == egress.UDP && d.Rule == egress.RuleLimit })
	if n := l.Stats().UDPFlows; n > 4 {
		t.Errorf("%d flows", n)
	}
}

func TestServicesOnTheGateway(t *testing.T) {
	t.Parallel()
	l := newLab(t, func(c *vnet.Config) {
		c.Policy = policy(t, agentlab.NetworkOff) // the controller is there in every mode
		c.Services = map[uint16]func(net.Conn){
			8844: func(c net.Conn) { _, _ = fmt.Fprintf(c, "hello %s", c.RemoteAddr()) },
			8846: func(c net.Conn) {
				n, _ := io.Copy(io.Discard, c)
				_ = binary.Write(c, binary.BigEndian, n)
			},
		}
	})
	c := l.guest.mustTCP(t, gateway(8844))
	if text, err := io.ReadAll(c); err != nil || !strings.HasPrefix(string(text), "hello "+vnet.DefaultGuest.String()+":") {
		t.Errorf("the controller says %q, %v", text, err)
	}
	_ = c.Close()
	up := l.guest.mustTCP(t, gateway(8846))
	if _, err := up.Write(make([]byte, 3<<20)); err != nil {
		t.Fatal(err)
	}
	_ = up.CloseWrite()
	var n int64
	if err := binary.Read(up, binary.BigEndian, &n); err != nil || n != 3<<20 {
		t.Errorf("%d bytes arrived, %v", n, err)
	}
	_ = up.Close()
	eventually(t, "the services are let go", func() bool { return l.Stats().ServiceFlows == 0 })
}

func TestDialGuest(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	listener, err := gonet.ListenTCP(l.guest.Stack, tcpip.FullAddress{NIC: 1, Port: 22}, ipv4.ProtocolNumber)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	go func() {
		c, err := listener.Accept()
		if err == nil {
			_, _ = fmt.Fprintf(c, "you are %s", strings.Split(c.RemoteAddr().String(), ":")[0])
			_ = c.Close()
		}
	}()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c, err := l.DialGuest(ctx, 22)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	if text, err := io.ReadAll(c); string(text) != "you are 10.77.0.1" || err != nil {
		t.Errorf("the guest says %q, %v", text, err)
	}
	if _, err := l.DialGuest(ctx, 23); agentlab.CodeOf(err) != agentlab.CodeUnavailable {
		t.Errorf("a closed port: %v", err)
	}
	l.Close()
	if _, err := l.DialGuest(ctx, 22); agentlab.CodeOf(err) != agentlab.CodeUnavailable {
		t.Errorf("after the end: %v", err)
	}
}

func TestDialGuestThatIsNotThere(t *testing.T) {
	t.Parallel()
	ours, _ := linkPair(t)
	n, err := vnet.New(vnet.Config{Link: ours, Policy: policy(t, agentlab.NetworkNAT)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.Close)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := n.DialGuest(ctx, 22); agentlab.CodeOf(err) != agentlab.CodeUnavailable || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("no guest: %v", err)
	}
}

func TestCloseBreaksEverything(t *testing.T) {
	t.Parallel()
	l := newLab(t, func(c *vnet.Config) {
		c.Services = map[uint16]func(net.Conn){8844: func(c net.Conn) { _, _ = io.Copy(io.Discard, c) }}
	})
	echo := at(l.net.Host("echo.test"), 7)
	for range 5 {
		l.guest.mustTCP(t, echo)
		l.guest.mustTCP(t, gateway(8844))
		if _, err := l.guest.udp(t, echo).Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "all flows are open", func() bool { s := l.Stats(); return s.TCPFlows == 5 && s.ServiceFlows == 5 && s.UDPFlows == 5 })
	l.Close()
	if err := <-l.ended; err != nil {
		t.Errorf("Run returns %v after Close", err)
	}
	if s := l.Stats(); s.TCPFlows+s.ServiceFlows+s.UDPFlows != 0 {
		t.Errorf("left over: %+v", s)
	}
	l.Close()
}

func TestRunEndsWithItsContextAndOnce(t *testing.T) {
	t.Parallel()
	ours, _ := linkPair(t)
	n, err := vnet.New(vnet.Config{Link: ours, Policy: policy(t, agentlab.NetworkNAT)})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := n.Run(ctx); err != nil {
		t.Errorf("Run returns %v", err)
	}
	if err := n.Run(t.Context()); agentlab.CodeOf(err) != agentlab.CodeConflict {
		t.Errorf("a second Run returns %v", err)
	}
}

func TestNewChecksItsConfig(t *testing.T) {
	t.Parallel()
	ours, _ := linkPair(t)
	good := vnet.Config{Link: ours, Policy: policy(t, agentlab.NetworkNAT)}
	cases := map[string]func(*vnet.Config){
		"Link":     func(c *vnet.Config) { c.Link = nil },
		"Policy":   func(c *vnet.Config) { c.Policy = nil },
		"MTU":      func(c *vnet.Config) { c.MTU = 100 },
		"MAC":      func(c *vnet.Config) { c.MAC = net.HardwareAddr{1, 2, 3, 4, 5, 6} },
		"Guest":    func(c *vnet.Config) { c.Guest = netip.MustParseAddr("fd00::1") },
		"Services": func(c *vnet.Config) { c.Services = map[uint16]func(net.Conn){53: nil} },
	}
	for field, spoil := range cases {
		c := good
		spoil(&c)
		_, err := vnet.New(c)
		e, ok := errors.AsType[*agentlab.Error](err)
		if !ok || e.Code != agentlab.CodeInvalid || e.Field != field {
			t.Errorf("%s: %v", field, err)
		}
	}
}

package gate

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/miekg/dns"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
)

func TestEqualDecisionsBecomeOneRecord(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var got []agentlab.EgressRecord
		r := newRecorder(func(rec agentlab.EgressRecord) {
			mu.Lock()
			defer mu.Unlock()
			got = append(got, rec)
		}, time.Now, 100)
		start := time.Now()
		flow := agentlab.EgressRecord{Proto: "tcp", Addr: "192.0.2.1", Port: 1, Rule: "x"}
		for range 10 {
			r.record(flow)
			time.Sleep(10 * time.Millisecond)
		}
		other := flow
		other.Port = 2
		r.record(other)
		synctest.Wait()
		mu.Lock()
		if len(got) != 2 || got[0].Count != 1 || !got[0].Time.Equal(start) || got[1].Port != 2 {
			t.Errorf("at once: %+v", got)
		}
		got = nil
		mu.Unlock()
		time.Sleep(2 * time.Second)
		mu.Lock()
		if len(got) != 1 || got[0].Count != 9 || got[0].Last.Sub(got[0].Time) != 80*time.Millisecond {
			t.Errorf("after the window: %+v", got)
		}
		got = nil
		mu.Unlock()
		r.record(flow) // long after, it is a decision of its own again
		r.record(flow)
		r.close() // hands over what is open
		r.record(flow)
		r.close()
		if len(got) != 2 || got[0].Count != 1 || got[1].Count != 1 {
			t.Errorf("at the end: %+v", got)
		}
	})
}

// With any slow reader and any number of decisions, no caller waits, and every
// decision is counted.
func TestRecordsNeverBlockAndAllAreCounted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		total := 0
		r := newRecorder(func(rec agentlab.EgressRecord) {
			<-release
			total += rec.Count + rec.Dropped
		}, time.Now, 1000)
		const many = 20000
		for i := range many {
			r.record(agentlab.EgressRecord{Proto: "udp", Addr: fmt.Sprint(i % 5000), Rule: "x"})
		}
		r.mu.Lock()
		if len(r.open) > maxOpenRecords {
			t.Errorf("%d different decisions are held", len(r.open))
		}
		r.mu.Unlock()
		close(release)
		time.Sleep(10 * time.Second)
		r.record(agentlab.EgressRecord{Proto: "last"})
		r.close()
		if total != many+1 {
			t.Errorf("%d of %d decisions are accounted for", total, many+1)
		}
	})
}

func TestNamesAreBounded(t *testing.T) {
	t.Parallel()
	n := newNames(time.Now)
	one := netip.MustParseAddr("192.31.196.1")
	for i := range 1000 {
		n.learn(one, fmt.Sprintf("n%d.test.", i), time.Minute)
	}
	valid, _ := n.of(one)
	if len(valid) != maxNamesPerAddr || valid[0] != "n999.test." {
		t.Errorf("%d names, the first is %s", len(valid), valid[0])
	}
	for i := range 3 * maxNames {
		n.learn(netip.AddrFrom4([4]byte{11, byte(i >> 16), byte(i >> 8), byte(i)}), "a.test.", time.Minute)
	}
	if n.order.Len() != maxNames || len(n.byIP) != maxNames {
		t.Errorf("%d pairs, %d addresses", n.order.Len(), len(n.byIP))
	}
	if valid, stale := n.of(one); len(valid)+len(stale) != 0 {
		t.Errorf("the oldest are still there: %v", valid)
	}
}

func newTestGate(t *testing.T, n agentlab.Network, d Dialer) *Gate {
	t.Helper()
	p, err := egress.New(n)
	if err != nil {
		t.Fatal(err)
	}
	g, err := New(Config{Policy: p, Dialer: d})
	if err != nil {
		t.Fatal(err)
	}
	return g
}

type pipeDialer chan net.Conn

func (d pipeDialer) DialContext(context.Context, string, string) (net.Conn, error) {
	near, far := net.Pipe()
	d <- far
	return near, nil
}

// Time is virtual here, so the figures are exact.
func TestBandwidth(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := make(pipeDialer, 2)
		n := agentlab.Network{Mode: agentlab.NetworkNAT, Limits: agentlab.NetworkLimits{BandwidthMbps: 8}} // 10^6 bytes per second
		g := newTestGate(t, n, d)
		var wg sync.WaitGroup
		start := time.Now()
		const each = 5_000_000
		for range 2 { // both share the limit
			guest, ours := net.Pipe()
			wg.Go(func() { g.ServeTCP(context.Background(), ours, netip.MustParseAddrPort("192.31.196.1:80")) })
			far := <-d
			wg.Go(func() {
				_, _ = guest.Write(make([]byte, each))
				_ = guest.Close()
			})
			wg.Go(func() {
				if got, _ := io.Copy(io.Discard, far); got != each {
					t.Errorf("%d bytes came", got)
				}
				_ = far.Close()
			})
		}
		wg.Wait()
		if took := time.Since(start); took < 9500*time.Millisecond || took > 10500*time.Millisecond {
			t.Errorf("10 MB at 8 Mbit/s took %s", took)
		}
		g.Close()
	})
}

func TestLongestIdleUDPFlowIsEvicted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := agentlab.Network{Mode: agentlab.NetworkNAT, Limits: agentlab.NetworkLimits{Flows: 3}}
		g := newTestGate(t, n, make(pipeDialer))
		defer g.Close()
		var flows []*Flow
		for i := range 3 {
			f, err := g.Begin(egress.UDP, netip.AddrPortFrom(netip.MustParseAddr("192.31.196.1"), uint16(1000+i)))
			if err != nil {
				t.Fatal(err)
			}
			flows = append(flows, f)
			time.Sleep(10 * time.Millisecond)
		}
		if _, err := g.Begin(egress.UDP, netip.MustParseAddrPort("192.31.196.1:2")); !IsDenied(err) {
			t.Errorf("a flood makes flows give way: %v", err)
		}
		time.Sleep(2 * evictIdle)
		flows[0].Touch()
		f, err := g.Begin(egress.UDP, netip.MustParseAddrPort("192.31.196.1:2"))
		if err != nil {
			t.Fatal(err)
		}
		if flows[0].Context().Err() != nil || flows[1].Context().Err() == nil || flows[2].Context().Err() != nil {
			t.Error("another than the longest idle one was cut")
		}
		for _, f := range append(flows, f) {
			f.End()
		}
		if g.Flows(egress.UDP) != 0 {
			t.Errorf("%d flows are left", g.Flows(egress.UDP))
		}
	})
}

// A flow that must show a name and shows none ends by itself.
func TestFlowWithoutNameEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := agentlab.Network{Mode: agentlab.NetworkAllowlist, Allow: []agentlab.NetworkRule{{Rule: "site.test"}}}
		g := newTestGate(t, n, make(pipeDialer))
		defer g.Close()
		a := netip.MustParseAddr("192.31.196.1")
		g.names.learn(a, "site.test.", time.Minute)
		guest, ours := net.Pipe()
		start := time.Now()
		var wg sync.WaitGroup
		wg.Go(func() { // a byte at a time, for as long as it is taken
			for i := 0; ; i++ {
				b := byte('x')
				if head := "GET / HTTP/1.1\r\nX: "; i < len(head) {
					b = head[i]
				}
				if _, err := guest.Write([]byte{b}); err != nil {
					return
				}
				time.Sleep(500 * time.Millisecond)
			}
		})
		g.ServeTCP(context.Background(), ours, netip.AddrPortFrom(a, 443))
		if took := time.Since(start); took < 9*time.Second || took > 11*time.Second {
			t.Errorf("it took %s", took)
		}
		wg.Wait()
	})
}

// TestStreamsAreNotShared: the DNS connections of one guest leave those of
// another alone.
func TestStreamsAreNotShared(t *testing.T) {
	gates := map[string]*Gate{}
	for _, a := range []string{"127.0.0.1", "127.0.0.2"} {
		p, err := egress.New(agentlab.Network{Mode: agentlab.NetworkOff})
		if err != nil {
			t.Fatal(err)
		}
		if gates[a], err = New(Config{Policy: p}); err != nil {
			t.Fatal(err)
		}
		defer gates[a].Close()
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := Server{Gate: func(from net.Addr) *Gate { return gates[from.(*net.TCPAddr).IP.String()] }}
	ended := make(chan error, 1)
	go func() { ended <- s.ServeListener(t.Context(), l) }()
	dial := func(from string) net.Conn {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
		c, err := d.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	for range 300 {
		dial("127.0.0.1")
	}
	q := new(dns.Msg).SetQuestion("example.com.", dns.TypeA)
	c := dns.Conn{Conn: dial("127.0.0.2")}
	if err := c.WriteMsg(q); err != nil {
		t.Fatal(err)
	}
	if a, err := c.ReadMsg(); err != nil || a.Rcode != dns.RcodeRefused {
		t.Errorf("%v, %v", a, err)
	}
}

// A flow can be idle for its whole idle time before the first read, when the
// host is busy. It must end then, not wait for a datagram that never comes.
func TestUDPFlowThatIsIdleBeforeItsFirstRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newTestGate(t, agentlab.Network{Mode: agentlab.NetworkNAT}, make(pipeDialer))
		defer g.Close()
		f, err := g.Begin(egress.UDP, netip.MustParseAddrPort("192.31.196.1:2"))
		if err != nil {
			t.Fatal(err)
		}
		defer f.End()
		guest, _ := net.Pipe()
		outside, _ := net.Pipe()
		f.RelayUDP(guest, outside, -time.Millisecond) // the deadline has passed
	})
}

package prober

import (
	"bytes"
	"encoding/json"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/miekg/dns"

	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/test/fakenet"
)

// listen serves TCP on a loopback port of its own.
func listen(t *testing.T, serve func(net.Conn)) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() { serve(c); _ = c.Close() }()
		}
	}()
	return l.Addr().String()
}

func packets(t *testing.T, reply string) string {
	t.Helper()
	c, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	go func() {
		buf := make([]byte, 4096)
		for {
			_, from, err := c.ReadFrom(buf)
			if err != nil {
				return
			}
			if reply != "" {
				_, _ = c.WriteTo([]byte(reply), from)
			}
		}
	}()
	return c.LocalAddr().String()
}

// nameServer answers site.test, nowhere.test without addresses, and nothing
// else, on one port for UDP and TCP.
func nameServer(t *testing.T) string {
	t.Helper()
	pc, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", pc.LocalAddr().String())
	if err != nil {
		t.Fatal(err)
	}
	h := dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		m := new(dns.Msg).SetReply(q)
		head := dns.RR_Header{Name: q.Question[0].Name, Rrtype: q.Question[0].Qtype, Class: dns.ClassINET}
		switch q.Question[0].Name {
		case "site.test.":
			if head.Rrtype == dns.TypeTXT {
				m.Answer = append(m.Answer, &dns.TXT{Hdr: head, Txt: []string{"text"}})
			} else {
				m.Answer = append(m.Answer, &dns.A{Hdr: head, A: net.IPv4(127, 0, 0, 1)})
			}
		case "nowhere.test.":
		default:
			m.SetRcode(q, dns.RcodeNameError)
		}
		_ = w.WriteMsg(m)
	})
	for _, s := range []*dns.Server{{PacketConn: pc, Handler: h}, {Listener: l, Handler: h}} {
		go func() { _ = s.ActivateAndServe() }()
		t.Cleanup(func() { _ = s.Shutdown() })
	}
	return pc.LocalAddr().String()
}

// closed is an address without a listener. No port of another test can be in its place: the
// kernel never chooses this one.
const closed = "127.0.0.1:1"

func TestProbes(t *testing.T) {
	t.Parallel()
	heard := make(chan string, 8)
	r, err := fakenet.NewResponder(func(name string) { heard <- name })
	if err != nil {
		t.Fatal(err)
	}
	server := nameServer(t)
	any4 := listen(t, r.ServeStream)
	_, port, _ := net.SplitHostPort(any4)
	silent := listen(t, func(c net.Conn) { _, _ = io.Copy(io.Discard, c) })
	hangup := listen(t, func(c net.Conn) { _, _ = c.Read(make([]byte, 8)) })
	quiet := packets(t, "")
	tests := []struct {
		p    guestapi.Probe
		want guestapi.ProbeResult // Answer is a part of what must come
	}{
		{guestapi.Probe{Kind: "tcp", Target: any4}, guestapi.ProbeResult{Reached: true, Connected: true, Answer: fakenet.Answer}},
		{guestapi.Probe{Kind: "tcp", Target: "site.test:" + port}, guestapi.ProbeResult{Reached: true, Connected: true, Addrs: []string{"127.0.0.1"}}},
		{guestapi.Probe{Kind: "tcp", Target: "[::ffff:127.0.0.1]:" + port}, guestapi.ProbeResult{Reached: true, Connected: true}},
		{guestapi.Probe{Kind: "tcp", Target: "no.test:80"}, guestapi.ProbeResult{Error: "name: NXDOMAIN"}},
		{guestapi.Probe{Kind: "tcp", Target: "nowhere.test:80"}, guestapi.ProbeResult{Error: "name: no address"}},
		{guestapi.Probe{Kind: "tcp", Target: closed}, guestapi.ProbeResult{Error: "refused"}},
		{guestapi.Probe{Kind: "tcp", Target: silent, TimeoutMS: 2000}, guestapi.ProbeResult{Connected: true, Error: "timeout"}},
		{guestapi.Probe{Kind: "tcp", Target: hangup}, guestapi.ProbeResult{Connected: true, Error: "closed|reset"}},
		{guestapi.Probe{Kind: "tcp", Target: "127.0.0.1"}, guestapi.ProbeResult{Error: `"127.0.0.1" is not HOST:PORT`}},
		{guestapi.Probe{Kind: "tls", Target: any4, Name: "a.test"}, guestapi.ProbeResult{Reached: true, Connected: true, Answer: "a.test"}},
		{guestapi.Probe{Kind: "tls", Target: any4}, guestapi.ProbeResult{Reached: true, Connected: true, Answer: "nobody"}},
		{guestapi.Probe{Kind: "tls", Target: hangup}, guestapi.ProbeResult{Connected: true, Error: "closed|reset"}},
		{guestapi.Probe{Kind: "http", Target: any4, Name: "b.test"}, guestapi.ProbeResult{Reached: true, Connected: true, Answer: "200"}},
		{guestapi.Probe{Kind: "http", Target: any4}, guestapi.ProbeResult{Reached: true, Connected: true, Answer: "200"}},
		{guestapi.Probe{Kind: "udp", Target: packets(t, "pong\nmore")}, guestapi.ProbeResult{Reached: true, Answer: "pong"}},
		{guestapi.Probe{Kind: "udp", Target: quiet, TimeoutMS: 200}, guestapi.ProbeResult{Error: "timeout"}},
		{guestapi.Probe{Kind: "udp", Target: closed}, guestapi.ProbeResult{Error: "refused"}},
		{guestapi.Probe{Kind: "quic", Target: packets(t, "\x80versions")}, guestapi.ProbeResult{Reached: true}},
		{guestapi.Probe{Kind: "dns", Target: "site.test"}, guestapi.ProbeResult{Reached: true, Addrs: []string{"127.0.0.1"}}},
		{guestapi.Probe{Kind: "dns", Target: "site.test", Repeat: 2}, guestapi.ProbeResult{Reached: true, Addrs: []string{"127.0.0.1", "127.0.0.1"}}},
		{guestapi.Probe{Kind: "dns", Target: "site.test", Type: "TXT"}, guestapi.ProbeResult{Reached: true, Answer: "text"}},
		{guestapi.Probe{Kind: "dnstcp", Target: "site.test", Server: server}, guestapi.ProbeResult{Reached: true, Addrs: []string{"127.0.0.1"}}},
		{guestapi.Probe{Kind: "dns", Target: "no.test"}, guestapi.ProbeResult{Error: "NXDOMAIN"}},
		{guestapi.Probe{Kind: "dns", Target: "no.test", Type: "BAD"}, guestapi.ProbeResult{Error: `question type "BAD" is not known`}},
		{guestapi.Probe{Kind: "dns", Target: "x.test", Server: quiet, TimeoutMS: 200}, guestapi.ProbeResult{Error: "timeout"}},
		{guestapi.Probe{Kind: "teleport", Target: "moon"}, guestapi.ProbeResult{Error: guestapi.ProbeUnknown}},
	}
	var probes []guestapi.Probe
	for i, tt := range tests {
		tt.p.ID = string(rune('a' + i))
		probes = append(probes, tt.p)
	}
	in, _ := json.Marshal(probes)
	var out bytes.Buffer
	if err := run(t.Context(), bytes.NewReader(in), &out, server); err != nil {
		t.Fatal(err)
	}
	got := map[string]guestapi.ProbeResult{}
	for line := range strings.Lines(out.String()) {
		var r guestapi.ProbeResult
		if err := json.Unmarshal([]byte(line), &r); err != nil {
			t.Fatal(err)
		}
		got[r.ID] = r
	}
	for i, tt := range tests {
		r := got[probes[i].ID]
		okError := slices.Contains(strings.Split(tt.want.Error, "|"), r.Error)
		if r.Reached != tt.want.Reached || r.Connected != tt.want.Connected || !okError || !strings.Contains(r.Answer, tt.want.Answer) ||
			tt.want.Addrs != nil && !slices.Equal(r.Addrs, tt.want.Addrs) {
			t.Errorf("%+v:\n got %+v\nwant %+v", tt.p, r, tt.want)
		}
	}
	for _, want := range []string{"a.test", "b.test"} {
		found := false
		for range len(heard) {
			n := <-heard
			found = found || n == want
			heard <- n
		}
		if !found {
			t.Errorf("the name %s was not heard", want)
		}
	}
}

func TestPing(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("ICMP sockets need root")
	}
	for _, target := range []string{"127.0.0.1", "::1"} {
		for r := range Run(t.Context(), []guestapi.Probe{{ID: "p", Kind: "ping", Target: target}}, "") {
			if target == "::1" && r.Error == "unreachable" {
				t.Log("no IPv6 here")
				continue
			}
			if !r.Reached {
				t.Errorf("ping %s: %+v", target, r)
			}
		}
	}
}

func TestInputIsChecked(t *testing.T) {
	t.Parallel()
	for _, in := range []string{"", "{}", "[", `[{"id":1}]`} {
		if err := run(t.Context(), strings.NewReader(in), io.Discard, ""); err == nil {
			t.Errorf("%q was taken", in)
		}
	}
}

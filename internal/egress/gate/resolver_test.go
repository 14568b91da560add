package gate_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/miekg/dns"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress/gate"
	"github.com/agentlab-vm/agentlab/test/fakenet"
)

type dialerFunc func(ctx context.Context, network, addr string) (net.Conn, error)

func (f dialerFunc) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	return f(ctx, network, addr)
}

func TestUpstream(t *testing.T) {
	t.Parallel()
	internet := fakenet.New()
	t.Cleanup(internet.Close)
	want := internet.Host("www.test").String()
	conf := filepath.Join(t.TempDir(), "resolv.conf")
	if err := os.WriteFile(conf, []byte("# ours\nsearch corp.test\nnameserver 192.168.7.7\nnameserver 10.1.1.1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	var asked []string
	d := dialerFunc(func(ctx context.Context, network, addr string) (net.Conn, error) {
		asked = append(asked, network+" "+addr)
		if strings.HasPrefix(addr, "192.168.7.7:") {
			return nil, errors.New("down")
		}
		return internet.DialContext(ctx, network, addr)
	})
	reply, err := gate.NewUpstreamAt(d, conf).Exchange(t.Context(), new(dns.Msg).SetQuestion("www.test.", dns.TypeA))
	if err != nil || !strings.Contains(fmt.Sprint(reply), want) {
		t.Errorf("%v, %v", reply, err)
	}
	if got := strings.Join(asked, ", "); got != "udp 192.168.7.7:53, udp 10.1.1.1:53" {
		t.Errorf("asked %s", got)
	}
	var many []netip.Addr
	for i := range 200 {
		many = append(many, netip.AddrFrom4([4]byte{192, 31, 197, byte(i)}))
	}
	internet.SetName("many.test", many...)
	reply, err = gate.NewUpstreamAt(d, conf).Exchange(t.Context(), new(dns.Msg).SetQuestion("many.test.", dns.TypeA))
	if err != nil || len(reply.Answer) != len(many) {
		t.Errorf("a truncated answer: %v, %v", reply, err)
	}
	down := dialerFunc(func(context.Context, string, string) (net.Conn, error) { return nil, errors.New("down") })
	_, err = gate.NewUpstreamAt(down, filepath.Join(t.TempDir(), "none")).Exchange(t.Context(), new(dns.Msg).SetQuestion("www.test.", dns.TypeA))
	if agentlab.CodeOf(err) != agentlab.CodeUnavailable || agentlab.HintOf(err) == "" {
		t.Errorf("no answer: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	tried := 0
	ending := dialerFunc(func(context.Context, string, string) (net.Conn, error) {
		tried++
		cancel()
		return nil, errors.New("down")
	})
	if _, err := gate.NewUpstreamAt(ending, conf).Exchange(ctx, new(dns.Msg).SetQuestion("www.test.", dns.TypeA)); err == nil || tried != 1 {
		t.Errorf("after the end of the question, %d attempts: %v", tried, err)
	}
}

package qemu

import (
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/egress/gate"
	"github.com/agentlab-vm/agentlab/internal/egress/vnet"
	"github.com/agentlab-vm/agentlab/test/fakenet"
)

func TestGuestsUseTheUpstreamProxy(t *testing.T) {
	var n vnet.Config
	c := Start{UpstreamProxy: &gate.ProxyConfig{URL: "http://127.0.0.1:1", DNS: "https://1.1.1.1/dns-query"}}
	if err := c.route(&n); err != nil {
		t.Fatal(err)
	}
	if _, ok := n.Dialer.(*gate.ProxyDialer); !ok || n.Resolver == nil {
		t.Errorf("dialer %T, resolver %T", n.Dialer, n.Resolver)
	}
	c.UpstreamProxy.CredentialsFile = "/nonexistent"
	if err := c.route(&n); err == nil {
		t.Error("a guest starts although the credentials are missing")
	}
}

func TestCheckTellsOfTheUpstreamProxy(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	d := &Driver{cfg: Config{UpstreamProxy: &gate.ProxyConfig{URL: "http://" + l.Addr().String()}}}
	if f := d.checkProxy(t.Context()); len(f) != 1 || f[0].Level != backend.LevelOK {
		t.Errorf("%+v", f)
	}
	_ = l.Close()
	f := d.checkProxy(t.Context())
	if len(f) != 1 || f[0].Level != backend.LevelError || !strings.Contains(f[0].Detail, "does not answer") || f[0].Remedy == "" {
		t.Errorf("%+v", f)
	}
	if f := (&Driver{}).checkProxy(t.Context()); len(f) != 0 {
		t.Errorf("without a proxy: %+v", f)
	}
}

// The setting reaches the supervisor of a VM, whose guest gets out through the
// proxy only.
func TestUpstreamProxyInTheVM(t *testing.T) {
	f := vmFixture(t)
	internet := fakenet.New()
	t.Cleanup(internet.Close)
	web := internet.Web("www.test")
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	p := &fakenet.Proxy{Net: internet, User: "joe", Password: "secret"}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go p.Serve(c)
		}
	}()
	credentials := filepath.Join(t.TempDir(), "credentials")
	if err := os.WriteFile(credentials, []byte("joe:secret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	f.UpstreamProxy = &gate.ProxyConfig{URL: "socks5://" + l.Addr().String(), CredentialsFile: credentials}
	b := newBox(t, f, nil)
	b.boot()
	b.identify()
	if got := b.output("curl -s -m 20 -o /dev/null -w '%{http_code}' http://" + web.Addr().String() + "/hello"); got != "200" {
		t.Errorf("the guest got %q", got)
	}
	if asked := p.Asked(); !slices.Contains(asked, web.String()) {
		t.Errorf("the proxy was asked for %v", asked)
	}
}

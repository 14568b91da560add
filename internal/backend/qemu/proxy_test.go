package qemu

import (
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/agentlab-vm/agentlab/internal/egress/gate"
	"github.com/agentlab-vm/agentlab/test/fakenet"
)

// The setting reaches the supervisor of a VM, whose guest gets out through the
// proxy only.
func TestUpstreamProxyInTheVM(t *testing.T) {
	f := warmFixture(t)
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

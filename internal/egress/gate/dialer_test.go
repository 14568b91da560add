package gate_test

import (
	"errors"
	"net"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/egress/gate"
)

func TestHostDialerRejectsPrivateAddresses(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0") // a real service of the host
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	d := gate.NewHostDialer()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	for _, network := range []string{"tcp", "udp"} {
		for host, rule := range map[string]string{
			"127.0.0.1": egress.RuleLoopback, "::1": egress.RuleLoopback, "::ffff:127.0.0.1": egress.RuleLoopback,
			"0.0.0.0": egress.RuleUnspecified, "10.0.0.1": egress.RulePrivate, "169.254.169.254": egress.RuleMetadata, "224.0.0.1": egress.RuleMulticast,
		} {
			c, err := d.DialContext(t.Context(), network, net.JoinHostPort(host, port))
			if err == nil {
				_ = c.Close()
			}
			denied, ok := errors.AsType[*egress.DeniedError](err)
			if !ok || denied.Rule != rule {
				t.Errorf("%s %s: %v, want rule %s", network, host, err, rule)
			}
		}
	}
	for _, bad := range [][2]string{{"tcp", "localhost:" + port}, {"unix", "/run/x"}, {"tcp", "127.0.0.1"}} {
		if _, err := d.DialContext(t.Context(), bad[0], bad[1]); agentlab.CodeOf(err) != agentlab.CodeInvalid {
			t.Errorf("%v: %v", bad, err)
		}
	}
	c, err := d.DialResolver(t.Context(), "tcp", l.Addr().String())
	if err != nil {
		t.Errorf("the host's own name server cannot be reached: %v", err)
	} else {
		_ = c.Close()
	}
}

package gate_test

import (
	"context"
	"errors"
	"net"
	"path/filepath"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/egress/gate"
	"github.com/agentlab-vm/agentlab/internal/sockpath"
)

func TestHostDialerRefusesWhatIsPrivate(t *testing.T) {
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

func TestUnixDialerFaults(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "dial.sock")
	d := gate.UnixDialer{Path: path}
	if _, err := d.DialContext(t.Context(), "tcp", "8.8.8.8:53"); agentlab.CodeOf(err) != agentlab.CodeUnavailable {
		t.Errorf("no socket: %v", err)
	}
	if _, err := d.DialContext(t.Context(), "tcp", "8.8.8.8:53\nok"); agentlab.CodeOf(err) != agentlab.CodeInvalid {
		t.Errorf("a line feed in the address: %v", err)
	}
	l, err := sockpath.Listen(path, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	for _, reply := range []string{"", "err no way\n", string(make([]byte, 5000)), "ok"} {
		go func() {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = gate.ReadDialLine(c)
			_, _ = c.Write([]byte(reply))
			_ = c.Close()
		}()
		c, err := d.DialContext(t.Context(), "tcp", "8.8.8.8:53")
		if err == nil {
			_ = c.Close()
			t.Errorf("the reply %q is taken for a connection", reply)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
	defer cancel()
	if _, err := d.DialContext(ctx, "tcp", "8.8.8.8:53"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a dial that nobody answers: %v", err)
	}
}

package gate_test

import (
	"errors"
	"net"
	"os"
	"os/exec"
	"testing"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/egress/gate"
)

// The host is refused also by addresses that only a route makes its own, and
// so is everyone on its network at once. The test runs itself again in a
// network of its own, which it may configure.
func TestHostDialerRejectsHostAddresses(t *testing.T) {
	const inside = "AGENTLAB_TEST_NETNS"
	if os.Getenv(inside) == "" {
		if os.Geteuid() != 0 {
			t.Skip("only root may make a network namespace")
		}
		if _, err := exec.LookPath("ip"); err != nil {
			t.Skip("there is no ip command here")
		}
		cmd := exec.CommandContext(t.Context(), "unshare", "--net", os.Args[0], "-test.run", "^"+t.Name()+"$", "-test.v")
		cmd.Env = append(os.Environ(), inside+"=1")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		return
	}
	for _, args := range [][]string{
		{"link", "set", "lo", "up"},
		{"addr", "add", "8.8.4.10/24", "dev", "lo"},
		{"route", "add", "local", "9.9.9.0/24", "dev", "lo"},
		{"route", "add", "local", "9.9.10.0/24", "dev", "lo", "src", "8.8.4.10"},
		{"route", "add", "broadcast", "9.9.11.1/32", "dev", "lo"},
		{"-6", "route", "add", "local", "2a00:1450::/32", "dev", "lo"},
	} {
		if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
			t.Fatalf("ip %v: %v\n%s", args, err, out)
		}
	}
	d := gate.NewHostDialer()
	d.AskTranslators(announces())
	for _, network := range []string{"tcp", "udp"} {
		for _, host := range []string{"8.8.4.10", "8.8.4.255", "9.9.9.9", "9.9.10.9", "9.9.11.1", "2a00:1450::9", "::ffff:9.9.9.9"} {
			c, err := d.DialContext(t.Context(), network, net.JoinHostPort(host, "7"))
			if err == nil {
				_ = c.Close()
			}
			if denied, ok := errors.AsType[*egress.DeniedError](err); !ok || denied.Rule != egress.RuleHostAddr && denied.Rule != egress.RuleInvalid {
				t.Errorf("%s %s: %v", network, host, err)
			}
		}
		if _, err := d.DialContext(t.Context(), network, "1.1.1.1:7"); !errors.Is(err, unix.ENETUNREACH) {
			t.Errorf("%s: where no route leads: %v", network, err)
		}
	}
	testOtherHost(t)
}

// testOtherHost checks that neighbours of the host are denied, although their
// addresses are public, because they belong to its owner's network. Hosts behind
// a router are reached, with a socket that cannot broadcast.
func testOtherHost(t *testing.T) {
	t.Helper()
	for _, args := range [][]string{
		{"link", "add", "v0", "type", "veth", "peer", "name", "v1"},
		{"addr", "add", "8.8.5.10/24", "dev", "v0"},
		{"addr", "add", "2a00:1460:1:2::10/64", "dev", "v0", "nodad"},
		{"link", "set", "v0", "up"},
		{"route", "add", "9.9.12.0/24", "via", "8.8.5.1"},
	} {
		if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
			t.Skipf("no pair of cards here: ip %v: %v\n%s", args, err, out)
		}
	}
	d := gate.NewHostDialer() // another has read the addresses before these were set
	d.AskTranslators(announces())
	for _, addr := range []string{"8.8.5.11:7", "[2a00:1460:1:2::11]:7", "[::ffff:8.8.5.11]:7"} {
		for _, network := range []string{"tcp", "udp", "icmp"} {
			c, err := d.DialContext(t.Context(), network, addr)
			if err == nil {
				_ = c.Close()
			}
			if denied, ok := errors.AsType[*egress.DeniedError](err); !ok || denied.Rule != egress.RuleLAN {
				t.Errorf("%s to the neighbour %s: %v", network, addr, err)
			}
		}
	}
	testNAT64(t, d)
	c, err := d.DialContext(t.Context(), "udp", "9.9.12.1:7")
	if err != nil {
		t.Fatalf("a host behind a router: %v", err)
	}
	defer func() { _ = c.Close() }()
	raw, err := c.(*net.UDPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	_ = raw.Control(func(fd uintptr) {
		if on, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_BROADCAST); err != nil || on != 0 {
			t.Errorf("the socket may broadcast: %d, %v", on, err)
		}
	})
}

// testNAT64: if a route leads to a NAT64, or to any other translator of IPv6
// into IPv4, the host and its neighbours are not reached through it, and DNS
// does not return them. The addresses behind it may be neighbours of the
// host's.
func testNAT64(t *testing.T, d *gate.HostDialer) {
	t.Helper()
	for _, args := range [][]string{
		{"-6", "route", "add", "64:ff9b::/96", "via", "2a00:1460:1:2::1"},
		{"-6", "route", "add", "2a00:1461::/32", "via", "2a00:1460:1:2::1"},
	} {
		if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
			t.Fatalf("ip %v: %v\n%s", args, err, out)
		}
	}
	for addr, rule := range map[string]string{
		"64:ff9b::8.8.5.10": egress.RuleHostAddr, "64:ff9b::8.8.5.255": egress.RuleHostAddr, "64:ff9b::9.9.9.9": egress.RuleHostAddr,
		"64:ff9b::8.8.5.11": egress.RuleLAN, "2a00:1461::5efe:8.8.5.11": egress.RuleLAN, "2a00:1461::200:5efe:8.8.5.10": egress.RuleHostAddr,
		"64:ff9b::1.1.1.1": "", "2a00:1461::1": "",
	} {
		for _, network := range []string{"tcp", "udp", "icmp"} {
			if network != "udp" && rule == "" {
				continue // no answer, or pings are not allowed here
			}
			c, err := d.DialContext(t.Context(), network, net.JoinHostPort(addr, "7"))
			if err == nil {
				_ = c.Close()
			}
			denied, _ := errors.AsType[*egress.DeniedError](err)
			if rule == "" && err != nil || rule != "" && (denied == nil || denied.Rule != rule) {
				t.Errorf("%s to %s: %v, want rule %q", network, addr, err, rule)
			}
		}
	}
	testNAT64Answers(t, d)
}

// testNAT64Answers asks a gate for names that lead there.
func testNAT64Answers(t *testing.T, d *gate.HostDialer) {
	t.Helper()
	addrs := map[string]string{
		"self.example.com.": "64:ff9b::8.8.5.10", "neighbour.example.com.": "64:ff9b::8.8.5.11", "isatap.example.com.": "2a00:1461::5efe:8.8.5.11",
		"public.example.com.": "64:ff9b::1.1.1.1",
	}
	resolver := tells(func(q dns.Question) ([]string, int, error) { return []string{addrs[q.Name]}, dns.RcodeSuccess, nil })
	policy, err := egress.New(agentlab.Network{Mode: agentlab.NetworkNAT})
	if err != nil {
		t.Fatal(err)
	}
	d6 := &ipv6Dialer{d}
	g, err := gate.New(gate.Config{Policy: policy, Dialer: d6, Resolver: resolver})
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	for name, addr := range addrs {
		wire, err := new(dns.Msg).SetQuestion(name, dns.TypeAAAA).Pack()
		if err != nil {
			t.Fatal(err)
		}
		reply := new(dns.Msg)
		if err := reply.Unpack(g.Answer(t.Context(), wire, true)); err != nil {
			t.Fatal(err)
		}
		if told := len(reply.Answer) > 0; told != (name == "public.example.com.") {
			t.Errorf("the guest was told %s of %s: %v", addr, name, told)
		}
	}
}

// ipv6Dialer has a way to the IPv6 internet.
type ipv6Dialer struct{ *gate.HostDialer }

func (ipv6Dialer) IPv6() bool { return true }

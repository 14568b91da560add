package egress_test

import (
	"net/netip"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
)

func TestParseRule(t *testing.T) {
	t.Parallel()
	good := map[string]string{ // text: its canonical form
		"github.com": "github.com", "GitHub.com.": "github.com", "*.github.com": "*.github.com",
		"github.com:443": "github.com:443", "github.com:22/tcp": "github.com:22", "host.example:8000-8010/tcp": "host.example:8000-8010",
		"140.82.112.0/20": "140.82.112.0/20", "1.2.3.4:443": "1.2.3.4:443", "1.2.3.4/32": "1.2.3.4", "1.2.3.4/icmp": "1.2.3.4/icmp",
		"[2606:4700::/32]:443/udp": "[2606:4700::/32]:443/udp", "2606:4700::1": "2606:4700::1", "2606:4700::/32": "2606:4700::/32",
		"[2606:4700::1]": "2606:4700::1", "::ffff:8.8.8.8": "8.8.8.8", "2606:4700::/32/icmp": "2606:4700::/32/icmp",
		"_acme.example.com:53/udp": "_acme.example.com:53/udp", "10.0.0.0/8:443": "10.0.0.0/8:443", "xn--bcher-kva.example": "xn--bcher-kva.example",
	}
	for text, want := range good {
		r, err := egress.ParseRule(text, true)
		if err != nil || r.String() != want {
			t.Errorf("ParseRule(%q) = %q, %v; want %q", text, r, err, want)
		}
	}
	bad := []string{
		"", "*", "*.", "com", "localhost", "github", ".github.com", "git*.com", "*.*.com", "a b.com", "github.com:", "github.com:0",
		"github.com:65536", "github.com:+22", "github.com:022", "github.com:9-8", "github.com/tcp", "github.com/udp", "github.com:22/icmp",
		"github.com:22/sctp", "https://github.com", "github.com/path", "1.2.3.4/33", "1.2.3.4/8", "1.2.3", "256.1.1.1", "fe80::1%eth0",
		"::ffff:1.2.3.0/120", "[1.2.3.4]:443", "[2606:4700::1]:", "[2606:4700::1]443", "[github.com]:443", "-a.com", "a-.com", "bücher.example",
		"a.com\n", "a.com;drop", "a..com", strings.Repeat("a", 64) + ".com", strings.Repeat("abc.", 80) + "com", "1.2.3.4.example.0x7f",
		"preset:github", "file:x", "example.123",
	}
	for _, text := range bad {
		r, err := egress.ParseRule(text, true)
		if agentlab.CodeOf(err) != agentlab.CodeInvalid || agentlab.HintOf(err) == "" {
			t.Errorf("ParseRule(%q) = %q, %v", text, r, err)
		}
	}
}

// What only a profile may name is not taken for a bad port.
func TestListsAreNotRules(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"preset:github", "file:lists/mine.txt", "file:a/icmp", "preset:443x"} {
		_, err := egress.ParseRule(text, true)
		if agentlab.CodeOf(err) != agentlab.CodeInvalid || !strings.Contains(err.Error(), "only the lists of a profile may name presets and files") {
			t.Errorf("%s: %v", text, err)
		}
	}
}

// genRule draws the text of a valid rule.
func genRule(t *rapid.T) string {
	target := rapid.OneOf(
		rapid.SampledFrom([]string{"a.example", "b.example", "x.a.example", "*.a.example", "*.example", "8.8.8.8", "8.8.0.0/16", "9.0.0.0/8"}),
		rapid.StringMatching(`(\*\.)?[a-z0-9]([a-z0-9-]{0,8}[a-z0-9])?\.[a-z]{2,6}`),
		rapid.Custom(func(t *rapid.T) string { return publicV4(t).String() }),
		rapid.SampledFrom([]string{"[2606:4700::1]", "[2606:4700::/32]"}),
	).Draw(t, "target")
	return target + rapid.SampledFrom([]string{"", ":443", ":80", ":22/tcp", ":443/udp", ":8000-8010", "/icmp"}).
		Filter(func(s string) bool { return !strings.HasPrefix(target, "[") || s != "/icmp" }).Draw(t, "ports")
}

func publicV4(t *rapid.T) netip.Addr {
	return rapid.Custom(genV4).Filter(func(a netip.Addr) bool {
		_, denied := egress.AlwaysDenied(a)
		return !denied
	}).Draw(t, "addr")
}

func TestRulesRoundTrip(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		text := genRule(t)
		r, err := egress.ParseRule(text, false)
		if err != nil {
			t.Fatalf("%q: %v", text, err)
		}
		again, err := egress.ParseRule(r.String(), false)
		if err != nil || again.String() != r.String() || again.Proto != r.Proto || again.Prefix != r.Prefix {
			t.Fatalf("%q is printed as %q, which reads as %q, %v", text, r, again, err)
		}
	})
}

func FuzzParseRule(f *testing.F) {
	for _, s := range []string{"github.com", "*.a.example:443/udp", "[2606:4700::/32]:1-2", "1.2.3.4/icmp", "8.8.0.0/16:53/udp", "::1"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		r, err := egress.ParseRule(text, true)
		if err != nil {
			return
		}
		s := r.String()
		// Rules are written into rulesets and shown: nothing but these.
		if strings.Trim(s, "abcdefghijklmnopqrstuvwxyz0123456789-_.:/*[]") != "" {
			t.Fatalf("%q passes as %q", text, s)
		}
		again, err := egress.ParseRule(s, true)
		if err != nil || again.String() != s {
			t.Fatalf("%q is printed as %q, which reads as %q, %v", text, s, again, err)
		}
	})
}

func TestDenialsAreTheList(t *testing.T) {
	t.Parallel()
	denials, masked := egress.Denials(), egress.MaskedDenials()
	listed := func(a netip.Addr) bool {
		for _, d := range denials {
			if d.Prefix.Contains(a) {
				return true
			}
		}
		if a.Is4() {
			return false
		}
		b := a.As16()
		for _, m := range masked {
			v, k, same := m.Value.As16(), m.Mask.As16(), true
			for i := range b {
				same = same && b[i]&k[i] == v[i]
			}
			if same {
				return true
			}
		}
		return false
	}
	rapid.Check(t, func(t *rapid.T) {
		v4 := genV4(t)
		all := []netip.Addr{v4, netip.AddrFrom16([16]byte(rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "a")))}
		for kind, a := range embeddings(v4) {
			if kind != "mapped" {
				all = append(all, a)
			}
		}
		for _, a := range all {
			if a.Is4In6() {
				continue
			}
			if _, denied := egress.AlwaysDenied(a); denied != listed(a) {
				t.Fatalf("%s: denied %v, listed %v", a, denied, listed(a))
			}
		}
	})
}

// The list is made once: with thousands of sandboxes, making it for each policy was half
// of all memory that the daemon allocated.
func TestDenialsAreMadeOnce(t *testing.T) {
	if n := testing.AllocsPerRun(10, func() { egress.Denials() }); n != 0 || len(egress.Denials()) == 0 {
		t.Errorf("%v allocations, %d ranges", n, len(egress.Denials()))
	}
}

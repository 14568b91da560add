package networkcmd

import (
	"bytes"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/cli"
)

// What was skipped is seen, and why.
func TestVerifyReportsSkipped(t *testing.T) {
	var out bytes.Buffer
	a := &cli.App{Stdout: &out, Stderr: io.Discard}
	r := api.VerifyReport{Name: "box", Mode: "nat", OK: true, Passed: 3, Skipped: 2, Records: true,
		SkipReasons: []api.VerifySkip{{Reason: "example.com does not resolve here: NXDOMAIN\x1b[2J", Count: 2}}}
	if err := printVerify(a, r, false); err != nil {
		t.Fatal(err)
	}
	if s := out.String(); !strings.Contains(s, "not fully checked: 2 skipped\n  2: example.com does not resolve here: NXDOMAIN") || strings.Contains(s, "\x1b") {
		t.Errorf("%q", s)
	}
}

func TestExplainUnreadPorts(t *testing.T) {
	for rule, want := range map[string][]string{
		"a.example": {"80", "443"}, "*.a.example": {"80", "443"}, "a.example:443": {"443"}, "a.example:1-100/tcp": {"80"},
		"a.example:22": nil, "a.example:443/udp": nil, "a.example/icmp": nil, "1.2.3.4": nil, "1.2.3.0/24": nil, "1.2.3.0/24:443": nil,
		"1.2.3.4:443": nil, "2606:4700::1": nil, "[2606:4700::/32]:443": nil,
	} {
		if got := unreadPorts([]api.PolicyRule{{Rule: rule}}); !slices.Equal(got, want) {
			t.Errorf("%s: %v, not %v", rule, got, want)
		}
	}
	var out bytes.Buffer
	explainPolicy(&out, api.Policy{Mode: "nat", Deny: []api.PolicyRule{{Rule: "a.example"}}})
	if !strings.Contains(out.String(), "UDP to port 80 and port 443 (QUIC, HTTP/3) is denied") {
		t.Error(out.String())
	}
}

package networkcmd

import (
	"bytes"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/api"
)

// The explanation of a policy names what the upstream proxy does not carry.
func TestExplainedPolicyNamesTheUpstreamProxy(t *testing.T) {
	for _, c := range []struct {
		mode           string
		proxied, named bool
	}{{"nat", true, true}, {"allowlist", true, true}, {"off", true, false}, {"nat", false, false}} {
		var out bytes.Buffer
		explainPolicy(&out, api.Policy{Mode: c.mode, UpstreamProxy: c.proxied})
		if got := strings.Contains(out.String(), "rule proxy.unsupported"); got != c.named {
			t.Errorf("mode %s, proxy %v: %s", c.mode, c.proxied, out.String())
		}
	}
}

package cli

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
)

// maxDenials is how many denials are shown while a job runs: its agent chooses
// how many there are.
const maxDenials = 30

// preflightFlag adds --no-preflight.
func preflightFlag(flags *pflag.FlagSet, p *bool) {
	flags.BoolVar(p, "no-preflight", false, "do not check first that the agent has a key and that the profile lets it reach its model")
}

// showDenials shows on standard error, once each, what the network denies a
// job, until ctx ends. It only adds to what is shown: it ends quietly where
// the record cannot be read.
func (a *App) showDenials(ctx context.Context, c *client.Client, jobID string) {
	seen := map[string]bool{}
	for r, err := range c.FollowEgress(ctx, client.EgressQuery{JobID: jobID, Denied: true}) {
		if err != nil {
			return
		}
		line := denialLine(r)
		if r.Seq == 0 || seen[line] {
			continue
		}
		if seen[line] = true; len(seen) > maxDenials {
			a.progressf("more is denied\n  → agentlab egress log --job %s --denied", jobID)
			return
		}
		a.progressf("%s", line)
	}
}

// denialLine is one line about a denied record, without its time and number,
// so that equal denials are equal lines.
func denialLine(r api.EgressRecord) string {
	return plain(fmt.Sprintf("denied: %s (rule %s)", wanted(r.Proto, r.Name, r.Addr, r.Port), r.Rule))
}

// wanted is the short name of what a guest wanted: the name, if it gave one,
// with the port; a question put to DNS has none.
func wanted(proto, name, addr string, port int) string {
	host := name
	if host == "" {
		host = dash(addr)
	}
	switch {
	case proto == "dns":
		return host + ", DNS"
	case port == 0:
		return host + ", " + proto
	}
	host = net.JoinHostPort(host, strconv.Itoa(port))
	if proto != "tcp" {
		host += "/" + proto
	}
	return host
}

// summariseDenials is the line of a job's summary on what it was denied.
func (a *App) summariseDenials(id string, s *api.EgressSummary) {
	const most = 3
	if s == nil || s.Denied == 0 {
		return
	}
	var list []string
	for _, d := range s.Targets[:min(most, len(s.Targets))] {
		list = append(list, fmt.Sprintf("%s (rule %s, %d times)", wanted(d.Proto, d.Name, d.Addr, d.Port), d.Rule, d.Count))
	}
	if more := len(s.Targets) + s.More - len(list); more > 0 {
		list = append(list, fmt.Sprintf("%d more", more))
	}
	a.progressf("  %s\n  → agentlab egress log --job %s --denied", plain("denied by the network policy: "+strings.Join(list, ", ")), id)
}

package jobcmd

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
)

// maxDenials limits the denials that are shown while a job runs. Its agent
// controls how many there are.
const maxDenials = 30

// showDenials prints each denied request of a job once on standard error, until
// ctx ends. It ignores errors, since the denials are only additional output.
func showDenials(ctx context.Context, a *cli.App, c *client.Client, jobID string) {
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
			a.Progressf("more requests are denied\n  → agentlab egress log --job %s --denied", jobID)
			return
		}
		a.Progressf("%s", line)
	}
}

// denialLine formats a denied record without its time and count, so that equal
// denials are equal lines.
func denialLine(r api.EgressRecord) string {
	return agentlab.WithoutControls(fmt.Sprintf("denied: %s (rule %s)", wanted(r.Proto, r.Name, r.Addr, r.Port), r.Rule))
}

// wanted formats a target for a summary: the name, else the address, with the
// port; DNS queries have none.
func wanted(proto, name, addr string, port int) string {
	host := name
	if host == "" {
		host = cli.OrDash(addr)
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

// summariseDenials prints the denied requests in the summary of a job.
func summariseDenials(a *cli.App, id string, s *api.EgressSummary) {
	const most = 3
	if s == nil || s.Denied == 0 {
		return
	}
	var list []string
	for _, d := range s.Targets[:min(most, len(s.Targets))] {
		list = append(list, fmt.Sprintf("%s (rule %s, %s)", wanted(d.Proto, d.Name, d.Addr, d.Port), d.Rule, agentlab.Plural(d.Count, "time")))
	}
	if more := len(s.Targets) + s.More - len(list); more > 0 {
		list = append(list, fmt.Sprintf("%d more", more))
	}
	a.Progressf("  %s\n  → agentlab egress log --job %s --denied", agentlab.WithoutControls("denied by the network policy: "+strings.Join(list, ", ")), id)
}

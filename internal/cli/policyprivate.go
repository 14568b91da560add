package cli

import (
	"fmt"
	"net"
	"strconv"

	"github.com/agentlab-vm/agentlab/api"
)

// printPrivate lists the private destinations of a policy before all else: they
// are the only exceptions from what is always denied.
func (a *App) printPrivate(list []api.PolicyPrivate) error {
	if len(list) == 0 {
		return nil
	}
	fmt.Fprintf(a.Stdout, "WARNING: this policy opens %d private destination(s) to the sandbox:\n", len(list))
	t := newTable(a.Stdout, "  PRIVATE", "REASON", "SOURCE")
	for _, p := range list {
		t.row("  "+net.JoinHostPort(p.Host, strconv.Itoa(p.Port)), plain(p.Reason), privateSource(p.Source))
	}
	return t.flush()
}

func privateSource(s string) string {
	if s == "" {
		return "profile"
	}
	return s
}

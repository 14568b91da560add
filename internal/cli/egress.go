package cli

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
)

// maxEgressList is the longest list that the daemon gives at once.
const maxEgressList = 10000

func (a *App) egressCmd() *cobra.Command {
	cmd := &cobra.Command{Use: "egress", Short: "Look at what sandboxes wanted from the network"}
	cmd.AddCommand(a.egressLogCmd())
	return cmd
}

func (a *App) egressLogCmd() *cobra.Command {
	var follow bool
	var q client.EgressQuery
	cmd := &cobra.Command{
		Use: "log [SANDBOX]", Short: "Show every decision on what sandboxes wanted from the network",
		Long: `Show every decision on what sandboxes wanted from the network: when, what, and
by which rule it was allowed or refused. Equal decisions that came close
together are one line with their number. Names are what a guest gave: whatever
is no plain character in them is shown as \DDD.

With --json each record is one line of JSON: 'agentlab egress log --limit 0
--json' exports everything that is kept.`,
		Example: "  agentlab egress log my-sandbox --denied\n  agentlab egress log --job job-abc --since 10m --follow",
		Args:    atMostOne("SANDBOX"),
	}
	flags := cmd.Flags()
	flags.BoolVarP(&follow, "follow", "f", false, "go on as it happens")
	flags.StringVar(&q.JobID, "job", "", "only this job")
	flags.BoolVar(&q.Denied, "denied", false, "only what was refused")
	flags.Var(sinceFlag{&q.Since, a.Now}, "since", "only what happened since then: 10m, 4h, 2d, or a time such as 2026-01-31T15:04:05Z")
	flags.IntVar(&q.Limit, "limit", 100, "at most this many, the newest; 0 means all; not with --follow")
	list := a.run(func(ctx context.Context, c *client.Client, args []string) error {
		if len(args) > 0 {
			q.Sandbox = args[0]
		}
		if follow {
			return hintAtJob(a.followEgress(ctx, c, q), q)
		}
		return hintAtJob(a.listEgress(ctx, c, q), q)
	})
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		switch {
		case q.Limit < 0:
			return usageErrorf("--limit is negative")
		case follow && flags.Changed("limit"):
			return usageErrorf("--limit does not go with --follow").WithHint("use --since to choose where to begin")
		}
		return list(cmd, args)
	}
	return cmd
}

// hintAtJob adds to the error for a sandbox that is gone where its records
// are still found.
func hintAtJob(err error, q client.EgressQuery) error {
	e, ok := errors.AsType[*agentlab.Error](err)
	if !ok || e.Code != agentlab.CodeNotFound || q.Sandbox == "" || q.JobID != "" {
		return err
	}
	const job = "what a job wanted is shown by 'agentlab egress log --job JOB', also when its sandbox is gone"
	if e.Hint != "" {
		return e.WithHint("%s; %s", e.Hint, job)
	}
	return e.WithHint(job)
}

func (a *App) followEgress(ctx context.Context, c *client.Client, q client.EgressQuery) error {
	if q.Sandbox == "" && q.JobID == "" && q.Since.IsZero() {
		q.After = -1 // from now on
	}
	for r, err := range c.FollowEgress(ctx, q) {
		if err != nil {
			return err
		}
		if err := a.printEgress(r); err != nil {
			return err
		}
	}
	return nil
}

func (a *App) listEgress(ctx context.Context, c *client.Client, q client.EgressQuery) error {
	everything, limit := q.Limit == 0, q.Limit
	switch {
	case everything:
		q.Oldest, q.Limit = true, 1000
	case limit < maxEgressList:
		q.Limit++ // one more tells whether the list is cut
	}
	for {
		list, err := c.Egress(ctx, q)
		if err != nil {
			return err
		}
		cut := !everything && (len(list.Items) > limit || len(list.Items) == maxEgressList)
		if !everything && len(list.Items) > limit {
			list.Items = list.Items[len(list.Items)-limit:]
		}
		for _, r := range list.Items {
			if err := a.printEgress(r); err != nil {
				return err
			}
			q.After = r.ID
		}
		if cut {
			a.progressf("only the newest %d records are shown; '--limit 0' shows all", limit)
		}
		if !everything || list.Next == "" {
			return nil
		}
	}
}

func (a *App) printEgress(r api.EgressRecord) error {
	if a.json {
		return a.printJSONLine(r)
	}
	if r.Seq == 0 {
		_, err := fmt.Fprintf(a.Stdout, "%s  %d  %d decisions are not recorded: there were too many\n", localTime(r.Time), r.VMID, r.Dropped)
		return err
	}
	verdict := "denied"
	if r.Allow {
		verdict = "allowed"
	}
	line := fmt.Sprintf("%s  %d  %-7s  %-4s  %s  [%s]", localTime(r.Time), r.VMID, verdict, r.Proto, egressTarget(r.Name, r.Addr, r.Port), r.Rule)
	if r.Count > 1 {
		line += fmt.Sprintf("  %d times in %s", r.Count, r.Last.Sub(r.Time).Round(100*time.Millisecond))
	}
	if r.Error != "" {
		line += "  failed: " + r.Error
	}
	if r.Dropped > 0 {
		line += fmt.Sprintf("  (%d before it are not recorded)", r.Dropped)
	}
	_, err := fmt.Fprintln(a.Stdout, plain(line))
	return err
}

// egressTarget tells what was wanted: "github.com (140.82.112.3):443".
func egressTarget(name, addr string, port int) string {
	out := name
	switch {
	case name == "" && port != 0:
		return net.JoinHostPort(addr, strconv.Itoa(port))
	case name == "":
		return dash(addr)
	case addr != "":
		out += " (" + addr + ")"
	}
	if port != 0 {
		out += ":" + strconv.Itoa(port)
	}
	return out
}

// egressSummary is the part of 'job show' on the network.
func (a *App) egressSummary(s *api.EgressSummary) error {
	if s == nil || s.Allowed+s.Denied+s.Dropped == 0 {
		return nil
	}
	fmt.Fprintf(a.Stdout, "\nNetwork: %d allowed, %d denied", s.Allowed, s.Denied)
	if s.Dropped > 0 {
		fmt.Fprintf(a.Stdout, ", %d more not recorded", s.Dropped)
	}
	fmt.Fprintln(a.Stdout)
	if len(s.Private) > 0 {
		t := newTable(a.Stdout, "  PRIVATE, OPENED", "TIMES", "PROTO", "RULE")
		for _, p := range s.Private {
			t.row("  "+egressTarget(p.Name, p.Addr, p.Port), p.Count, p.Proto, p.Rule)
		}
		if err := t.flush(); err != nil {
			return err
		}
	}
	if len(s.Targets) == 0 {
		return nil
	}
	t := newTable(a.Stdout, "  DENIED", "TIMES", "PROTO", "RULE")
	for _, d := range s.Targets {
		t.row("  "+egressTarget(d.Name, d.Addr, d.Port), d.Count, d.Proto, d.Rule)
	}
	if s.More > 0 {
		t.row(fmt.Sprintf("  and %d more", s.More), "", "", "")
	}
	return t.flush()
}

// atMostOne is for commands with one optional argument.
func atMostOne(name string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) > 1 {
			return usageErrorf("unexpected argument %q after %s", args[1], name).WithHint("usage: %s", cmd.UseLine())
		}
		return nil
	}
}

// sinceFlag is a point in time, given as such or as how long ago it was.
type sinceFlag struct {
	t   *time.Time
	now func() time.Time
}

func (f sinceFlag) String() string {
	if f.t == nil || f.t.IsZero() {
		return ""
	}
	return f.t.Format(time.RFC3339)
}

func (sinceFlag) Type() string { return "duration|time" }

func (f sinceFlag) Set(s string) error {
	if t, err := time.Parse(time.RFC3339, s); err == nil {
		*f.t = t
		return nil
	}
	rest, days := s, 0
	if before, after, ok := strings.Cut(s, "d"); ok {
		n, err := strconv.ParseUint(before, 10, 15)
		if err != nil {
			return fmt.Errorf("%q is neither a duration such as 10m, 4h or 2d nor a time such as 2026-01-31T15:04:05Z", s)
		}
		days, rest = int(n), after
	}
	ago := time.Duration(0)
	if rest != "" || days == 0 {
		var err error
		if ago, err = time.ParseDuration(rest); err != nil || ago < 0 {
			return fmt.Errorf("%q is neither a duration such as 10m, 4h or 2d nor a time such as 2026-01-31T15:04:05Z", s)
		}
	}
	*f.t = f.now().AddDate(0, 0, -days).Add(-ago)
	return nil
}

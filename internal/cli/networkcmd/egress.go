package networkcmd

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/work"
)

// maxEgressList limits a list of the daemon.
const maxEgressList = 10000

func egressCmd(a *cli.App) *cobra.Command {
	cmd := &cobra.Command{Use: "egress", Short: "Show egress decisions"}
	cmd.AddCommand(egressLogCmd(a))
	return cmd
}

func egressLogCmd(a *cli.App) *cobra.Command {
	var follow bool
	var q client.EgressQuery
	cmd := &cobra.Command{
		Use: "log [SANDBOX]", Short: "Show egress decisions",
		Long: `Show egress decisions: each request of a sandbox to the network, and the rule
that allowed or denied it. Equal decisions in quick succession are one line with
a count. Names come from guests: special characters are shown as \DDD.

With --json each record is one line of JSON; 'agentlab egress log --limit 0
--json' exports all records.`,
		Example: "  agentlab egress log my-sandbox --denied\n  agentlab egress log --job job-abc --since 10m --follow",
		Args:    atMostOne("SANDBOX"),
	}
	flags := cmd.Flags()
	flags.BoolVarP(&follow, "follow", "f", false, "print new records as they are recorded")
	flags.StringVar(&q.JobID, "job", "", "only this job")
	flags.BoolVar(&q.Denied, "denied", false, "only denied requests")
	flags.Var(cli.SinceFlag(&q.Since, a.Now), "since", "only records since then: 10m, 4h, 2d, or a time such as 2026-01-31T15:04:05Z")
	q.Limit = 100
	cli.Count(flags, &q.Limit, "limit", "print at most this many, the newest; 0 means all; not with --follow")
	list := a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		if len(args) > 0 {
			q.Sandbox = args[0]
		}
		if follow {
			return hintAtJob(followEgress(ctx, a, c, q), q)
		}
		return hintAtJob(listEgress(ctx, a, c, q), q)
	})
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if follow && flags.Changed("limit") {
			return work.UsageErrorf("--limit cannot be used with --follow").WithHint("use --since to choose the first record")
		}
		return list(cmd, args)
	}
	return cmd
}

// hintAtJob adds to the error for a destroyed sandbox where its records are.
func hintAtJob(err error, q client.EgressQuery) error {
	e, ok := errors.AsType[*agentlab.Error](err)
	if !ok || e.Code != agentlab.CodeNotFound || q.Sandbox == "" || q.JobID != "" {
		return err
	}
	const job = "the records of a job remain when its sandbox is destroyed: agentlab egress log --job JOB"
	if e.Hint != "" {
		return e.WithHint("%s; %s", e.Hint, job)
	}
	return e.WithHint(job)
}

func followEgress(ctx context.Context, a *cli.App, c *client.Client, q client.EgressQuery) error {
	if q.Sandbox == "" && q.JobID == "" && q.Since.IsZero() {
		q.After = -1 // from now on
	}
	return cli.Each(c.FollowEgress(ctx, q), func(r api.EgressRecord) error { return printEgress(a, r) })
}

func listEgress(ctx context.Context, a *cli.App, c *client.Client, q client.EgressQuery) error {
	everything, limit := q.Limit == 0, q.Limit
	switch {
	case everything:
		q.Oldest, q.Limit = true, 1000
	case limit < maxEgressList:
		q.Limit++ // one more shows whether the list is cut
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
			if err := printEgress(a, r); err != nil {
				return err
			}
			q.After = r.ID
		}
		if cut {
			a.Progressf("showing the newest %s; '--limit 0' shows all", agentlab.Plural(limit, "record"))
		}
		if !everything || list.Next == "" {
			return nil
		}
	}
}

func printEgress(a *cli.App, r api.EgressRecord) error {
	if a.JSON {
		return a.PrintJSONLine(r)
	}
	if r.Seq == 0 {
		_, err := fmt.Fprintf(a.Stdout, "%s  %d  %d decisions not recorded: the rate limit was exceeded\n", work.LocalTime(r.Time), r.VMID, r.Dropped)
		return err
	}
	line := fmt.Sprintf("%s  %d  %-7s  %-4s  %s  [%s]", work.LocalTime(r.Time), r.VMID, verdict(r.Allow), r.Proto, egressTarget(r.Name, r.Addr, r.Port), r.Rule)
	if r.Count > 1 {
		line += fmt.Sprintf("  %d times in %s", r.Count, r.Last.Sub(r.Time).Round(100*time.Millisecond))
	}
	if r.Error != "" {
		line += "  failed: " + r.Error
	}
	if r.Dropped > 0 {
		line += fmt.Sprintf("  (%d before it not recorded)", r.Dropped)
	}
	_, err := fmt.Fprintln(a.Stdout, agentlab.WithoutControls(line))
	return err
}

// egressTarget formats a target: github.com (140.82.112.3):443.
func egressTarget(name, addr string, port int) string {
	out := name
	switch {
	case name == "" && port != 0:
		return net.JoinHostPort(addr, strconv.Itoa(port))
	case name == "":
		return cli.OrDash(addr)
	case addr != "":
		out += " (" + addr + ")"
	}
	if port != 0 {
		out += ":" + strconv.Itoa(port)
	}
	return out
}

// EgressSummary prints the egress decisions in 'job show'.
func EgressSummary(a *cli.App, s *api.EgressSummary) error {
	if s == nil || s.Allowed+s.Denied+s.Dropped == 0 {
		return nil
	}
	fmt.Fprintf(a.Stdout, "\nNetwork: %d allowed, %d denied", s.Allowed, s.Denied)
	if s.Dropped > 0 {
		fmt.Fprintf(a.Stdout, ", %d more not recorded", s.Dropped)
	}
	fmt.Fprintln(a.Stdout)
	if len(s.Private) > 0 {
		t := cli.NewTable(a.Stdout, "  PRIVATE, OPENED", "TIMES", "PROTO", "RULE")
		for _, p := range s.Private {
			t.Row("  "+egressTarget(p.Name, p.Addr, p.Port), p.Count, p.Proto, p.Rule)
		}
		if err := t.Flush(); err != nil {
			return err
		}
	}
	if len(s.Targets) == 0 {
		return nil
	}
	t := cli.NewTable(a.Stdout, "  DENIED", "TIMES", "PROTO", "RULE")
	for _, d := range s.Targets {
		t.Row("  "+egressTarget(d.Name, d.Addr, d.Port), d.Count, d.Proto, d.Rule)
	}
	if s.More > 0 {
		t.Row(fmt.Sprintf("  and %d more", s.More), "", "", "")
	}
	return t.Flush()
}

// atMostOne is cobra.MaximumNArgs(1) with an error that names the argument.
func atMostOne(name string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) > 1 {
			return work.UsageErrorf("unexpected argument %q after %s", args[1], name).WithHint("usage: %s", cmd.UseLine())
		}
		return nil
	}
}

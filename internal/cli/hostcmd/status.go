package hostcmd

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/work"
)

func statusCmd(a *cli.App) *cobra.Command {
	return &cobra.Command{
		Use: "status", Short: "Show the daemon, its backend, sandboxes and jobs",
		Long: `Show the daemon, its backend, the number of sandboxes and jobs, and the findings
of the last check of the host, each with a remedy. The check can be a minute old;
'agentlab init' runs a new one.

The exit code is 1 if a finding is an error: no sandbox can be started then. It
is 0 if there are only warnings.`,
		Args: cli.ExactArgs(),
		RunE: a.RunE(func(ctx context.Context, c *client.Client, _ []string) error {
			s, err := c.Status(ctx)
			if err != nil {
				return err
			}
			if err := a.Emit(s, func() error { return printStatus(a, s) }); err != nil {
				return err
			}
			return findingsError(s.Findings)
		}),
	}
}

// findingsError returns the exit code for findings.
func findingsError(all []api.Finding) error {
	if slices.ContainsFunc(all, func(f api.Finding) bool { return f.Level == levelError }) {
		return work.ExitStatus(cli.ExitFailure)
	}
	return nil
}

func printStatus(a *cli.App, s api.Status) error {
	t := cli.NewTable(a.Stdout, "Daemon:", fmt.Sprintf("%s, pid %d, up %s", s.Version, s.PID, a.Age(s.StartedAt)))
	backend := s.Backend
	if s.Accel != "" {
		backend += " (" + s.Accel + ")"
	}
	t.Row("Backend:", backend)
	t.Optional("Home:", s.Home)
	t.Optional("State:", s.StateDir) // an earlier daemon does not send it
	t.Optional("Listens:", s.Listen)
	t.Row("Sandboxes:", counts(s.Sandboxes))
	for _, p := range s.WarmPool {
		t.Row("Warm pool:", fmt.Sprintf("%d of %d with image %s and profile %s", p.Ready, p.Count, p.Image, p.Profile))
	}
	if m := s.MemoryTotal; m.Sandboxes > 0 {
		t.Row("Host memory:", fmt.Sprintf("%s of %s, without shared memory", work.ByteSize(m.UniqueBytes), agentlab.Plural(m.Sandboxes, "running sandbox")))
	}
	t.Row("Jobs:", counts(s.Jobs))
	if err := t.Flush(); err != nil {
		return err
	}
	return printFindings(a, s.Findings)
}

// printFindings prints findings, each with its remedy.
func printFindings(a *cli.App, all []api.Finding) error {
	for _, f := range all {
		fmt.Fprintf(a.Stdout, "%s: %s: %s\n", f.Level, agentlab.WithoutControls(f.Name), agentlab.WithoutControls(f.Detail))
		if f.Remedy != "" {
			fmt.Fprintf(a.Stdout, "  → %s\n", agentlab.WithoutControls(f.Remedy))
		}
	}
	return nil
}

func counts(m map[string]int) string {
	var parts []string
	for _, k := range slices.Sorted(maps.Keys(m)) {
		if m[k] > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", m[k], k))
		}
	}
	if len(parts) == 0 {
		return "none"
	}
	return strings.Join(parts, ", ")
}

func eventsCmd(a *cli.App) *cobra.Command {
	var follow bool
	var q client.EventQuery
	cmd := &cobra.Command{Use: "events", Short: "Show events of sandboxes, jobs and the daemon", Args: cli.ExactArgs()}
	flags := cmd.Flags()
	flags.BoolVarP(&follow, "follow", "f", false, "print new events as they happen")
	cli.Choice(flags, &q.Kind, "kind", agentlab.EventKinds, "only events of this kind, e.g. job.status")
	flags.StringVar(&q.Sandbox, "sandbox", "", "only events of this sandbox")
	flags.StringVar(&q.JobID, "job", "", "only events of this job")
	flags.Int64Var(&q.After, "after", 0, "only events with a larger ID")
	q.Limit = 100
	cli.Between(flags, &q.Limit, "limit", 1, 10000, "print at most this many: the newest, or the first ones after --after")
	cmd.MarkFlagsMutuallyExclusive("limit", "follow")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, _ []string) error {
		if follow {
			if q.After == 0 && q.Sandbox == "" && q.JobID == "" {
				q.After = -1 // from now on
			}
			return cli.Each(c.FollowEvents(ctx, q), func(e api.Event) error { return printEvent(a, e) })
		}
		list, err := c.Events(ctx, q)
		if err != nil {
			return err
		}
		for _, e := range list.Items {
			if err := printEvent(a, e); err != nil {
				return err
			}
		}
		return nil
	})
	return cmd
}

func printEvent(a *cli.App, e api.Event) error {
	if a.JSON {
		return a.PrintJSONLine(e)
	}
	about := cli.OrDash(e.JobID)
	if e.JobID == "" && e.SandboxVMID != 0 {
		about = fmt.Sprint(e.SandboxVMID)
	}
	_, err := fmt.Fprintf(a.Stdout, "%s  %-16s %-18s %s\n", work.LocalTime(e.Time), e.Kind, about, agentlab.WithoutControls(e.Message))
	return err
}

package jobcmd

import (
	"context"
	"io"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/bounded"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/source"
)

func jobDiffCmd(a *cli.App) *cobra.Command {
	var repo string
	var stat bool
	cmd := &cobra.Command{
		Use:   "diff JOB",
		Short: "Show the uncommitted changes of a job's agent",
		Long: `Show the uncommitted changes of a job's agent, against its last commit. Nothing
is fetched into the repository, which must have the commit that the job started
from. For the commits of the job see 'agentlab job fetch'. For a job without a
result, the changes are those of its last checkpoint.

On a terminal, the pager of git shows them. Elsewhere they are a patch for
'git apply', binary files included.`,
		Args: cli.ExactArgs("JOB"),
	}
	cmd.Flags().StringVar(&repo, "repo", ".", "path of the repository of the job")
	cmd.Flags().BoolVar(&stat, "stat", false, "list the files instead of their content")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		j, err := c.Job(ctx, args[0])
		if err != nil {
			return err
		}
		if source.NoChanges(j) {
			return nothingToDiff(a, j, nil, stat)
		}
		return source.WithResult(ctx, a, c, j, repo, func(b *gitsafe.Bundle, _ string) error {
			if source.WithoutChanges(b, j) {
				return nothingToDiff(a, j, b, stat)
			}
			return ShowChanges(ctx, a, b, source.OfJob(j, b), stat)
		})
	})
	return cmd
}

// nothingToDiff says that a job has no uncommitted changes; b is nil without a bundle.
func nothingToDiff(a *cli.App, j api.Job, b *gitsafe.Bundle, stat bool) error {
	a.Progressf("job %s has no uncommitted changes", j.ID)
	source.NoteModuleDiffs(a, j)
	return a.Emit(source.OfJob(j, b).Document([]source.ChangedFile{}, "", stat), cli.Silent)
}

// ShowChanges prints the uncommitted changes in a bundle.
func ShowChanges(ctx context.Context, a *cli.App, b *gitsafe.Bundle, of source.Source, stat bool) error {
	ch, err := source.Open(ctx, b, of)
	if err != nil {
		return err
	}
	if a.JSON {
		return diffJSON(ctx, a, ch, stat)
	}
	format := "--binary" // a patch that can be applied
	if _, tty := work.TerminalOf(a.Stdout); tty {
		format = "--patch"
	}
	if stat {
		format = "--stat"
	}
	return a.Page(ctx, !stat, func(w io.Writer) error { return ch.Diff(ctx, w, format) })
}

func diffJSON(ctx context.Context, a *cli.App, ch source.Changes, stat bool) error {
	list, err := ch.List(ctx)
	if err != nil {
		return err
	}
	counts := bounded.Head{Max: gitsafe.MaxNames, Fail: gitsafe.ErrOutputTooLarge}
	if err := ch.Diff(ctx, &counts, "--numstat"); err != nil {
		return err
	}
	lines := strings.Split(strings.TrimSpace(counts.String()), "\n")
	files := []source.ChangedFile{}
	for i, e := range list {
		f := source.ChangedFile{Path: e.Path, Status: map[byte]string{'A': "added", 'D': "deleted"}[e.Status]}
		if f.Status == "" {
			f.Status = "modified"
		}
		if i < len(lines) { // in the same order
			n := strings.SplitN(lines[i], "\t", 3)
			f.Added, _ = strconv.Atoi(n[0])
			if len(n) > 1 {
				f.Deleted, _ = strconv.Atoi(n[1])
			}
		}
		files = append(files, f)
	}
	patch := bounded.Head{Max: source.MaxJSONPatch, Fail: gitsafe.ErrOutputTooLarge}
	if !stat {
		if err := ch.Diff(ctx, &patch, "--binary"); err != nil {
			return err
		}
	}
	return a.PrintJSON(ch.Of.Document(files, patch.String(), stat))
}

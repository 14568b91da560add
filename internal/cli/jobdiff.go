package cli

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/bounded"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
)

// Limits on the uncommitted changes of a job.
const (
	maxChanges = 50000 // files

	maxJSONPatch = 64 << 20 // bytes of a patch under --json
)

func (a *App) jobDiffCmd() *cobra.Command {
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
		Args: exactArgs("JOB"),
	}
	cmd.Flags().StringVar(&repo, "repo", ".", "path of the repository of the job")
	cmd.Flags().BoolVar(&stat, "stat", false, "list the files instead of their content")
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, args []string) error {
		j, err := c.Job(ctx, args[0])
		if err != nil {
			return err
		}
		if noChanges(j) {
			return a.nothingToDiff(j, nil, stat)
		}
		return a.withResult(ctx, c, j, repo, func(b *gitsafe.Bundle, _ string) error {
			if withoutChanges(b, j) {
				return a.nothingToDiff(j, b, stat)
			}
			return a.showChanges(ctx, b, jobSource(j, b), stat)
		})
	})
	return cmd
}

// nothingToDiff says that a job has no uncommitted changes; b is nil without a bundle.
func (a *App) nothingToDiff(j api.Job, b *gitsafe.Bundle, stat bool) error {
	a.Progressf("job %s has no uncommitted changes", j.ID)
	a.noteModuleDiffs(j)
	return a.emit(jobSource(j, b).document([]changedFile{}, "", stat), silent)
}

// noChanges reports whether a job has ended without uncommitted changes, as far as its
// result says. The bundle of a job that has not completed can have others.
func noChanges(j api.Job) bool {
	status := agentlab.JobStatus(j.Status)
	return hasResult(j) && !claimsChanges(j) && (status == agentlab.JobCompleted || status.Final() && len(workOf(j)) == 0)
}

func claimsChanges(j api.Job) bool { return j.Result.Uncommitted > 0 || j.Result.Dirty }

// withoutChanges reports whether a bundle of j has no uncommitted changes. It is false for
// a result that lacks the changes of which it says that there are some.
func withoutChanges(b *gitsafe.Bundle, j api.Job) bool {
	return b.Header.Refs[guestapi.RefChanges] == "" && (checkpointOf(b, j) != nil || !claimsChanges(j))
}

// moduleDiffs returns the artifacts with changes inside submodules.
func moduleDiffs(j api.Job) (names []string) {
	for _, f := range j.Artifacts {
		if strings.HasPrefix(f.Path, "submodules/") && strings.HasSuffix(f.Path, ".diff") {
			names = append(names, f.Path)
		}
	}
	return names
}

func (a *App) noteModuleDiffs(j api.Job) {
	if names := moduleDiffs(j); len(names) > 0 {
		a.Progressf("note: changes inside submodules are stored as artifacts: %s", work.JoinNames(names))
	}
}

// changeSource is where uncommitted changes come from: a job or a session.
type changeSource struct {
	kind, id    string
	name        string // of a session
	dir         string // of a session's work tree
	commits     string // command that gets the commits
	apply, diff string // commands for the uncommitted changes
	merge       string // how conflicts are resolved
	newCommits  int    // that the source has besides
	checkpoint  *checkpoint
}

func jobSource(j api.Job, b *gitsafe.Bundle) changeSource {
	s := changeSource{
		kind: "job", id: j.ID, commits: "agentlab job fetch " + j.ID,
		apply: "agentlab job apply " + j.ID, diff: "agentlab job diff " + j.ID,
		merge:      fmt.Sprintf("agentlab job fetch --with-changes %[1]s, then git cherry-pick --no-commit refs/agentlab/%[1]s-changes", j.ID),
		newCommits: j.Result.Commits,
	}
	if b != nil {
		s.checkpoint = checkpointOf(b, j)
	}
	return s
}

// document is the output about changed files under --json.
func (s changeSource) document(files []changedFile, patch string, stat bool) map[string]any {
	out := map[string]any{s.kind + "_id": s.id, "files": files}
	if !stat {
		out["patch"] = patch
	}
	if s.checkpoint != nil {
		out["checkpoint"] = s.checkpoint
	}
	return out
}

// showChanges prints the uncommitted changes in a bundle.
func (a *App) showChanges(ctx context.Context, b *gitsafe.Bundle, of changeSource, stat bool) error {
	ch, err := openChanges(ctx, b, of)
	if err != nil {
		return err
	}
	if a.json {
		return a.diffJSON(ctx, ch, stat)
	}
	format := "--binary" // a patch that can be applied
	if _, tty := work.TerminalOf(a.Stdout); tty {
		format = "--patch"
	}
	if stat {
		format = "--stat"
	}
	return a.page(ctx, !stat, func(w io.Writer) error { return ch.diff(ctx, w, format) })
}

// changes are the uncommitted changes of a source: the difference of two trees.
type changes struct {
	*gitsafe.Bundle
	from, to string
	of       changeSource
}

// openChanges returns the uncommitted changes in a bundle.
func openChanges(ctx context.Context, b *gitsafe.Bundle, of changeSource) (changes, error) {
	commit := b.Header.Refs[guestapi.RefChanges]
	if commit == "" {
		return changes{}, agentlab.Errorf(agentlab.CodeNotFound, "%s %s has no uncommitted changes", of.kind, of.id).
			WithHint("fetch its commits: %s", of.commits)
	}
	ch := changes{Bundle: b, from: gitsafe.EmptyTree, to: commit, of: of}
	if parent, err := b.Git(ctx, gitsafe.Command{}, "rev-parse", "--verify", "--quiet", commit+"^1^{commit}"); err == nil {
		ch.from = parent
	} else if ctx.Err() != nil {
		return changes{}, ctx.Err()
	}
	return ch, nil
}

// diff writes the changes in a format of git, without running programs that the
// repository configures.
func (ch changes) diff(ctx context.Context, w io.Writer, format string) error {
	_, err := ch.Git(ctx, gitsafe.Command{Stdout: w}, "diff-tree", "-r", "--no-renames", "--no-ext-diff", "--no-textconv", "--no-color", format, ch.from, ch.to)
	if err != nil && ctx.Err() == nil {
		return agentlab.Errorf(agentlab.CodeConflict, "git cannot show the changes: %s", agentlab.WithoutControls(err.Error()))
	}
	return err
}

// changedFile is one file of the changes under --json.
type changedFile struct {
	Path    string `json:"path"`
	Status  string `json:"status"` // added, modified or deleted
	Added   int    `json:"added"`  // lines; 0 for a binary file
	Deleted int    `json:"deleted"`
}

func (a *App) diffJSON(ctx context.Context, ch changes, stat bool) error {
	list, err := ch.list(ctx)
	if err != nil {
		return err
	}
	counts := bounded.Head{Max: gitsafe.MaxNames, Fail: gitsafe.ErrOutputTooLarge}
	if err := ch.diff(ctx, &counts, "--numstat"); err != nil {
		return err
	}
	lines := strings.Split(strings.TrimSpace(counts.String()), "\n")
	files := []changedFile{}
	for i, e := range list {
		f := changedFile{Path: e.Path, Status: map[byte]string{'A': "added", 'D': "deleted"}[e.Status]}
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
	patch := bounded.Head{Max: maxJSONPatch, Fail: gitsafe.ErrOutputTooLarge}
	if !stat {
		if err := ch.diff(ctx, &patch, "--binary"); err != nil {
			return err
		}
	}
	return a.printJSON(ch.of.document(files, patch.String(), stat))
}

// list returns the files that differ, ordered by path.
func (ch changes) list(ctx context.Context) ([]gitsafe.Change, error) {
	list, err := gitsafe.RawDiff(ctx, ch.Git, ch.from, ch.to, maxChanges)
	if err == nil && len(list) > maxChanges {
		return nil, agentlab.Errorf(agentlab.CodeLimit, "%d files have changed, more than the maximum of %d", len(list), maxChanges).
			WithHint("merge them with git instead: %s", ch.of.merge)
	}
	return list, err
}

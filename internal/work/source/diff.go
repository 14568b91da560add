package source

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
)

// Limits on the uncommitted changes of a job.
const (
	maxChanges = 50000 // files

	MaxJSONPatch = 64 << 20 // bytes of a patch under --json
)

// NoChanges reports whether a job has ended without uncommitted changes, as far as its
// result says. The bundle of a job that has not completed can have others.
func NoChanges(j api.Job) bool {
	status := agentlab.JobStatus(j.Status)
	return hasResult(j) && !claimsChanges(j) && (status == agentlab.JobCompleted || status.Final() && len(workOf(j)) == 0)
}

func claimsChanges(j api.Job) bool { return j.Result.Uncommitted > 0 || j.Result.Dirty }

// WithoutChanges reports whether a bundle of j has no uncommitted changes. It is false for
// a result that lacks the changes of which it says that there are some.
func WithoutChanges(b *gitsafe.Bundle, j api.Job) bool {
	return b.Header.Refs[guestapi.RefChanges] == "" && (checkpointOf(b, j) != nil || !claimsChanges(j))
}

// ModuleDiffs returns the artifacts with changes inside submodules.
func ModuleDiffs(j api.Job) (names []string) {
	for _, f := range j.Artifacts {
		if strings.HasPrefix(f.Path, "submodules/") && strings.HasSuffix(f.Path, ".diff") {
			names = append(names, f.Path)
		}
	}
	return names
}

// NoteModuleDiffs names the artifacts of a job with changes inside submodules.
func NoteModuleDiffs(ui work.UI, j api.Job) {
	if names := ModuleDiffs(j); len(names) > 0 {
		ui.Progressf("note: changes inside submodules are stored as artifacts: %s", work.JoinNames(names))
	}
}

// Source is where uncommitted changes come from: a job or a session.
type Source struct {
	Kind, ID    string
	Name        string // of a session
	Dir         string // of a session's work tree
	Commits     string // command that gets the commits
	Apply, Diff string // commands for the uncommitted changes
	Merge       string // how conflicts are resolved
	NewCommits  int    // that the source has besides
	checkpoint  *checkpoint
}

// OfJob returns the source of the changes of a job; b is nil if it has no bundle.
func OfJob(j api.Job, b *gitsafe.Bundle) Source {
	s := Source{
		Kind: "job", ID: j.ID, Commits: "agentlab job fetch " + j.ID,
		Apply: "agentlab job apply " + j.ID, Diff: "agentlab job diff " + j.ID,
		Merge:      fmt.Sprintf("agentlab job fetch --with-changes %[1]s, then git cherry-pick --no-commit refs/agentlab/%[1]s-changes", j.ID),
		NewCommits: j.Result.Commits,
	}
	if b != nil {
		s.checkpoint = checkpointOf(b, j)
	}
	return s
}

// Document is the output about changed files under --json.
func (s Source) Document(files []ChangedFile, patch string, stat bool) map[string]any {
	out := map[string]any{s.Kind + "_id": s.ID, "files": files}
	if !stat {
		out["patch"] = patch
	}
	if s.checkpoint != nil {
		out["checkpoint"] = s.checkpoint
	}
	return out
}

// Changes are the uncommitted changes of a source: the difference of two trees.
type Changes struct {
	*gitsafe.Bundle
	from, to string
	Of       Source
}

// Open returns the uncommitted changes in a bundle.
func Open(ctx context.Context, b *gitsafe.Bundle, of Source) (Changes, error) {
	commit := b.Header.Refs[guestapi.RefChanges]
	if commit == "" {
		return Changes{}, agentlab.Errorf(agentlab.CodeNotFound, "%s %s has no uncommitted changes", of.Kind, of.ID).
			WithHint("fetch its commits: %s", of.Commits)
	}
	ch := Changes{Bundle: b, from: gitsafe.EmptyTree, to: commit, Of: of}
	if parent, err := b.Git(ctx, gitsafe.Command{}, "rev-parse", "--verify", "--quiet", commit+"^1^{commit}"); err == nil {
		ch.from = parent
	} else if ctx.Err() != nil {
		return Changes{}, ctx.Err()
	}
	return ch, nil
}

// Diff writes the changes in a format of git, without running programs that the
// repository configures.
func (ch Changes) Diff(ctx context.Context, w io.Writer, format string) error {
	_, err := ch.Git(ctx, gitsafe.Command{Stdout: w}, "diff-tree", "-r", "--no-renames", "--no-ext-diff", "--no-textconv", "--no-color", format, ch.from, ch.to)
	if err != nil && ctx.Err() == nil {
		return agentlab.Errorf(agentlab.CodeConflict, "git cannot show the changes: %s", agentlab.WithoutControls(err.Error()))
	}
	return err
}

// ChangedFile is one file of the changes under --json.
type ChangedFile struct {
	Path    string `json:"path"`
	Status  string `json:"status"` // added, modified or deleted
	Added   int    `json:"added"`  // lines; 0 for a binary file
	Deleted int    `json:"deleted"`
}

// List returns the files that differ, ordered by path.
func (ch Changes) List(ctx context.Context) ([]gitsafe.Change, error) {
	list, err := gitsafe.RawDiff(ctx, ch.Git, ch.from, ch.to, maxChanges)
	if err == nil && len(list) > maxChanges {
		return nil, agentlab.Errorf(agentlab.CodeLimit, "%d files have changed, more than the maximum of %d", len(list), maxChanges).
			WithHint("merge them with git instead: %s", ch.Of.Merge)
	}
	return list, err
}

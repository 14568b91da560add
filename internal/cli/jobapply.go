package cli

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/lfs"
	"github.com/agentlab-vm/agentlab/internal/returncheck"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
)

func (a *App) jobApplyCmd() *cobra.Command {
	var repo string
	var o applyOptions
	cmd := &cobra.Command{
		Use:   "apply JOB [PATH...]",
		Short: "Apply a job's uncommitted changes to the work tree",
		Long: `Apply the uncommitted changes of a job's agent to the work tree of a local
repository; with paths, only those of these files and directories. A file that
differs from the one that the agent changed is merged (three-way). If a file
cannot be merged, nothing is applied. The index and branches do not change. Links that
lead out of the work tree are left out.

Merging into files with uncommitted changes requires confirmation or --force.
For the commits of the job see 'agentlab job fetch'. For a job without a result,
the changes are those of its last checkpoint.`,
		Args: cobra.MinimumNArgs(1),
	}
	cmd.Flags().StringVar(&repo, "repo", ".", "path of the repository")
	applyFlags(cmd, &o)
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, args []string) error {
		j, err := c.Job(ctx, args[0])
		if err != nil {
			return err
		}
		if noChanges(j) && len(args) == 1 {
			return a.nothingToApply(j, nil)
		}
		return a.withResult(ctx, c, j, repo, func(b *gitsafe.Bundle, dir string) error {
			if withoutChanges(b, j) && len(args) == 1 {
				return a.nothingToApply(j, b)
			}
			o.paths = args[1:]
			return a.applyChanges(ctx, b, jobSource(j, b), dir, o)
		})
	})
	return cmd
}

// nothingToApply says that a job has no uncommitted changes; b is nil without a bundle.
func (a *App) nothingToApply(j api.Job, b *gitsafe.Bundle) error {
	a.Progressf("nothing to apply: job %s has no uncommitted changes", j.ID)
	a.noteModuleDiffs(j)
	return a.emit(jobSource(j, b).applied([]string{}, 0, []string{}, nil), silent)
}

// applyOptions are what a command that applies changes was asked for.
type applyOptions struct {
	paths   []string // only these files and directories; none means all
	exclude []string // not these
	force   bool     // merge into files with uncommitted changes
}

func applyFlags(cmd *cobra.Command, o *applyOptions) {
	cmd.Flags().BoolVar(&o.force, "force", false, "merge into files with uncommitted changes without confirmation")
	cmd.Flags().StringSliceVar(&o.exclude, "exclude", nil, "leave out a file or directory (repeatable)")
}

// applied is the output about applied changes under --json.
func (s changeSource) applied(files []string, unchanged int, skipped []string, found []returncheck.Finding) map[string]any {
	out := map[string]any{s.kind + "_id": s.id, "applied": files, "unchanged": unchanged, "skipped": skipped}
	if len(found) > 0 {
		out["findings"] = gitsafe.FindingsJSON(found)
	}
	if s.checkpoint != nil {
		out["checkpoint"] = s.checkpoint
	}
	return out
}

// applyOutcome says what was applied to a work tree.
type applyOutcome struct {
	files    []string              // that were written or removed
	same     int                   // files that had the changes already
	skipped  []string              // submodules
	left     []returncheck.Finding // links that are left out
	found    []returncheck.Finding // all findings, with left
	pointers []string              // files of Git LFS of which only the pointer is written
}

// applyChanges applies the uncommitted changes in a bundle to the work tree of the user.
// dir is for temporary files. If a file cannot be merged, or the user does not agree,
// nothing is applied.
func applyChanges(ctx context.Context, ui work.UI, b *gitsafe.Bundle, of changeSource, dir string, o applyOptions) (got applyOutcome, err error) {
	unlock, err := lockRepo(ctx, ui, b.Path, false)
	if err != nil {
		return got, err
	}
	defer unlock()
	ch, err := openChanges(ctx, b, of)
	if err != nil {
		return got, err
	}
	list, err := ch.list(ctx)
	if err != nil {
		return got, err
	}
	w, err := openWorkTree(ctx, b.Path)
	if err != nil {
		return got, err
	}
	defer func() { _ = w.root.Close() }()
	if list, err = w.chosen(list, o, of); err != nil {
		return got, err
	}
	p := &applyPlan{ch: ch, w: w, dir: dir, room: maxApplied}
	if p.applied, err = readApplied(ctx, w.top, of.appliedRef(w.top)); err != nil {
		return got, err
	}
	if err := p.make(ctx, list); err != nil {
		return got, err
	}
	found, err := p.judge(ctx)
	if err != nil {
		return got, err
	}
	how := gitsafe.Admission{Dir: b.Path, Verb: "applied", Show: of.diff, Instead: "leave them out: " + of.apply + " --exclude PATH"}
	if err := gitsafe.Admit(ctx, ui, found, how); err != nil {
		return got, err
	}
	if err := p.merge(ctx); err != nil {
		return got, err
	}
	dirty := p.dirty()
	if len(dirty) > 0 && !o.force && !ui.Confirm(fmt.Sprintf("These files have uncommitted changes:\n  %s\nMerge the changes of the %s into them?", work.JoinNames(dirty), of.kind)) {
		return got, agentlab.Errorf(agentlab.CodeConflict, "files with uncommitted changes would be changed: %s", work.JoinNames(dirty)).
			WithHint("commit or stash them, or use --force to merge into them; nothing was applied")
	}
	if err := p.checkOut(ctx); err != nil {
		return got, agentlab.Errorf(agentlab.CodeUnavailable, "git cannot convert the files: %s; nothing was applied", agentlab.WithoutControls(err.Error()))
	}
	if err := p.apply(); err != nil {
		return got, err
	}
	if err := p.record(ctx); err != nil {
		ui.Progressf("note: a later command cannot know what was applied, and may find conflicts: %s", agentlab.WithoutControls(err.Error()))
	}
	return p.outcome(found), nil
}

// applyChanges applies the uncommitted changes in a bundle to the work tree, and prints
// what was applied.
func (a *App) applyChanges(ctx context.Context, b *gitsafe.Bundle, of changeSource, dir string, o applyOptions) error {
	got, err := applyChanges(ctx, a, b, of, dir, o)
	if err != nil {
		return err
	}
	doc := of.applied(got.files, got.same, got.skipped, got.found)
	if len(got.pointers) > 0 {
		doc["lfs_pointers"] = got.pointers
	}
	return a.emit(doc, func() error {
		for _, name := range got.files {
			fmt.Fprintln(a.Stdout, agentlab.WithoutControls(name))
		}
		for _, name := range got.skipped {
			a.Progressf("note: the submodule %s is not changed", agentlab.WithoutControls(name))
		}
		for _, f := range got.left {
			a.Progressf("note: %s is left out: it %s", agentlab.WithoutControls(f.Path), agentlab.WithoutControls(f.Why))
		}
		gitsafe.NoteNamed(a, got.found)
		if len(got.pointers) > 0 {
			a.Progressf("note: only the pointers of %s are written; to get the content, commit them, then:\n  → git lfs checkout", gitsafe.LFSNames(got.pointers))
		}
		a.Progressf("applied %s; %d had the changes already\n  → git diff", agentlab.Plural(len(got.files), "file"), got.same)
		if n := of.newCommits; n > 0 {
			a.Progressf("note: the %s also has %s\n  → %s", of.kind, agentlab.Plural(n, "commit"), of.commits)
		}
		return nil
	})
}

// outcome returns what the plan has applied.
func (p *applyPlan) outcome(found []returncheck.Finding) applyOutcome {
	got := applyOutcome{files: []string{}, same: p.same, skipped: append([]string{}, p.skipped...), left: p.left, found: append(p.left, found...), pointers: p.pointers()}
	for _, s := range p.steps {
		got.files = append(got.files, s.Path)
	}
	return got
}

// pointers returns the files of Git LFS that were written. Git takes the content itself for
// another file unless its filter runs, and no filter does.
func (p *applyPlan) pointers() (names []string) {
	for _, s := range p.steps {
		st, err := p.w.root.Lstat(s.Path)
		if err != nil || !st.Mode().IsRegular() || st.Size() > lfs.MaxPointer {
			continue
		}
		if text, err := p.w.root.ReadFile(s.Path); err == nil {
			if _, is := lfs.Parse(text); is {
				names = append(names, s.Path)
			}
		}
	}
	return names
}

// workTree is the work tree of the user's repository.
type workTree struct {
	root  *os.Root
	top   string
	index map[string]indexEntry // tracked files
	dirty map[string]bool       // tracked files with uncommitted changes
	// hidden are tracked files that git status ignores (assume-unchanged,
	// skip-worktree): they may have changes that it does not report.
	hidden map[string]bool
}

type indexEntry struct{ mode, blob string }

func openWorkTree(ctx context.Context, path string) (*workTree, error) {
	fail := func(err error) (*workTree, error) {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "%s has no usable work tree: %v", path, err).WithHint("set --repo to the path of a work tree")
	}
	top, err := gitsafe.Git(ctx, path, "rev-parse", "--show-toplevel")
	if err != nil {
		return fail(err)
	}
	env, err := gitsafe.DisableFilters(ctx, top)
	if err != nil {
		return fail(err)
	}
	w := &workTree{top: top, index: map[string]indexEntry{}, dirty: map[string]bool{}, hidden: map[string]bool{}}
	files, err := gitsafe.Command{Raw: true}.Run(ctx, top, "ls-files", "--stage", "-v", "-z")
	if err != nil {
		return fail(err)
	}
	for line := range strings.SplitSeq(strings.TrimSuffix(files, "\x00"), "\x00") {
		info, name, _ := strings.Cut(line, "\t")
		if f := strings.Fields(info); len(f) == 4 {
			w.index[name] = indexEntry{f[1], f[2]}
			w.hidden[name] = f[0] == "S" || f[0] == strings.ToLower(f[0])
		}
	}
	status, err := gitsafe.Command{Env: env, Raw: true}.Run(ctx, top, "status", "--porcelain=v1", "-z", "--no-renames", "--untracked-files=no", "--ignore-submodules=all")
	if err != nil {
		return fail(err)
	}
	for line := range strings.SplitSeq(strings.TrimSuffix(status, "\x00"), "\x00") {
		if len(line) > 3 {
			w.dirty[line[3:]] = true
		}
	}
	if w.root, err = os.OpenRoot(top); err != nil {
		return fail(err)
	}
	return w, nil
}

// chosen checks the paths of all changes, and returns the changes of the files and
// directories that are asked for. Names are relative to the current directory.
func (w *workTree) chosen(list []gitsafe.Change, o applyOptions, of changeSource) ([]gitsafe.Change, error) {
	for _, c := range list {
		if why := returncheck.BadPath(c.Path); why != "" {
			return nil, agentlab.Errorf(agentlab.CodeDenied, "the changes of the %s contain the path %q, which %s; nothing was applied", of.kind, c.Path, why)
		}
	}
	selected := make([]bool, len(list))
	for i := range selected {
		selected[i] = len(o.paths) == 0
	}
	for _, p := range o.paths {
		if err := w.choose(list, selected, p, true, of); err != nil {
			return nil, err
		}
	}
	for _, p := range o.exclude {
		if err := w.choose(list, selected, p, false, of); err != nil {
			return nil, err
		}
	}
	var out []gitsafe.Change
	for i, c := range list {
		if selected[i] {
			out = append(out, c)
		}
	}
	return out, nil
}

// choose selects the changes of a file or directory, or leaves them out.
func (w *workTree) choose(list []gitsafe.Change, selected []bool, p string, take bool, of changeSource) error {
	rel, err := w.relative(p)
	if err != nil {
		return err
	}
	found := false
	for i, c := range list {
		if c.Path == rel || strings.HasPrefix(c.Path, rel+"/") || rel == "." {
			selected[i], found = take, true
		}
	}
	if !found {
		return agentlab.Errorf(agentlab.CodeNotFound, "the %s has no uncommitted change of %s", of.kind, p).WithHint("list the changes: %s --stat", of.diff)
	}
	return nil
}

// relative returns a path of the command line relative to the root of the work
// tree. Outside the work tree, paths start at its root.
func (w *workTree) relative(p string) (string, error) {
	here, err := os.Getwd()
	if err == nil {
		here, err = filepath.EvalSymlinks(here)
	}
	if err != nil {
		return "", err
	}
	if here != w.top && !strings.HasPrefix(here, w.top+"/") {
		here = w.top
	}
	if !filepath.IsAbs(p) {
		p = filepath.Join(here, p)
	}
	rel, err := filepath.Rel(w.top, p)
	if err != nil || !filepath.IsLocal(rel) {
		return "", work.UsageErrorf("%s is not in the repository %s", p, w.top)
	}
	return rel, nil
}

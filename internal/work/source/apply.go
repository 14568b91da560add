package source

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/lfs"
	"github.com/agentlab-vm/agentlab/internal/returncheck"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
)

// Options are what a command that applies changes was asked for.
type Options struct {
	Paths   []string // only these files and directories; none means all
	Exclude []string // not these
	Force   bool     // merge into files with uncommitted changes
}

// Applied is the output about applied changes under --json.
func (s Source) Applied(files []string, unchanged int, skipped []string, found []returncheck.Finding) map[string]any {
	out := map[string]any{s.Kind + "_id": s.ID, "applied": files, "unchanged": unchanged, "skipped": skipped}
	if len(found) > 0 {
		out["findings"] = gitsafe.FindingsJSON(found)
	}
	if s.checkpoint != nil {
		out["checkpoint"] = s.checkpoint
	}
	return out
}

// Applied says what was applied to a work tree.
type Applied struct {
	Files    []string              // that were written or removed
	Same     int                   // files that had the changes already
	Skipped  []string              // submodules
	Left     []returncheck.Finding // links that are left out
	Found    []returncheck.Finding // all findings, with left
	Pointers []string              // files of Git LFS of which only the pointer is written
}

// Apply applies the uncommitted changes in a bundle to the work tree of the user.
// dir is for temporary files. If a file cannot be merged, or the user does not agree,
// nothing is applied.
func Apply(ctx context.Context, ui work.UI, b *gitsafe.Bundle, of Source, dir string, o Options) (got Applied, err error) {
	unlock, err := gitsafe.LockRepo(ctx, ui, b.Path, false)
	if err != nil {
		return got, err
	}
	defer unlock()
	ch, err := Open(ctx, b, of)
	if err != nil {
		return got, err
	}
	list, err := ch.List(ctx)
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
	p := &applyPlan{ch: ch, w: w, Dir: dir, room: maxApplied}
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
	how := gitsafe.Admission{Dir: b.Path, Verb: "applied", Show: of.Diff, Instead: "leave them out: " + of.Apply + " --exclude PATH"}
	if err := gitsafe.Admit(ctx, ui, found, how); err != nil {
		return got, err
	}
	if err := p.merge(ctx); err != nil {
		return got, err
	}
	dirty := p.dirty()
	if len(dirty) > 0 && !o.Force && !ui.Confirm(fmt.Sprintf("These files have uncommitted changes:\n  %s\nMerge the changes of the %s into them?", work.JoinNames(dirty), of.Kind)) {
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

// outcome returns what the plan has applied.
func (p *applyPlan) outcome(found []returncheck.Finding) Applied {
	got := Applied{Files: []string{}, Same: p.same, Skipped: append([]string{}, p.skipped...), Left: p.left, Found: append(p.left, found...), Pointers: p.pointers()}
	for _, s := range p.steps {
		got.Files = append(got.Files, s.Path)
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

// openWorkTree reads the index and the state of the work tree at a path.
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
func (w *workTree) chosen(list []gitsafe.Change, o Options, of Source) ([]gitsafe.Change, error) {
	for _, c := range list {
		if why := returncheck.BadPath(c.Path); why != "" {
			return nil, agentlab.Errorf(agentlab.CodeDenied, "the changes of the %s contain the path %q, which %s; nothing was applied", of.Kind, c.Path, why)
		}
	}
	selected := make([]bool, len(list))
	for i := range selected {
		selected[i] = len(o.Paths) == 0
	}
	for _, p := range o.Paths {
		if err := w.choose(list, selected, p, true, of); err != nil {
			return nil, err
		}
	}
	for _, p := range o.Exclude {
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
func (w *workTree) choose(list []gitsafe.Change, selected []bool, p string, take bool, of Source) error {
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
		return agentlab.Errorf(agentlab.CodeNotFound, "the %s has no uncommitted change of %s", of.Kind, p).WithHint("list the changes: %s --stat", of.Diff)
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

// Differing returns how many files of the user differ from the uncommitted changes of a
// session in a bundle.
func Differing(ctx context.Context, b *gitsafe.Bundle) (n int, err error) {
	ch, err := Open(ctx, b, Source{Kind: "session"})
	if err != nil {
		return 0, err
	}
	list, err := ch.List(ctx)
	if err != nil {
		return 0, err
	}
	tree, err := openWorkTree(ctx, b.Path)
	if err != nil {
		return 0, err
	}
	defer func() { _ = tree.root.Close() }()
	if list, err = tree.chosen(list, Options{}, ch.Of); err != nil {
		return 0, err
	}
	p := &applyPlan{ch: ch, w: tree, Dir: b.Dir()}
	if err := p.hashOurs(ctx, list); err != nil {
		return 0, err
	}
	for _, c := range list {
		if ours, err := p.version(c.Path); err != nil || ours.Mode != c.NewMode || ours.Blob != c.NewBlob {
			n++
		}
	}
	return n, nil
}

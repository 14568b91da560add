package cli

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
)

func (a *App) jobApplyCmd() *cobra.Command {
	var repo string
	var force bool
	cmd := &cobra.Command{
		Use:   "apply JOB [PATH...]",
		Short: "Apply a job's uncommitted changes to the work tree",
		Long: `Apply the changes that a job's agent left uncommitted to the work tree of a
local repository; with paths, only those of these files and folders. A file that
differs from the one that the agent changed is merged (three-way). All files are
applied or, when one cannot be merged, none. The index and branches stay.

Files with uncommitted changes of yours are merged only after a question, or
with --force. For the commits of the job see 'agentlab job fetch'.`,
		Args: cobra.MinimumNArgs(1),
	}
	cmd.Flags().StringVar(&repo, "repo", ".", "path of the repository to apply to")
	cmd.Flags().BoolVar(&force, "force", false, "merge into files with uncommitted changes without asking")
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, args []string) error {
		j, err := c.Job(ctx, args[0])
		if err != nil {
			return err
		}
		if noChanges(j) && len(args) == 1 {
			a.progressf("nothing to apply: job %s left no uncommitted changes", j.ID)
			a.noteModuleDiffs(j)
			if a.json {
				return a.printJSON(map[string]any{"job_id": j.ID, "applied": []string{}, "unchanged": 0, "skipped": []string{}})
			}
			return nil
		}
		return withResult(ctx, c, j, repo, func(b *takenBundle, dir string) error {
			return a.applyChanges(ctx, b, j, dir, args[1:], force)
		})
	})
	return cmd
}

func (a *App) applyChanges(ctx context.Context, b *takenBundle, j api.Job, dir string, paths []string, force bool) error {
	ch, err := openChanges(ctx, b, j)
	if err != nil {
		return err
	}
	list, err := ch.list(ctx)
	if err != nil {
		return err
	}
	w, err := openWorkTree(ctx, b.path)
	if err != nil {
		return err
	}
	defer func() { _ = w.root.Close() }()
	if list, err = w.chosen(list, paths); err != nil {
		return err
	}
	p := &applyPlan{ch: ch, job: j.ID, w: w, dir: dir, room: maxApplied}
	if err := p.make(ctx, list); err != nil {
		return err
	}
	if len(p.dirty) > 0 && !force && !a.agree(fmt.Sprintf("These files have uncommitted changes:\n  %s\nMerge the job's changes into them?", someNames(p.dirty))) {
		return agentlab.Errorf(agentlab.CodeConflict, "files with uncommitted changes would be changed: %s", someNames(p.dirty)).
			WithHint("commit or stash them, or merge into them with --force; nothing was applied")
	}
	if err := p.merge(ctx); err != nil {
		return err
	}
	for _, s := range p.steps {
		if err := w.write(s); err != nil {
			return agentlab.Errorf(agentlab.CodeUnavailable, "cannot write %s: %w", plain(s.path), err).
				WithHint("mend that and run the command again; files that were applied already are left alone")
		}
	}
	return a.tellApplied(p, j)
}

func (a *App) tellApplied(p *applyPlan, j api.Job) error {
	names := []string{}
	for _, s := range p.steps {
		names = append(names, s.path)
	}
	if a.json {
		return a.printJSON(map[string]any{"job_id": j.ID, "applied": names, "unchanged": p.same, "skipped": append([]string{}, p.skipped...)})
	}
	for _, name := range names {
		fmt.Fprintln(a.Stdout, plain(name))
	}
	for _, name := range p.skipped {
		a.progressf("note: the submodule %s is not changed", plain(name))
	}
	a.progressf("applied %d file(s); %d had the changes already\n  → git diff", len(names), p.same)
	if j.Result.Commits > 0 {
		a.progressf("note: the job has %d commit(s), too\n  → agentlab job fetch %s", j.Result.Commits, j.ID)
	}
	return nil
}

// someNames joins the first names of a list.
func someNames(names []string) string {
	const most = 10
	text := plain(strings.Join(names[:min(most, len(names))], ", "))
	if n := len(names) - most; n > 0 {
		text += fmt.Sprintf(" and %d more", n)
	}
	return text
}

// agree asks a question on the terminal. Without one the answer is no.
func (a *App) agree(question string) bool {
	if _, tty := terminal(a.Stdin); !tty || a.noInput || a.json {
		return false
	}
	fmt.Fprintf(a.Stderr, "%s [y/N] ", question)
	line, _ := bufio.NewReader(a.Stdin).ReadString('\n')
	return slices.Contains([]string{"y", "yes"}, strings.ToLower(strings.TrimSpace(line)))
}

// workTree is the work tree of the user's repository.
type workTree struct {
	root  *os.Root
	top   string
	index map[string]indexEntry // tracked files
	dirty map[string]bool       // tracked files with uncommitted changes
	// hidden are tracked files that git does not look at (assume-unchanged,
	// skip-worktree): they may hold changes that it does not report.
	hidden map[string]bool
}

type indexEntry struct{ mode, blob string }

func openWorkTree(ctx context.Context, path string) (*workTree, error) {
	fail := func(err error) (*workTree, error) {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "%s has no usable work tree: %v", path, err).WithHint("give its path with --repo")
	}
	top, err := git(ctx, path, "rev-parse", "--show-toplevel")
	if err != nil {
		return fail(err)
	}
	env, err := filtersOff(ctx, top)
	if err != nil {
		return fail(err)
	}
	w := &workTree{top: top, index: map[string]indexEntry{}, dirty: map[string]bool{}, hidden: map[string]bool{}}
	files, err := gitInput{raw: true}.run(ctx, top, "ls-files", "--stage", "-v", "-z")
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
	status, err := gitInput{env: env, raw: true}.run(ctx, top, "status", "--porcelain=v1", "-z", "--no-renames", "--untracked-files=no", "--ignore-submodules=all")
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

// chosen checks the paths of all changes, and keeps those of the files and
// folders that the user names, as seen from the current folder.
func (w *workTree) chosen(list []change, paths []string) ([]change, error) {
	for _, c := range list {
		if err := safePath(c.path); err != nil {
			return nil, agentlab.Errorf(agentlab.CodeDenied, "the job's changes hold the path %q: %w; nothing was applied", c.path, err)
		}
	}
	if len(paths) == 0 {
		return list, nil
	}
	used := map[int]bool{}
	var out []change
	for _, p := range paths {
		rel, err := w.relative(p)
		if err != nil {
			return nil, err
		}
		found := false
		for i, c := range list {
			if c.path != rel && !strings.HasPrefix(c.path, rel+"/") && rel != "." {
				continue
			}
			found = true
			if !used[i] {
				used[i] = true
				out = append(out, c)
			}
		}
		if !found {
			return nil, agentlab.Errorf(agentlab.CodeNotFound, "the job has no uncommitted change of %s", p).WithHint("see 'agentlab job diff --stat'")
		}
	}
	return out, nil
}

// relative returns a path of the command line as seen from the work tree's
// top. In another folder than the work tree, paths begin at its top.
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
		return "", usageErrorf("%s is not in the repository %s", p, w.top)
	}
	return rel, nil
}

// safePath refuses paths of a guest that lead out of a work tree or into what
// git keeps there.
func safePath(p string) error {
	if p == "." || !filepath.IsLocal(p) || filepath.Clean(p) != p || strings.ContainsAny(p, "\\\x00") {
		return fmt.Errorf("it is not a plain relative path")
	}
	for part := range strings.SplitSeq(p, "/") {
		if strings.EqualFold(part, ".git") || strings.EqualFold(part, "git~1") {
			return fmt.Errorf("it is inside %s", part)
		}
	}
	return nil
}

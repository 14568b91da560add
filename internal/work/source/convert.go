package source

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"

	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
)

// Git converts files on their way to and from a work tree: line endings, encodings and
// keywords, as attributes and the configuration say. Changes are compared and merged as
// git stores them, and written as git checks them out. Filters, which are programs, do not
// run.

// hashedFile is a file of the work tree as git would store it.
type hashedFile struct {
	blob string
	seen fs.FileInfo // before it was read
}

// objects is a temporary directory for the objects of the user's files.
func (p *applyPlan) objects() string { return filepath.Join(p.Dir, "objects") }

// gitHere runs git in the work tree, with the same objects; new ones are temporary.
func (p *applyPlan) gitHere(ctx context.Context, in gitsafe.Command, args ...string) (string, error) {
	return p.gitIn(ctx, p.w.top, in, args...)
}

// gitIn is gitHere in another directory.
func (p *applyPlan) gitIn(ctx context.Context, dir string, in gitsafe.Command, args ...string) (string, error) {
	if p.env == nil {
		env, err := gitsafe.DisableFilters(ctx, p.w.top)
		if err != nil {
			return "", err
		}
		p.env = gitsafe.WithConfig(gitsafe.WithConfig(env, "core.safecrlf", "false"), "core.splitIndex", "false")
	}
	in.Env = slices.Concat(in.Env, p.env, []string{"GIT_OBJECT_DIRECTORY=" + p.objects()})
	in.Limited = true
	return in.Run(ctx, dir, args...)
}

// hashOurs stores the user's versions of files that are not as in the index, as git add
// would: in a copy of the index, because line endings in the index decide about others.
func (p *applyPlan) hashOurs(ctx context.Context, list []gitsafe.Change) error {
	if err := gitsafe.AddAlternate(p.objects(), filepath.Join(p.ch.Bare, "objects")); err != nil {
		return err
	}
	if err := gitsafe.AddAlternate(filepath.Join(p.ch.Bare, "objects"), p.objects()); err != nil {
		return err
	}
	p.ours = map[string]hashedFile{}
	var names, hidden strings.Builder
	for _, c := range list {
		_, tracked := p.w.index[c.Path]
		st, err := p.w.root.Lstat(c.Path)
		if err != nil || !st.Mode().IsRegular() || tracked && !p.w.dirty[c.Path] && !p.w.hidden[c.Path] {
			continue // version says what is wrong
		}
		fmt.Fprintf(&names, "%s\x00", c.Path)
		if p.w.hidden[c.Path] {
			fmt.Fprintf(&hidden, "%s\x00", c.Path)
		}
		p.ours[c.Path] = hashedFile{seen: st}
	}
	if len(p.ours) == 0 {
		return nil
	}
	in, err := p.copyOfIndex(ctx, "index-ours")
	if err != nil {
		return err
	}
	for _, run := range []struct {
		names string
		args  []string
	}{
		{hidden.String(), []string{"--no-skip-worktree", "-z", "--stdin"}},
		{hidden.String(), []string{"--no-assume-unchanged", "-z", "--stdin"}},
		{names.String(), []string{"--add", "-z", "--stdin"}},
	} {
		if run.names == "" {
			continue
		}
		update := in
		update.Stdin = strings.NewReader(run.names)
		if _, err := p.gitHere(ctx, update, append([]string{"update-index"}, run.args...)...); err != nil {
			return agentlab.Errorf(agentlab.CodeInvalid, "git cannot read the files of the work tree: %s; nothing was applied", agentlab.WithoutControls(err.Error()))
		}
	}
	all := in
	all.Raw = true
	out, err := p.gitHere(ctx, all, "ls-files", "--stage", "-z")
	if err != nil {
		return err
	}
	for line := range strings.SplitSeq(out, "\x00") {
		info, name, _ := strings.Cut(line, "\t")
		if h, is := p.ours[name]; is {
			p.ours[name] = hashedFile{strings.Fields(info)[1], h.seen}
		}
	}
	for name, h := range p.ours {
		if h.blob == "" {
			return agentlab.Errorf(agentlab.CodeInvalid, "git cannot read %s; nothing was applied", agentlab.WithoutControls(name))
		}
	}
	return nil
}

// copyOfIndex copies the index of the work tree to a temporary file, and returns the
// environment that selects it.
func (p *applyPlan) copyOfIndex(ctx context.Context, name string) (gitsafe.Command, error) {
	env, err := gitsafe.CopyIndex(ctx, p.w.top, filepath.Join(p.Dir, name))
	return gitsafe.Command{Env: env}, err
}

// checkOut converts the content of all files that are written. It lets git check them out
// to a temporary directory, from a copy of the index with the new versions, so that new
// attributes count.
func (p *applyPlan) checkOut(ctx context.Context) error {
	var files, entries, names strings.Builder
	var steps []*applyStep
	for i := range p.steps {
		if s := &p.steps[i]; gitsafe.Regular(s.NewMode) {
			steps = append(steps, s)
			fmt.Fprintln(&files, s.content)
			fmt.Fprintf(&names, "%s\x00", s.Path)
		}
	}
	if len(steps) == 0 {
		return nil
	}
	out, err := p.gitHere(ctx, gitsafe.Command{Stdin: strings.NewReader(files.String())}, "hash-object", "-w", "--no-filters", "--stdin-paths")
	if err != nil {
		return err
	}
	ids := strings.Fields(out)
	if len(ids) != len(steps) {
		return fmt.Errorf("git printed %d names of %d files", len(ids), len(steps))
	}
	for i, s := range steps {
		fmt.Fprintf(&entries, "%s %s\t%s\x00", s.NewMode, ids[i], s.Path)
	}
	in, err := p.copyOfIndex(ctx, "index-new")
	if err != nil {
		return err
	}
	update, write := in, in
	update.Stdin, write.Stdin = strings.NewReader(entries.String()), strings.NewReader(names.String())
	if _, err := p.gitHere(ctx, update, "update-index", "-z", "--index-info"); err != nil {
		return err
	}
	// In an empty work tree, attributes come from the index.
	dir, err := gitsafe.Git(ctx, p.w.top, "rev-parse", "--absolute-git-dir")
	if err != nil {
		return err
	}
	empty, to := filepath.Join(p.Dir, "empty"), filepath.Join(p.Dir, "out")
	if err := os.Mkdir(empty, 0o700); err != nil {
		return err
	}
	write.Env = append(write.Env, "GIT_DIR="+dir, "GIT_WORK_TREE="+empty)
	if _, err := p.gitIn(ctx, empty, write, "checkout-index", "--quiet", "--force", "--prefix="+to+"/", "-z", "--stdin"); err != nil {
		return err
	}
	for _, s := range steps {
		s.content = filepath.Join(to, filepath.FromSlash(s.Path))
		if st, err := os.Lstat(s.content); err != nil || !st.Mode().IsRegular() {
			return fmt.Errorf("git has not checked out %s", s.Path)
		}
	}
	return nil
}

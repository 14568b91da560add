package cli

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
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
func (p *applyPlan) objects() string { return filepath.Join(p.dir, "objects") }

// git runs git on the guest's objects and those of the user's files.
func (p *applyPlan) git(ctx context.Context, in gitInput, args ...string) (string, error) {
	in.env = append(in.env, "GIT_ALTERNATE_OBJECT_DIRECTORIES="+p.objects())
	return p.ch.git(ctx, in, args...)
}

// gitHere runs git in the work tree, with the same objects; new ones are temporary.
func (p *applyPlan) gitHere(ctx context.Context, in gitInput, args ...string) (string, error) {
	env, err := disableFilters(ctx, p.w.top)
	if err != nil {
		return "", err
	}
	in.env = slices.Concat(in.env, withConfig(env, "core.safecrlf", "false"), []string{
		"GIT_OBJECT_DIRECTORY=" + p.objects(), "GIT_ALTERNATE_OBJECT_DIRECTORIES=" + filepath.Join(p.ch.bare, "objects"),
	})
	in.limited = true
	return in.run(ctx, p.w.top, args...)
}

// hashOurs stores the user's versions of files that are not as in the index.
func (p *applyPlan) hashOurs(ctx context.Context, list []change) error {
	if err := os.MkdirAll(p.objects(), 0o700); err != nil {
		return err
	}
	p.ours = map[string]hashedFile{}
	var names []string
	for _, c := range list {
		_, tracked := p.w.index[c.path]
		st, err := p.w.root.Lstat(c.path)
		if err != nil || !st.Mode().IsRegular() || tracked && !p.w.dirty[c.path] && !p.w.hidden[c.path] {
			continue // version says what is wrong
		}
		if strings.Contains(c.path, "\n") || strings.HasPrefix(c.path, `"`) { // git takes it for a quoted one
			return agentlab.Errorf(agentlab.CodeUnsupported, "%s has a line break in its name or begins with a quotation mark; nothing was applied", sanitize(c.path)).
				WithHint("leave it out: %s --exclude PATH", p.ch.of.apply)
		}
		names, p.ours[c.path] = append(names, c.path), hashedFile{seen: st}
	}
	if len(names) == 0 {
		return nil
	}
	out, err := p.gitHere(ctx, gitInput{stdin: strings.NewReader(strings.Join(names, "\n") + "\n")}, "hash-object", "-w", "--stdin-paths")
	ids := strings.Fields(out)
	if err == nil && len(ids) != len(names) {
		err = fmt.Errorf("git printed %d names of %d files", len(ids), len(names))
	}
	if err != nil {
		return agentlab.Errorf(agentlab.CodeInvalid, "git cannot read the files of the work tree: %s; nothing was applied", sanitize(err.Error()))
	}
	for i, name := range names {
		p.ours[name] = hashedFile{ids[i], p.ours[name].seen}
	}
	return nil
}

// checkOut converts the content of all files that are written. It lets git check them out
// to a temporary directory, from a copy of the index with the new versions, so that new
// attributes count.
func (p *applyPlan) checkOut(ctx context.Context) error {
	var files, entries, names strings.Builder
	var steps []*applyStep
	for i := range p.steps {
		if s := &p.steps[i]; regular(s.newMode) {
			steps = append(steps, s)
			fmt.Fprintln(&files, s.content)
			fmt.Fprintf(&names, "%s\x00", s.path)
		}
	}
	if len(steps) == 0 {
		return nil
	}
	out, err := p.gitHere(ctx, gitInput{stdin: strings.NewReader(files.String())}, "hash-object", "-w", "--no-filters", "--stdin-paths")
	if err != nil {
		return err
	}
	ids := strings.Fields(out)
	if len(ids) != len(steps) {
		return fmt.Errorf("git printed %d names of %d files", len(ids), len(steps))
	}
	for i, s := range steps {
		fmt.Fprintf(&entries, "%s %s\t%s\x00", s.newMode, ids[i], s.path)
	}
	index, err := git(ctx, p.w.top, "rev-parse", "--path-format=absolute", "--git-path", "index")
	if err != nil {
		return err
	}
	copied := filepath.Join(p.dir, "index")
	if err := copyIndex(index, copied); err != nil {
		return err
	}
	in := gitInput{env: []string{"GIT_INDEX_FILE=" + copied}}
	update, write := in, in
	update.stdin, write.stdin = strings.NewReader(entries.String()), strings.NewReader(names.String())
	if _, err := p.gitHere(ctx, update, "update-index", "-z", "--index-info"); err != nil {
		return err
	}
	to := filepath.Join(p.dir, "out")
	if _, err := p.gitHere(ctx, write, "checkout-index", "--quiet", "--force", "--prefix="+to+"/", "-z", "--stdin"); err != nil {
		return err
	}
	for _, s := range steps {
		s.content = filepath.Join(to, filepath.FromSlash(s.path))
		if st, err := os.Lstat(s.content); err != nil || !st.Mode().IsRegular() {
			return fmt.Errorf("git has not checked out %s", s.path)
		}
	}
	return nil
}

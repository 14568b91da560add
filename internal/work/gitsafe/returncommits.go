package gitsafe

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/bounded"
	"github.com/agentlab-vm/agentlab/internal/returncheck"
	"github.com/agentlab-vm/agentlab/internal/work"
)

// Limits on a tree of a guest that is merged into a work tree.
const (
	maxTreePaths = 1 << 20   // paths
	maxTreeNames = 256 << 20 // bytes of their names
	maxMerged    = 1 << 30   // bytes of the files that a merge writes
)

// MergeOptions makes a merge independent of the configuration of the user, of a
// repository, and of the limits that git gets for objects of a guest.
var MergeOptions = []string{"-c", "merge.renames=true", "-c", "merge.directoryRenames=conflict", "-c", "merge.renormalize=false", "-c", "pull.twohead=ort"}

// Judgement is what the return check found out about a merge.
type Judgement struct {
	Found        []returncheck.Finding
	InWay        []string // files that git does not track and that the merge would lose
	Ours, Theirs string   // commits; ours is "" for a branch without commits
}

// JudgeCommit is the return check of a guest's commit: it judges what a merge would change
// in the user's commit, which is "" for a branch without commits. The files are counted
// first. checkedOut says that the user's commit is checked out in the directory top, which
// is "" if there is no work tree.
func JudgeCommit(ctx context.Context, repo, top string, checkedOut bool, ours, theirs string) (j Judgement, err error) {
	if j.Theirs, err = Git(ctx, repo, "rev-parse", "--verify", "--quiet", theirs+"^{commit}"); err != nil {
		return j, err
	}
	if ours != "" {
		if j.Ours, err = Git(ctx, repo, "rev-parse", "--verify", "--quiet", ours+"^{commit}"); err != nil {
			return j, err
		}
		if IsAncestor(ctx, repo, j.Theirs, j.Ours) {
			return j, nil
		}
	}
	if err := countTree(ctx, repo, j.Theirs); err != nil {
		return j, err
	}
	dir, remove, err := TempDir("agentlab-return-*")
	if err != nil {
		return j, err
	}
	defer remove()
	objects, err := Git(ctx, repo, "rev-parse", "--path-format=absolute", "--git-path", "objects")
	if err != nil {
		return j, err
	}
	if err := AddAlternate(dir, objects); err != nil {
		return j, err
	}
	m := mergeTrial{repo: repo, env: []string{"GIT_OBJECT_DIRECTORY=" + dir}}
	tree, err := m.result(ctx, j.Ours, j.Theirs)
	if err != nil {
		return j, err
	}
	from := EmptyTree
	if j.Ours != "" {
		from = j.Ours + "^{tree}"
	}
	list, err := RawDiff(ctx, m.git, from, tree, maxTreePaths)
	if err != nil || len(list) == 0 {
		return j, err
	}
	targets, err := m.sizes(ctx, list)
	if err != nil {
		return j, err
	}
	host := returncheck.Host{}
	var names func(string) []string
	if top != "" {
		host = WorkTreeHost(ctx, top)
	}
	if checkedOut && top != "" {
		root, err := os.OpenRoot(top)
		if err != nil {
			return j, err
		}
		defer func() { _ = root.Close() }()
		names = func(dir string) []string { return DirNames(root, dir) }
		j.InWay = inWayOf(root, list)
	}
	if host.Names, err = m.names(ctx, j.Ours, list, names); err != nil {
		return j, err
	}
	j.Found = returncheck.Check(ChangeEntries(list, func(c Change) string { return targets[c.NewBlob] }), host)
	return j, ctx.Err()
}

// AddAlternate lets a directory of objects use those of another one. The variable of the
// environment cannot have paths with colons.
func AddAlternate(objects, other string) error {
	info := filepath.Join(objects, "info")
	if err := os.MkdirAll(info, 0o700); err != nil {
		return err
	}
	f, err := os.OpenFile(filepath.Join(info, "alternates"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(f, other)
	return errors.Join(err, f.Close())
}

// mergeTrial finds out what a merge would change. Objects that git makes for it are in a
// temporary directory.
type mergeTrial struct {
	repo string
	env  []string
}

// git runs git under the limits for a guest's objects.
func (m mergeTrial) git(ctx context.Context, in Command, args ...string) (string, error) {
	in.Env, in.Limited = append(in.Env, m.env...), true
	return in.Run(ctx, m.repo, args...)
}

// countTree returns an error with code limit if a tree has too many paths: twelve objects
// can have 10^10.
func countTree(ctx context.Context, repo, tree string) error {
	count := &pathCounter{}
	_, err := Command{Stdout: count, Limited: true}.Run(ctx, repo, "ls-tree", "-r", "-z", "--name-only", "--full-tree", tree)
	if count.over() {
		return agentlab.Errorf(agentlab.CodeLimit, "the commit %.12s has more than %d files", tree, maxTreePaths).
			WithHint("look at it: git ls-tree %.12s", tree)
	}
	return err
}

// pathCounter counts paths that end with a zero byte, and fails if there are too many.
type pathCounter struct{ paths, bytes int }

func (c *pathCounter) over() bool { return c.paths > maxTreePaths || c.bytes > maxTreeNames }

// Write implements io.Writer.
func (c *pathCounter) Write(p []byte) (int, error) {
	c.paths += bytes.Count(p, []byte{0})
	c.bytes += len(p)
	if c.over() {
		return 0, ErrOutputTooLarge
	}
	return len(p), nil
}

// result returns the tree that a merge makes. With conflicts, it is what git writes to the
// work tree.
func (m mergeTrial) result(ctx context.Context, ours, theirs string) (string, error) {
	if ours == "" {
		return theirs + "^{tree}", nil
	}
	if IsAncestor(ctx, m.repo, ours, theirs) {
		return theirs + "^{tree}", nil
	}
	env, err := DisableFilters(ctx, m.repo)
	if err != nil {
		return "", err
	}
	drivers, err := PlainMergeDrivers(ctx, m.repo)
	if err != nil {
		return "", err
	}
	out := bounded.Head{Max: maxTreeNames}
	args := slices.Concat(drivers, MergeOptions, []string{"merge-tree", "--write-tree", "--no-messages", "--name-only", ours, theirs})
	_, err = m.git(ctx, Command{Stdout: &out, Env: env}, args...)
	if tree, _, _ := strings.Cut(out.String(), "\n"); IsCommit(tree) { // with conflicts, git fails
		return tree, nil
	}
	switch {
	case ctx.Err() != nil:
		return "", ctx.Err()
	case err == nil:
		err = errors.New("git printed no tree")
	}
	return "", agentlab.Errorf(agentlab.CodeConflict, "git cannot find out what a merge of %.12s changes: %s", theirs, agentlab.WithoutControls(err.Error())).
		WithHint("git 2.38 or later is required to merge; the commits are fetched: git log -p HEAD..%.12s", theirs)
}

// sizes checks how much a merge writes, and returns the targets of links by the name of
// their blob. The same content counts for each file.
func (m mergeTrial) sizes(ctx context.Context, list []Change) (map[string]string, error) {
	var ids, links strings.Builder
	for _, c := range list {
		if c.NewMode != ModeNone && c.NewMode != ModeModule {
			fmt.Fprintln(&ids, c.NewBlob)
		}
	}
	out := bounded.Head{Max: maxTreePaths * 64, Fail: ErrOutputTooLarge}
	if _, err := m.git(ctx, Command{Stdin: strings.NewReader(ids.String()), Stdout: &out}, "cat-file", "--batch-check=%(objecttype) %(objectsize)"); err != nil {
		return nil, err
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	left, n := int64(maxMerged), 0
	count := 0
	for _, c := range list {
		if c.NewMode == ModeNone || c.NewMode == ModeModule {
			continue
		}
		var kind string
		var size int64
		if n < len(lines) {
			_, _ = fmt.Sscanf(lines[n], "%s %d", &kind, &size)
		}
		if n++; kind != "blob" || size < 0 {
			return nil, agentlab.Errorf(agentlab.CodeDenied, "%s is not a file in the commit", agentlab.WithoutControls(c.Path))
		}
		if left -= size; left < 0 {
			return nil, agentlab.Errorf(agentlab.CodeLimit, "the merge would write more than %s", work.ByteSize(maxMerged)).
				WithHint("the commits are fetched; look at them, and merge them with git if you agree")
		}
		if c.NewMode == ModeLink && size <= returncheck.MaxLink {
			fmt.Fprintln(&links, c.NewBlob)
			count++
		}
	}
	return m.links(ctx, links.String(), count)
}

// links reads blobs, which are the targets of links.
func (m mergeTrial) links(ctx context.Context, ids string, count int) (map[string]string, error) {
	if count == 0 {
		return nil, nil
	}
	out := bounded.Head{Max: count * (returncheck.MaxLink + 128), Fail: ErrOutputTooLarge}
	if _, err := m.git(ctx, Command{Stdin: strings.NewReader(ids), Stdout: &out}, "cat-file", "--batch"); err != nil {
		return nil, err
	}
	targets := map[string]string{}
	in := bufio.NewReader(strings.NewReader(out.String()))
	for range count {
		var id, kind string
		var size int
		line, err := in.ReadString('\n')
		if n, _ := fmt.Sscanf(line, "%s %s %d", &id, &kind, &size); err != nil || n != 3 || size < 0 || size > returncheck.MaxLink {
			return nil, fmt.Errorf("git printed %.100q for a link", line)
		}
		text := make([]byte, size+1)
		if _, err := io.ReadFull(in, text); err != nil {
			return nil, err
		}
		targets[id] = string(text[:size])
	}
	return targets, nil
}

// names returns what a tree has in the directories of changes, together with more, which
// may be nil.
func (m mergeTrial) names(ctx context.Context, tree string, list []Change, more func(string) []string) (func(string) []string, error) {
	known := map[string]map[string]bool{}
	for _, c := range list {
		for dir := path.Dir(c.Path); known[dir] == nil; dir = path.Dir(dir) {
			known[dir] = map[string]bool{}
		}
	}
	if tree != "" {
		out, err := Command{Raw: true}.Run(ctx, m.repo, "ls-tree", "-r", "-z", "--name-only", "--full-tree", tree)
		if err != nil {
			return nil, err
		}
		for name := range strings.SplitSeq(out, "\x00") {
			for at := name; at != "." && at != ""; at = path.Dir(at) {
				if names := known[path.Dir(at)]; names != nil {
					names[path.Base(at)] = true
				}
			}
		}
	}
	return func(dir string) []string {
		var list []string
		for name := range known[dir] {
			list = append(list, name)
		}
		if more != nil {
			list = append(list, more(dir)...)
		}
		return list
	}, nil
}

// ChangeEntries returns changes of git for the return check.
func ChangeEntries(list []Change, target func(Change) string) []returncheck.Entry {
	kinds := map[string]returncheck.Kind{ModeNone: returncheck.None, ModeProgram: returncheck.Program, ModeLink: returncheck.Link, ModeModule: returncheck.Module}
	kind := func(mode string) returncheck.Kind {
		if k, is := kinds[mode]; is {
			return k
		}
		return returncheck.File
	}
	entries := make([]returncheck.Entry, len(list))
	for i, c := range list {
		entries[i] = returncheck.Entry{Path: c.Path, Kind: kind(c.NewMode), Was: kind(c.OldMode)}
		if c.NewMode == ModeLink {
			entries[i].Target = target(c)
		}
	}
	return entries
}

// JudgeFetched is the return check of a commit that was fetched, against the branch that
// is checked out in a repository, which may be given as its directory of git.
func JudgeFetched(ctx context.Context, repo, commit string) ([]returncheck.Finding, error) {
	top, _ := Git(ctx, repo, "rev-parse", "--show-toplevel")
	if top == "" { // for a remote helper
		if linked, err := os.ReadFile(filepath.Join(repo, "gitdir")); err == nil {
			top = filepath.Dir(strings.TrimSpace(string(linked)))
		} else if filepath.Base(repo) == ".git" {
			top = filepath.Dir(repo)
		}
	}
	head := "HEAD"
	if _, err := Git(ctx, repo, "rev-parse", "--verify", "--quiet", "HEAD^{commit}"); err != nil {
		head = ""
	}
	j, err := JudgeCommit(ctx, repo, top, true, head, commit)
	return j.Found, err
}

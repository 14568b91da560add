package repocmd

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
)

// Modules checks out the submodules of a work tree whose commits the host has sent. Each
// becomes a separate repository that borrows the objects of the superproject. .gitmodules
// is not used: no URL, name or path in it has any effect.
type Modules struct {
	// Git runs git in a directory.
	Git func(dir string, in io.Reader, out io.Writer, args ...string) error
	Top string // of the work tree
	// Objects is the directory with the objects of the superproject. It moves with Top.
	Objects string
	Sent    map[string]bool // commits
	// InUse is called for a submodule whose directory has files. done says that nothing
	// is left to do; otherwise the directory must be empty.
	InUse func(at, commit string) (done bool, err error)

	root  *os.Root
	found map[string]string
}

// CheckOut returns the commits of the submodules by path.
func (m *Modules) CheckOut() (map[string]string, error) {
	if len(m.Sent) == 0 {
		return nil, nil
	}
	var refs strings.Builder
	for commit := range m.Sent { // without the refs git may delete the objects
		refs.WriteString("update " + guestapi.RefModules + commit + " " + commit + "\n")
	}
	err := m.Git(m.Top, strings.NewReader(refs.String()), io.Discard, "update-ref", "--stdin")
	if err != nil {
		return nil, err
	}
	if m.root, err = os.OpenRoot(m.Top); err != nil {
		return nil, err
	}
	defer func() { _ = m.root.Close() }()
	m.found = map[string]string{}
	if err := m.checkOutAll(".", 0); err != nil {
		return nil, fmt.Errorf("the submodules cannot be checked out: %w", err)
	}
	return m.found, nil
}

// checkOutAll checks out the submodules of the repository at the path in.
func (m *Modules) checkOutAll(in string, depth int) error {
	var links gitlinks
	if err := m.Git(filepath.Join(m.Top, in), nil, &links, "ls-tree", "-r", "-z", "--full-tree", "HEAD"); err != nil {
		return err
	}
	found := false
	for _, l := range links.found {
		if !m.Sent[l.commit] || depth >= guestapi.MaxModuleDepth || len(m.found) >= guestapi.MaxModules {
			continue
		}
		if err := modulePath(l.path); err != nil {
			return err
		}
		at := path.Join(in, l.path)
		if err := m.checkOutOne(at, l.commit); err != nil {
			return fmt.Errorf("%.100q: %w", at, err)
		}
		m.found[at], found = l.commit, true
		if err := m.checkOutAll(at, depth+1); err != nil {
			return err
		}
	}
	if !found {
		return nil
	}
	return m.Git(filepath.Join(m.Top, in), nil, io.Discard, "config", "submodule.active", ".")
}

// modulePath rejects paths that lead out of a work tree or into .git.
func modulePath(p string) error {
	if p == "." || !filepath.IsLocal(p) || path.Clean(p) != p {
		return fmt.Errorf("%.100q leads elsewhere", p)
	}
	for part := range strings.SplitSeq(p, "/") {
		if strings.EqualFold(part, ".git") {
			return fmt.Errorf("%.100q leads into .git", p)
		}
	}
	return nil
}

// checkOutOne creates the repository of a submodule.
func (m *Modules) checkOutOne(at, commit string) error {
	dir := ""
	for part := range strings.SplitSeq(at, "/") {
		dir = path.Join(dir, part)
		if st, err := m.root.Lstat(dir); err != nil || !st.IsDir() {
			return errors.Join(err, errors.New("there is no folder for it"))
		}
	}
	full := filepath.Join(m.Top, at)
	if entries, err := os.ReadDir(full); err != nil {
		return err
	} else if len(entries) > 0 && m.InUse != nil {
		if done, err := m.InUse(at, commit); err != nil || done {
			return err
		}
	}
	git := func(args ...string) error { return m.Git(full, nil, io.Discard, args...) }
	if err := git("init", "--quiet", "--template="); err != nil {
		return err
	}
	for _, kv := range DurableConfig {
		if err := git("config", kv[0], kv[1]); err != nil {
			return err
		}
	}
	SyncRefs(filepath.Join(full, ".git"))
	// Relative, because a clone is moved later.
	up, err := filepath.Rel(filepath.Join(full, ".git", "objects"), m.Objects)
	if err != nil {
		return err
	}
	if err := m.root.MkdirAll(at+"/.git/objects/info", 0o755); err != nil {
		return err
	}
	if err := m.root.WriteFile(at+"/.git/objects/info/alternates", []byte(up+"\n"), 0o644); err != nil {
		return err
	}
	return git("checkout", "--quiet", "--detach", commit, "--")
}

// gitlinks collects the submodules from the output of git ls-tree -z.
type gitlinks struct {
	rest  []byte
	found []gitlink
}

type gitlink struct{ path, commit string }

// Write implements io.Writer.
func (g *gitlinks) Write(p []byte) (int, error) {
	g.rest = append(g.rest, p...)
	for {
		line, rest, ok := bytes.Cut(g.rest, []byte{0})
		if !ok {
			return len(p), nil
		}
		g.rest = rest
		info, name, _ := strings.Cut(string(line), "\t")
		if f := strings.Fields(info); len(f) == 3 && f[0] == "160000" && (len(f[2]) == 40 || len(f[2]) == 64) && agentlab.IsHex(f[2], 40) {
			g.found = append(g.found, gitlink{name, f[2]})
		}
	}
}

// modules returns the commits of submodules that the repository has.
func (r repo) modules() (map[string]bool, error) {
	out, err := r.git("for-each-ref", fmt.Sprintf("--count=%d", guestapi.MaxSentModules), "--format=%(objectname) %(refname)", strings.TrimSuffix(guestapi.RefModules, "/"))
	if err != nil {
		return nil, err
	}
	sent := map[string]bool{}
	for line := range strings.Lines(out) {
		commit, ref, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		if ref == guestapi.RefModules+commit {
			sent[commit] = true
		}
	}
	return sent, nil
}

// checkOutModules checks out submodules in a work tree. One with work of the agent stays.
func (r repo) checkOutModules(dir string, sent map[string]bool) error {
	top := filepath.Join(r.dir, dir)
	run := func(dir string, in io.Reader, out io.Writer, args ...string) error {
		_, err := r.runGit(command{dir: dir, in: in, out: out}, args...)
		return err
	}
	m := Modules{Git: run, Top: top, Objects: filepath.Join(r.dir, ".git", "objects"), Sent: sent}
	m.InUse = func(at, commit string) (bool, error) {
		c := command{dir: filepath.Join(top, at)}
		if _, err := os.Lstat(filepath.Join(c.dir, ".git")); err != nil {
			return true, nil //nolint:nilerr // files of the agent
		}
		head, err := r.runGit(c, "rev-parse", "--verify", "--quiet", "HEAD^{commit}")
		if err != nil || head == commit || !sent[head] {
			return true, nil //nolint:nilerr // nothing, or a commit of the agent
		}
		if n, err := r.uncommitted(c.dir); err != nil || n > 0 {
			return true, nil //nolint:nilerr // changes of the agent
		}
		_, err = r.runGit(c, "checkout", "--quiet", "--detach", commit, "--")
		return true, err
	}
	_, err := m.CheckOut()
	return err
}

// checkOutAllModules checks out submodules in all work trees.
func (r repo) checkOutAllModules() error {
	sent, err := r.modules()
	if err != nil || len(sent) == 0 {
		return err
	}
	st, err := r.state()
	if err != nil {
		return err
	}
	for _, w := range st.Worktrees {
		if w.Head == "" {
			continue
		}
		if err := r.checkOutModules(w.Dir, sent); err != nil {
			return err
		}
	}
	return nil
}

// moduleWork counts the commits of the agent in the submodules of a work tree that the host
// has sent, by the directory of the submodule. They are in no bundle. dir and the directories
// are relative to the repository.
func (r repo) moduleWork(dir string, sent map[string]bool, depth int, work map[string]int) error {
	var links gitlinks
	if _, err := r.runGit(command{dir: filepath.Join(r.dir, dir), out: &links}, "ls-tree", "-r", "-z", "--full-tree", "HEAD"); err != nil {
		return err
	}
	var not strings.Builder
	for commit := range sent {
		not.WriteString("^" + commit + "\n")
	}
	for _, l := range links.found {
		at := path.Join(dir, l.path)
		c := command{dir: filepath.Join(r.dir, at), in: strings.NewReader(not.String())}
		alternates, err := os.ReadFile(filepath.Join(c.dir, ".git", "objects", "info", "alternates"))
		if err != nil || len(alternates) == 0 || depth > guestapi.MaxModuleDepth {
			continue // it is not one that CheckOut has made
		}
		out, err := r.runGit(c, "rev-list", "--count", "--ignore-missing", "HEAD", "--branches", "--stdin")
		if err != nil {
			work[at]++ // unknown is not absent
			continue
		}
		n, err := strconv.Atoi(out)
		if err != nil {
			return err
		}
		if n > 0 {
			work[at] = n
		}
		if err := r.moduleWork(at, sent, depth+1, work); err != nil {
			return err
		}
	}
	return nil
}

// Package repocmd implements 'agentlab-agent repo', with which the host reads and
// updates the repository of a session. It runs in the guest as the agent. Therefore
// the host trusts nothing of its output.
package repocmd

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/bounded"
)

const usage = `usage: agentlab-agent repo init|state|pack|receive
       agentlab-agent repo programs DIR
       agentlab-agent repo lfs pack|receive
       agentlab-agent repo worktree add BRANCH [START]
       agentlab-agent repo worktree remove [--force] BRANCH
`

// Main runs a command on the repository in guestapi.RepoDir and returns its exit
// code; args do not include "repo".
func Main(args []string) int {
	if err := Run(guestapi.RepoDir, args, os.Stdin, os.Stdout); err != nil {
		fmt.Fprintf(os.Stderr, "agentlab-agent: %s\n", err)
		if errors.Is(err, errUsage) {
			return 2
		}
		return 1
	}
	return 0
}

var errUsage = errors.New("wrong usage\n" + usage)

// Run runs a command of 'agentlab-agent repo' on the repository in dir.
func Run(dir string, args []string, in io.Reader, out io.Writer) error {
	return newRepo(dir).run(args, in, out)
}

// repo is the repository of a session.
type repo struct {
	dir string
	env *[]string // of plain, after its first call
}

func newRepo(dir string) repo { return repo{dir: dir, env: new([]string)} }

func (r repo) run(args []string, in io.Reader, out io.Writer) error {
	if len(args) == 0 {
		return errUsage
	}
	switch verb, rest := args[0], args[1:]; {
	case verb == "worktree" && len(rest) > 1:
		return r.worktree(rest[0], rest[1:])
	case verb == "programs" && len(rest) == 1:
		return encode(out)(r.programs(rest[0]))
	case verb == "lfs" && len(rest) == 1 && rest[0] == "pack":
		return r.lfsPack(in, out)
	case verb == "lfs" && len(rest) == 1 && rest[0] == "receive":
		return encode(out)(r.lfsReceive(in))
	case len(rest) > 0:
		return errUsage
	case verb == "init":
		return decode(in, r.init)
	case verb == "state":
		return encode(out)(r.state())
	case verb == "pack":
		return decode(in, func(p guestapi.RepoPack) error { return r.pack(p, out) })
	case verb == "receive":
		return encode(out)(r.receive(in))
	}
	return errUsage
}

// encode returns a function that writes a result unless there is an error.
func encode(out io.Writer) func(v any, err error) error {
	return func(v any, err error) error {
		if err != nil {
			return err
		}
		return json.NewEncoder(out).Encode(v)
	}
}

func decode[T any](in io.Reader, fn func(T) error) error {
	var v T
	if err := json.NewDecoder(in).Decode(&v); err != nil {
		return fmt.Errorf("the input is not valid: %w", err)
	}
	return fn(v)
}

// command is a run of git.
type command struct {
	dir string // default: the repository
	in  io.Reader
	out io.Writer // default: returned
	env []string
}

func (r repo) git(args ...string) (string, error) { return r.runGit(command{}, args...) }

// runGit runs git with the environment of plain.
func (r repo) runGit(c command, args ...string) (string, error) {
	env, err := r.plain()
	if err != nil {
		return "", err
	}
	c.env = slices.Concat(env, c.env)
	return r.exec(c, args...)
}

// exec runs git.
func (r repo) exec(c command, args ...string) (string, error) {
	if c.dir == "" {
		c.dir = r.dir
	}
	cmd := exec.CommandContext(context.Background(), "git", args...)
	cmd.Dir, cmd.Stdin = c.dir, c.in
	for _, kv := range os.Environ() {
		if !strings.HasPrefix(kv, "GIT_") {
			cmd.Env = append(cmd.Env, kv)
		}
	}
	cmd.Env = append(append(cmd.Env, "LC_ALL=C", "GIT_TERMINAL_PROMPT=0"), c.env...)
	var stdout bytes.Buffer
	stderr := bounded.Tail{Max: 4 << 10}
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if c.out != nil {
		cmd.Stdout = c.out
	}
	if err := cmd.Run(); err != nil {
		if text := strings.TrimSpace(stderr.String()); text != "" {
			err = errors.New(text)
		}
		return stdout.String(), fmt.Errorf("git %s: %w", args[0], err)
	}
	return strings.TrimSuffix(stdout.String(), "\n"), nil
}

// init makes the repository unless it exists, and configures it.
func (r repo) init(p guestapi.RepoInit) error {
	if err := agentlab.ValidateRef(p.Branch); err != nil {
		return err
	}
	if err := os.MkdirAll(r.dir, 0o755); err != nil {
		return err
	}
	if _, err := os.Lstat(filepath.Join(r.dir, ".git")); errors.Is(err, os.ErrNotExist) {
		if _, err := r.git("init", "--quiet", "--template=", "--object-format=sha1", "--initial-branch="+p.Branch); err != nil {
			return err
		}
	} else if err != nil {
		return err
	} else if err := r.removeStaleLocks(); err != nil {
		return err
	}
	config := append(slices.Clip(DurableConfig), [2]string{"remote.origin.url", p.Origin}, [2]string{"user.name", p.UserName}, [2]string{"user.email", p.UserEmail})
	for _, kv := range config {
		if kv[1] == "" {
			continue
		}
		get := []string{"config", "--get", kv[0]}
		if strings.HasPrefix(kv[0], "user.") { // the system has one
			get = []string{"config", "--local", "--get", kv[0]}
		}
		if _, err := r.git(get...); err == nil {
			continue
		}
		if _, err := r.git("config", kv[0], kv[1]); err != nil {
			return err
		}
		if kv[0] == "remote.origin.url" {
			if _, err := r.git("config", "remote.origin.fetch", "+refs/heads/*:refs/remotes/origin/*"); err != nil {
				return err
			}
		}
	}
	if err := r.exclude(p.Exclude); err != nil {
		return err
	}
	SyncRefs(filepath.Join(r.dir, ".git"))
	return r.sync()
}

// sync writes the file system of the repository to its disk, so that everything reported
// to the host is still there after the VM was lost.
func (r repo) sync() error {
	dir, err := os.Open(r.dir)
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }()
	return syncFS(dir)
}

// state returns the branches and work trees.
func (r repo) state() (guestapi.RepoState, error) {
	st := guestapi.RepoState{Branches: map[string]string{}}
	if _, err := os.Lstat(filepath.Join(r.dir, ".git")); errors.Is(err, os.ErrNotExist) {
		if files, _ := os.ReadDir(r.dir); len(files) > 0 {
			return st, fmt.Errorf("%s has files, and is not a git repository", r.dir)
		}
		return st, nil
	}
	refs, err := r.git("for-each-ref", fmt.Sprintf("--count=%d", guestapi.MaxRepoBranches), "--format=%(objectname) %(refname:strip=2)", "refs/heads")
	if err != nil {
		return st, err
	}
	for line := range strings.Lines(refs) {
		commit, name, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		st.Branches[name] = commit
	}
	list, err := r.git("worktree", "list", "--porcelain", "-z")
	if err != nil {
		return st, err
	}
	for entry := range strings.SplitSeq(strings.TrimSuffix(list, "\x00\x00"), "\x00\x00") {
		w, ok := r.parseWorktree(entry)
		if !ok || len(st.Worktrees) == guestapi.MaxWorktrees {
			n, err := r.elsewhere(entry)
			if err != nil {
				return st, err
			}
			st.Elsewhere += n
			continue
		}
		if w.Uncommitted, err = r.uncommitted(filepath.Join(r.dir, w.Dir)); err != nil {
			return st, err
		}
		st.Worktrees = append(st.Worktrees, w)
	}
	saved, err := os.ReadDir(filepath.Join(filepath.Dir(r.dir), guestapi.SavedDir))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return st, err
	}
	stashes, err := r.stashes()
	if err != nil {
		return st, err
	}
	st.Elsewhere, st.Stashes = st.Elsewhere+len(saved)+stashes, &stashes
	return st, r.addModules(&st)
}

// addModules adds the commits of submodules that the host has sent, and the work in them.
func (r repo) addModules(st *guestapi.RepoState) error {
	sent, err := r.modules()
	if err != nil || len(sent) == 0 {
		return err
	}
	st.Modules = slices.Sorted(maps.Keys(sent))
	for _, w := range st.Worktrees {
		if w.Head == "" {
			continue
		}
		if st.ModuleWork == nil {
			st.ModuleWork = map[string]int{}
		}
		if err := r.moduleWork(w.Dir, sent, 0, st.ModuleWork); err != nil {
			return err
		}
	}
	for _, n := range st.ModuleWork {
		st.Elsewhere += n
	}
	return nil
}

func (r repo) stashes() (int, error) {
	if _, err := r.git("rev-parse", "--verify", "--quiet", "refs/stash"); err != nil {
		return 0, nil //nolint:nilerr // there is no stash
	}
	n, err := r.count("--walk-reflogs", "refs/stash")
	return max(n, 1), err
}

// uncommitted returns how many files of a work tree have uncommitted changes, whatever
// the configuration hides.
func (r repo) uncommitted(dir string) (int, error) {
	changed, err := r.runGit(command{dir: dir}, "status", "--porcelain", "-z", "--no-renames", "--untracked-files=normal")
	return strings.Count(changed, "\x00"), err
}

// count returns how many commits rev-list lists.
func (r repo) count(args ...string) (n int, err error) {
	out, err := r.git(append([]string{"rev-list", "--count"}, args...)...)
	if err == nil {
		_, err = fmt.Sscan(out, &n)
	}
	return n, err
}

// elsewhere counts the work in a work tree that parseWorktree leaves out.
func (r repo) elsewhere(entry string) (n int, err error) {
	fields := map[string]string{}
	for line := range strings.SplitSeq(entry, "\x00") {
		key, value, _ := strings.Cut(line, " ")
		fields[key] = value
	}
	if _, bare := fields["bare"]; bare {
		return 0, nil
	}
	if head := fields["HEAD"]; strings.Trim(head, "0") != "" {
		if n, err = r.count(head, "--not", "--branches"); err != nil {
			return 0, err
		}
	}
	if _, missing := fields["prunable"]; missing {
		return n, nil
	}
	changed, err := r.uncommitted(fields["worktree"])
	if err != nil {
		return n + 1, nil //nolint:nilerr // unknown is not absent
	}
	return n + changed, nil
}

// parseWorktree reads an entry of git worktree list --porcelain. ok is false for one
// that is not in the repository's directory, or whose files are missing.
func (r repo) parseWorktree(entry string) (w guestapi.RepoWorktree, ok bool) {
	for line := range strings.SplitSeq(entry, "\x00") {
		key, value, _ := strings.Cut(line, " ")
		switch key {
		case "worktree":
			top, err := filepath.EvalSymlinks(r.dir)
			if err != nil {
				return w, false
			}
			rel, err := filepath.Rel(top, value)
			if err != nil || rel != "." && !strings.HasPrefix(rel, guestapi.WorktreesDir+"/") {
				return w, false
			}
			w.Dir = strings.TrimPrefix(rel, ".")
			if rel != "." {
				w.Dir = rel
			}
		case "HEAD":
			if strings.Trim(value, "0") != "" {
				w.Head = value
			}
		case "branch":
			w.Branch = strings.TrimPrefix(value, "refs/heads/")
		case "bare", "prunable":
			return w, false
		}
	}
	return w, true
}

// worktree adds or removes the work tree of a branch.
func (r repo) worktree(verb string, args []string) error {
	force := args[0] == "--force"
	if force {
		args = args[1:]
	}
	if len(args) == 0 || verb == "remove" && len(args) > 1 || len(args) > 2 {
		return errUsage
	}
	branch := args[0]
	if err := agentlab.ValidateRef(branch); err != nil {
		return err
	}
	dir := filepath.Join(r.dir, guestapi.WorktreesDir, branch)
	switch verb {
	case "add":
		add := []string{"worktree", "add", "--quiet", dir, branch}
		if _, err := r.git("rev-parse", "--verify", "--quiet", "refs/heads/"+branch); err != nil {
			add = append([]string{"worktree", "add", "--quiet", "-b", branch, dir}, args[1:]...)
		}
		if _, err := r.git(add...); err != nil {
			return err
		}
		return r.checkOutAllModules()
	case "remove":
		if force {
			_, err := r.git("worktree", "remove", "--force", dir)
			return err
		}
		if n, err := r.uncommitted(dir); err != nil || n > 0 {
			return errors.Join(err, fmt.Errorf("it has %s with uncommitted changes", agentlab.Plural(n, "file")))
		}
		if head, err := r.runGit(command{dir: dir}, "rev-parse", "--verify", "--quiet", "HEAD^{commit}"); err == nil {
			if n, err := r.count(head, "--not", "--branches", "--remotes", "--tags"); err != nil || n > 0 {
				return errors.Join(err, errors.New("its HEAD has commits that are on no branch"))
			}
		}
		work := map[string]int{}
		if sent, err := r.modules(); err != nil || len(sent) == 0 {
			_, rerr := r.git("worktree", "remove", dir)
			return errors.Join(err, rerr)
		} else if err := r.moduleWork(path.Join(guestapi.WorktreesDir, branch), sent, 0, work); err != nil || len(work) > 0 {
			return errors.Join(err, errors.New("its submodules have commits that were made here"))
		}
		// Git does not remove submodules otherwise.
		_, err := r.git("worktree", "remove", "--force", dir)
		return err
	}
	return errUsage
}

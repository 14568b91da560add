package cli

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/config"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/session"
)

// sessionizerFlags are the flags of 'agentlab sessionizer'.
type sessionizerFlags struct {
	list, detach, yes, force bool
	stop, destroy, agent     string
}

// sessionizer is one run of 'agentlab sessionizer'.
type sessionizer struct {
	*App
	c      *client.Client
	f      sessionizerFlags
	dir    string // of its files
	clones string
	repos  []listedRepo
	cfg    sessionizerConfig
}

// sessionizerEntry is a repository and its session.
type sessionizerEntry struct {
	Repo    string `json:"repo"`
	Session string `json:"session,omitempty"` // name; absent if there is none
	Sandbox string `json:"sandbox,omitempty"`
	State   string `json:"state,omitempty"`
	Running bool   `json:"running"`
	// Worktrees are the branches of the work trees of a running session.
	Worktrees []string `json:"worktrees,omitempty"`

	other bool // a session of a repository that the sessionizer does not know
	repo  listedRepo
	dir   string // the repository on this machine
	link  session.Link
	at    api.Session
}

func (a *App) sessionizerCmd() *cobra.Command {
	var f sessionizerFlags
	cmd := &cobra.Command{
		Use:   "sessionizer [OWNER/REPO[/WORKTREE]]",
		Short: "Choose a repository, and work on it in tmux windows that show its VM",
		Long: `Choose a repository of repos.txt or a running one in fzf, start its session if it does
not run, and switch to its local tmux session. Its windows vim, server, agent, git and
scratch show terminals in the VM. The work trees of running sessions are listed too, as
OWNER/REPO/BRANCH: each has a window with its own terminal. Running sessions of other
repositories are listed by their names.

The files repos.txt, resources.yaml and network-allowlist.txt are in the directory
sessionizer of the configuration directory; they are created with examples. A
repository without a path is cloned to this machine first.`,
		Example: `  agentlab sessionizer
  agentlab sessionizer octocat/hello-world
  agentlab sessionizer octocat/hello-world/fix-12
  agentlab sessionizer --list
  agentlab sessionizer --stop octocat/hello-world
  agentlab sessionizer --destroy octocat/hello-world`,
		Args: cobra.MaximumNArgs(1),
	}
	flags := cmd.Flags()
	flags.BoolVar(&f.list, "list", false, "list the repositories that have a session, and other running sessions")
	flags.StringVar(&f.stop, "stop", "", "stop the VM of this repository, OWNER/REPO; its disk stays")
	flags.StringVar(&f.destroy, "destroy", "", "delete the session of this repository, OWNER/REPO, with its VM")
	flags.StringVar(&f.agent, "agent", "", "agent to run: claude, codex, opencode, gemini, or none (default: git config agentlab.agent, or claude)")
	flags.BoolVar(&f.detach, "detach", false, "do not switch to the tmux session")
	flags.BoolVar(&f.yes, "yes", false, "do not ask for confirmation")
	flags.BoolVar(&f.force, "force", false, "with --destroy: also delete work that is not on this machine")
	cmd.MarkFlagsMutuallyExclusive("list", "stop", "destroy")
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, args []string) error {
		if len(args) > 0 && (f.list || f.stop != "" || f.destroy != "") {
			return work.UsageErrorf("unexpected argument %q", args[0]).WithHint("usage: %s", cmd.UseLine())
		}
		if f.force && f.destroy == "" {
			return work.UsageErrorf("--force requires --destroy").WithHint("usage: %s", cmd.UseLine())
		}
		s := &sessionizer{App: a, c: c, f: f}
		if err := s.load(); err != nil {
			return err
		}
		switch {
		case f.list:
			return s.list(ctx)
		case f.stop != "":
			return s.stop(ctx, f.stop)
		case f.destroy != "":
			return s.destroy(ctx, f.destroy)
		}
		return s.open(ctx, firstOf(args))
	})
	return cmd
}

// load reads the files.
func (s *sessionizer) load() error {
	p, err := config.ResolvePaths(os.Getenv, false)
	if err != nil {
		return err
	}
	s.dir, s.clones = filepath.Join(p.Config, "sessionizer"), filepath.Join(p.State, "sessionizer", "repos")
	text, err := readSessionizerFile(s.dir, reposFile)
	if err == nil {
		s.repos, err = parseRepos(text, os.Getenv("HOME"))
	}
	if err != nil {
		return err
	}
	if _, err = readSessionizerFile(s.dir, allowlistFile); err != nil { // it is created with the others
		return err
	}
	if text, err = readSessionizerFile(s.dir, resourcesFile); err != nil {
		return err
	}
	s.cfg, err = parseResources([]byte(text))
	return err
}

// repo returns a repository by its name, also one that is not in repos.txt.
func (s *sessionizer) repo(name string) (listedRepo, error) {
	if i := slices.IndexFunc(s.repos, func(r listedRepo) bool { return strings.EqualFold(r.name, name) }); i >= 0 {
		return s.repos[i], nil
	}
	return listedRepo{name: name}, checkRepoName(name)
}

// path is the repository on this machine, which may not exist yet.
func (s *sessionizer) path(r listedRepo) string {
	if r.local() {
		return r.source
	}
	return filepath.Join(s.clones, strings.ToLower(r.name))
}

// entry finds the session of a repository among all sessions.
func (s *sessionizer) entry(ctx context.Context, r listedRepo, all []api.Session) (sessionizerEntry, error) {
	e := sessionizerEntry{Repo: r.name, repo: r, dir: s.path(r)}
	if _, err := os.Stat(e.dir); os.IsNotExist(err) {
		return e, nil
	}
	l, err := session.FindLink(ctx, e.dir, "")
	if err != nil {
		return e, err
	}
	e.link = l
	for _, got := range all {
		if l.Session != "" && (got.ID == l.Session || got.Name == l.Session) {
			e.at, e.Session, e.Sandbox, e.State = got, got.Name, got.Sandbox, got.State
			e.Running = got.Sandbox != "" && work.IsUp(api.Sandbox{State: got.State})
		}
	}
	return e, nil
}

// entries are the repositories of repos.txt and those that have been cloned, and the
// running sessions of all others.
func (s *sessionizer) entries(ctx context.Context) (out []sessionizerEntry, err error) {
	all, err := s.c.Sessions(ctx)
	if err != nil {
		return nil, err
	}
	repos := slices.Clone(s.repos)
	dirs, _ := filepath.Glob(filepath.Join(s.clones, "*", "*")) // the pattern is valid
	for _, dir := range dirs {
		name, err := filepath.Rel(s.clones, dir)
		if err != nil || checkRepoName(name) != nil {
			continue
		}
		if r, _ := s.repo(name); !slices.ContainsFunc(repos, func(o listedRepo) bool { return strings.EqualFold(o.name, name) }) {
			repos = append(repos, r)
		}
	}
	for _, r := range repos {
		e, err := s.entry(ctx, r, all.Items)
		if err != nil {
			s.Progressf("note: %s: %v", r.name, err)
			continue
		}
		out = append(out, e)
	}
	s.findWorktrees(ctx, out)
	for _, got := range all.Items {
		known := slices.ContainsFunc(out, func(e sessionizerEntry) bool { return e.at.ID == got.ID })
		if e := otherSession(got); !known && e.Running {
			out = append(out, e)
		}
	}
	return out, nil
}

// worktreesLimit is how long the list waits for the work trees of running sessions.
const worktreesLimit = 10 * time.Second

// findWorktrees sets the work trees of running sessions. A sandbox that does not answer
// in time has none in the list.
func (s *sessionizer) findWorktrees(ctx context.Context, entries []sessionizerEntry) {
	ctx, cancel := context.WithTimeout(ctx, worktreesLimit)
	defer cancel()
	faults := make([]error, len(entries))
	var all sync.WaitGroup
	for i := range entries {
		if e := &entries[i]; e.Running {
			all.Go(func() { e.Worktrees, faults[i] = s.worktrees(ctx, *e) })
		}
	}
	all.Wait()
	for i, err := range faults {
		if err != nil {
			s.Progressf("note: the work trees of %s are not listed: %v", entries[i].Repo, err)
		}
	}
}

// worktrees returns the branches of the work trees of a running session, without the
// main one. They have been checked: a branch is printable and has no space.
func (s *sessionizer) worktrees(ctx context.Context, e sessionizerEntry) ([]string, error) {
	st, err := session.Repo{C: s.c, Sandbox: fmt.Sprint(e.at.SandboxVMID), Path: e.dir}.State(ctx)
	if err != nil || len(st.Worktrees) == 0 {
		return nil, err
	}
	var branches []string
	for _, t := range st.Worktrees[1:] {
		if t.Branch != "" {
			branches = append(branches, t.Branch)
		}
	}
	slices.Sort(branches)
	return branches, nil
}

// one is the entry of the repository with a name, or of a session with a name.
func (s *sessionizer) one(ctx context.Context, name string) (sessionizerEntry, error) {
	all, err := s.c.Sessions(ctx)
	if err != nil {
		return sessionizerEntry{}, err
	}
	if i := slices.IndexFunc(all.Items, func(got api.Session) bool { return got.Name == name }); i >= 0 { // it has no slash
		return otherSession(all.Items[i]), nil
	}
	r, err := s.repo(name)
	if err != nil {
		return sessionizerEntry{}, err
	}
	return s.entry(ctx, r, all.Items)
}

// existing is one of a repository that has a session.
func (s *sessionizer) existing(ctx context.Context, name string) (sessionizerEntry, error) {
	e, err := s.one(ctx, name)
	if err == nil && e.Session == "" {
		err = agentlab.Errorf(agentlab.CodeNotFound, "%s has no session", e.Repo).WithHint("list those that have one: agentlab sessionizer --list")
	}
	return e, err
}

func (s *sessionizer) list(ctx context.Context) error {
	entries, err := s.entries(ctx)
	if err != nil {
		return err
	}
	entries = slices.DeleteFunc(entries, func(e sessionizerEntry) bool { return e.Session == "" })
	slices.SortStableFunc(entries, func(x, y sessionizerEntry) int { return strings.Compare(yesNo(y.Running), yesNo(x.Running)) })
	return s.emit(api.List[sessionizerEntry]{Items: append([]sessionizerEntry{}, entries...)}, func() error {
		t := newTable(s.Stdout, "REPOSITORY", "SESSION", "SANDBOX", "STATE")
		for _, e := range entries {
			t.row(e.Repo, e.Session, orDash(e.Sandbox), orDash(e.State))
			for _, branch := range e.Worktrees {
				t.row(e.Repo+"/"+branch, e.Session, orDash(e.Sandbox), orDash(e.State))
			}
		}
		return t.flush()
	})
}

func (s *sessionizer) stop(ctx context.Context, name string) error {
	e, err := s.existing(ctx, name)
	if err != nil {
		return err
	}
	if e.Sandbox != "" && !work.IsStopped(api.Sandbox{State: e.State}) {
		sb, err := s.stopSandbox(ctx, s.c, e.at, false, true)
		if err != nil {
			return err
		}
		e.State, e.Running = sb.State, false
	}
	if err := s.killTmux(ctx, e.tmux()); err != nil {
		return err
	}
	return s.done(e, "%s is stopped; its disk stays\n  → agentlab sessionizer %s", e.Repo, e.Repo)
}

func (s *sessionizer) destroy(ctx context.Context, name string) error {
	e, err := s.existing(ctx, name)
	if agentlab.CodeOf(err) == agentlab.CodeNotFound && e.repo.name != "" { // an earlier call may have been interrupted
		if perr := s.removeProfile(ctx, e); perr != nil {
			return perr
		}
	}
	if err != nil {
		return err
	}
	if e.other {
		return work.UsageErrorf("session %s is of a repository that the sessionizer does not know", e.Session).WithHint("delete it in its repository: agentlab rm")
	}
	how := removal{yes: s.f.yes, force: s.f.force, command: "agentlab sessionizer --destroy " + e.Repo}
	if err := s.removeSession(ctx, s.c, &e.link, how); err != nil {
		return err
	}
	if err := s.killTmux(ctx, e.tmux()); err != nil {
		return err
	}
	if err := s.removeProfile(ctx, e); err != nil {
		return err
	}
	return s.emit(e, silent)
}

// open starts a repository that does not run, and switches to its tmux session.
func (s *sessionizer) open(ctx context.Context, name string) error {
	if _, err := gitsafe.NeedProgram("tmux", "has the windows of a session"); err != nil {
		return err
	}
	if name == "" {
		entries, err := s.entries(ctx)
		if err != nil {
			return err
		}
		if len(entries) == 0 {
			return work.UsageErrorf("there are no repositories").WithHint("add one to %s, or name it: agentlab sessionizer OWNER/REPO", filepath.Join(s.dir, reposFile))
		}
		if name, err = s.pick(ctx, menu(entries)); err != nil || name == "" {
			return err
		}
	}
	name, branch := splitWorktree(name)
	e, err := s.one(ctx, name)
	if err != nil {
		return err
	}
	if e.other && !e.Running {
		return work.UsageErrorf("session %s is of a repository that the sessionizer does not know, and does not run", e.Session).
			WithHint("start it in its repository: agentlab start; or attach to it: agentlab attach %s", e.Session)
	}
	if !e.Running {
		if err := s.start(ctx, &e); err != nil {
			return err
		}
	}
	if branch != "" {
		found, err := s.worktrees(ctx, e)
		if err != nil {
			return err
		}
		if !slices.Contains(found, branch) {
			return agentlab.Errorf(agentlab.CodeNotFound, "session %s has no work tree of branch %s", e.Session, branch).
				WithHint("add it, in %s: agentlab worktree add BRANCH", e.dir)
		}
	}
	if err := s.ensureTmux(ctx, e, branch); err != nil || s.f.detach {
		return err
	}
	return s.switchTmux(ctx, e.tmux())
}

// splitWorktree splits OWNER/REPO/BRANCH, where BRANCH is that of a work tree. Without
// one, the name is returned as it is.
func splitWorktree(name string) (repo, branch string) {
	if parts := strings.SplitN(name, "/", 3); len(parts) == 3 {
		return parts[0] + "/" + parts[1], parts[2]
	}
	return name, ""
}

// start starts the session of a repository in the background.
func (s *sessionizer) start(ctx context.Context, e *sessionizerEntry) error {
	if err := s.checkConcurrent(ctx); err != nil {
		return err
	}
	if err := s.checkout(ctx, e.repo); err != nil {
		return err
	}
	profile, err := s.putProfile(ctx, *e)
	if err != nil {
		return err
	}
	if e.link, err = session.FindLink(ctx, e.dir, ""); err != nil {
		return err
	}
	if e.Session == "" { // also after the session of the link was deleted
		if err := e.link.Set(ctx, e.repo.sessionName(), profile); err != nil {
			return err
		}
	} else {
		profile = "" // it has one
	}
	// The windows of another sandbox cannot continue.
	if err := s.killTmux(ctx, e.tmux()); err != nil {
		return err
	}
	if err := s.App.start(ctx, s.c, startOptions{path: e.dir, agent: s.f.agent, profile: profile, detach: true, main: true}); err != nil {
		return err
	}
	*e, err = s.existing(ctx, e.Repo)
	return err
}

// checkConcurrent asks before a VM more than the soft maximum is started.
func (s *sessionizer) checkConcurrent(ctx context.Context) error {
	list, err := s.c.Sandboxes(ctx, client.SandboxQuery{})
	if err != nil {
		return err
	}
	n := 0
	for _, sb := range list.Items {
		if !agentlab.SandboxState(sb.State).Final() && !work.IsStopped(sb) && !sb.OnDisk {
			n++
		}
	}
	if n < s.cfg.MaxConcurrent || s.f.yes {
		return nil
	}
	s.Progressf("warning: %s already, and max_concurrent is %d", agentlab.Plural(n, "VM")+" running", s.cfg.MaxConcurrent)
	if !s.Confirm("Start another one?") {
		return agentlab.Errorf(agentlab.CodeLimit, "not started: not confirmed").
			WithHint("stop one (agentlab sessionizer --list), start it with --yes, or raise max_concurrent in %s", filepath.Join(s.dir, resourcesFile))
	}
	return nil
}

// checkout clones a repository, or brings its clone up to date. A clone appears only
// when it is complete.
func (s *sessionizer) checkout(ctx context.Context, r listedRepo) error {
	dir := s.path(r)
	if r.local() {
		return nil
	}
	if _, err := os.Stat(dir); err == nil {
		if err := gitsafe.UsersGit(ctx, s, "-C", dir, "pull", "--quiet", "--ff-only"); err != nil {
			s.Progressf("note: the clone in %s is not up to date: %v", dir, err)
		}
		return nil
	}
	parent := filepath.Dir(dir)
	if err := os.MkdirAll(parent, 0o700); err != nil {
		return work.LocalFault(parent, err)
	}
	const pattern = ".agentlab-clone-*"
	gitsafe.RemoveKilled(parent, pattern)
	tmp, remove, err := gitsafe.LockedDir(parent, pattern)
	if err != nil {
		return work.LocalFault(parent, err)
	}
	defer remove()
	s.Progressf("cloning %s", r.url())
	if err := gitsafe.UsersGit(ctx, s, "clone", "--", r.url(), filepath.Join(tmp, "repo")); err != nil {
		return agentlab.Errorf(agentlab.CodeUnavailable, "%s cannot be cloned: %w", r.name, err).
			WithHint("check that git can clone %s, or add its path or URL to %s", r.url(), filepath.Join(s.dir, reposFile))
	}
	if err := os.Rename(filepath.Join(tmp, "repo"), dir); err != nil {
		return work.LocalFault(dir, err)
	}
	return nil
}

// Package sessionizer starts the sessions of repositories and shows each in a local tmux
// session, with one window for each of its terminals.
package sessionizer

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/config"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/attach"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/session"
)

// Sessionizer starts the sessions of repositories and shows them in local tmux sessions.
type Sessionizer struct {
	work.UI
	C        *client.Client
	Terminal attach.Terminal             // of the user, for tmux and fzf
	Program  []string                    // command line of this program, for windows of tmux
	Started  func(session.Started) error // is called with a session that a run has started
	Options  Options

	dir    string // of its files
	clones string
	repos  []listedRepo
	cfg    settings
}

// Options are the options of a run.
type Options struct {
	Agent  string // see StartOptions
	Detach bool   // do not show the tmux session
	Yes    bool   // no confirmations
	Force  bool   // destroy a session with work that is not on this machine
}

// Entry is a repository and its session.
type Entry struct {
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

// Load reads the files.
func (s *Sessionizer) Load() error {
	p, err := config.ResolvePaths(os.Getenv, false)
	if err != nil {
		return err
	}
	s.dir, s.clones = filepath.Join(p.Config, "sessionizer"), filepath.Join(p.State, "sessionizer", "repos")
	text, err := readFile(s.dir, reposFile)
	if err == nil {
		s.repos, err = parseRepos(text, os.Getenv("HOME"))
	}
	if err != nil {
		return err
	}
	if _, err = readFile(s.dir, allowlistFile); err != nil { // it is created with the others
		return err
	}
	if text, err = readFile(s.dir, resourcesFile); err != nil {
		return err
	}
	s.cfg, err = parseResources([]byte(text))
	return err
}

// repo returns a repository by its name, also one that is not in repos.txt.
func (s *Sessionizer) repo(name string) (listedRepo, error) {
	if i := slices.IndexFunc(s.repos, func(r listedRepo) bool { return strings.EqualFold(r.name, name) }); i >= 0 {
		return s.repos[i], nil
	}
	return listedRepo{name: name}, checkRepoName(name)
}

// path is the repository on this machine, which may not exist yet.
func (s *Sessionizer) path(r listedRepo) string {
	if r.local() {
		return r.source
	}
	return filepath.Join(s.clones, strings.ToLower(r.name))
}

// entry finds the session of a repository among all sessions.
func (s *Sessionizer) entry(ctx context.Context, r listedRepo, all []api.Session) (Entry, error) {
	e := Entry{Repo: r.name, repo: r, dir: s.path(r)}
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
func (s *Sessionizer) entries(ctx context.Context) (out []Entry, err error) {
	all, err := s.C.Sessions(ctx)
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
		known := slices.ContainsFunc(out, func(e Entry) bool { return e.at.ID == got.ID })
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
func (s *Sessionizer) findWorktrees(ctx context.Context, entries []Entry) {
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
func (s *Sessionizer) worktrees(ctx context.Context, e Entry) ([]string, error) {
	st, err := session.Repo{C: s.C, Sandbox: fmt.Sprint(e.at.SandboxVMID), Path: e.dir}.State(ctx)
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
func (s *Sessionizer) one(ctx context.Context, name string) (Entry, error) {
	all, err := s.C.Sessions(ctx)
	if err != nil {
		return Entry{}, err
	}
	if i := slices.IndexFunc(all.Items, func(got api.Session) bool { return got.Name == name }); i >= 0 { // it has no slash
		return otherSession(all.Items[i]), nil
	}
	r, err := s.repo(name)
	if err != nil {
		return Entry{}, err
	}
	return s.entry(ctx, r, all.Items)
}

// existing is one of a repository that has a session.
func (s *Sessionizer) existing(ctx context.Context, name string) (Entry, error) {
	e, err := s.one(ctx, name)
	if err == nil && e.Session == "" {
		err = agentlab.Errorf(agentlab.CodeNotFound, "%s has no session", e.Repo).WithHint("list those that have one: agentlab sessionizer --list")
	}
	return e, err
}

// List returns the repositories that have a session and the running sessions of others;
// those that run are first.
func (s *Sessionizer) List(ctx context.Context) ([]Entry, error) {
	entries, err := s.entries(ctx)
	if err != nil {
		return nil, err
	}
	entries = slices.DeleteFunc(entries, func(e Entry) bool { return e.Session == "" })
	slices.SortStableFunc(entries, func(x, y Entry) int {
		switch {
		case x.Running == y.Running:
			return 0
		case x.Running:
			return -1
		}
		return 1
	})
	return entries, nil
}

// Stop stops the sandbox of a repository, and ends its tmux session.
func (s *Sessionizer) Stop(ctx context.Context, name string) (Entry, error) {
	e, err := s.existing(ctx, name)
	if err != nil {
		return e, err
	}
	if e.Sandbox != "" && !work.IsStopped(api.Sandbox{State: e.State}) {
		sb, err := session.Stop(ctx, s, s.C, e.at, false, true)
		if err != nil {
			return e, err
		}
		e.State, e.Running = sb.State, false
	}
	if err := killTmux(ctx, e.tmux()); err != nil {
		return e, err
	}
	return e, nil
}

// Destroy deletes the session of a repository with its sandbox and its profile.
func (s *Sessionizer) Destroy(ctx context.Context, name string) (Entry, error) {
	e, err := s.existing(ctx, name)
	if agentlab.CodeOf(err) == agentlab.CodeNotFound && e.repo.name != "" { // an earlier call may have been interrupted
		if perr := s.removeProfile(ctx, e); perr != nil {
			return e, perr
		}
	}
	if err != nil {
		return e, err
	}
	if e.other {
		return e, work.UsageErrorf("session %s is of a repository that the sessionizer does not know", e.Session).WithHint("delete it in its repository: agentlab rm")
	}
	how := session.Removal{Yes: s.Options.Yes, Force: s.Options.Force, Command: "agentlab sessionizer --destroy " + e.Repo}
	if err := session.Remove(ctx, s, s.C, &e.link, how); err != nil {
		return e, err
	}
	if err := killTmux(ctx, e.tmux()); err != nil {
		return e, err
	}
	if err := s.removeProfile(ctx, e); err != nil {
		return e, err
	}
	return e, nil
}

// Open starts a repository that does not run, and switches to its tmux session.
func (s *Sessionizer) Open(ctx context.Context, name string) error {
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
	if err := s.ensureTmux(ctx, e, branch); err != nil || s.Options.Detach {
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
func (s *Sessionizer) start(ctx context.Context, e *Entry) error {
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
	if err := killTmux(ctx, e.tmux()); err != nil {
		return err
	}
	p, err := session.Start(ctx, s, s.C, session.StartOptions{Path: e.dir, Agent: s.Options.Agent, Profile: profile, Detach: true, Main: true})
	if err == nil {
		err = p.RunDetached(ctx, s.C)
	}
	if err == nil {
		err = s.Started(p.Started)
	}
	if err != nil {
		return err
	}
	*e, err = s.existing(ctx, e.Repo)
	return err
}

// checkConcurrent asks before a VM more than the soft maximum is started.
func (s *Sessionizer) checkConcurrent(ctx context.Context) error {
	list, err := s.C.Sandboxes(ctx, client.SandboxQuery{})
	if err != nil {
		return err
	}
	n := 0
	for _, sb := range list.Items {
		if !agentlab.SandboxState(sb.State).Final() && !work.IsStopped(sb) && !sb.OnDisk {
			n++
		}
	}
	if n < s.cfg.MaxConcurrent || s.Options.Yes {
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
func (s *Sessionizer) checkout(ctx context.Context, r listedRepo) error {
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

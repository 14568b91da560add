package cli

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"os"
	"path/filepath"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
)

// remoteName is the remote of the session of a repository. A session of another branch
// has its own remote: remoteName, a hyphen and the name of the branch.
const remoteName = "agentlab"

// repoLink connects a repository of the user with a session. The repository's
// configuration has it, as a remote with the URL agentlab://SESSION.
type repoLink struct {
	path    string // top of the work tree
	remote  string
	branch  string // that the session is for; "" if it is that of the repository
	session string // ID, or the name of a session that is being created; "" if there is none
}

// findLink returns the link of the repository that contains path. With a branch, it
// is that of the session of the branch.
func findLink(ctx context.Context, path, branch string) (repoLink, error) {
	top, err := gitsafe.Git(ctx, path, "rev-parse", "--show-toplevel")
	if err != nil {
		if _, serr := os.Stat(path); serr != nil {
			return repoLink{}, agentlab.Errorf(agentlab.CodeNotFound, "there is no directory %s", path).WithHint("check the path, or clone the repository first")
		}
		if fault := gitsafe.GitRefuses(path, err); fault != nil {
			return repoLink{}, fault
		}
		if bare, berr := gitsafe.Git(ctx, path, "rev-parse", "--is-bare-repository"); berr == nil && bare == "true" {
			return repoLink{}, agentlab.Errorf(agentlab.CodeInvalid, "%s is a bare repository, which has no work tree", path).
				WithHint("clone it, and start there: git clone %s", work.ShellQuote(path))
		}
		return repoLink{}, agentlab.Errorf(agentlab.CodeInvalid, "%s is not in the work tree of a git repository: %v", path, err).
			WithHint("change to a repository, or create one: git init && git add . && git commit -m First")
	}
	l := repoLink{path: top, remote: remoteName}
	if branch != "" {
		if err := checkBranch(branch, "branch"); err != nil {
			return l, err
		}
		l.branch, l.remote = branch, branchRemote(ctx, top, branch)
	}
	url := l.key(ctx, "url")
	if url == "" {
		return l, nil
	}
	name, ours := strings.CutPrefix(url, remoteScheme)
	if !ours {
		return l, agentlab.Errorf(agentlab.CodeConflict, "the remote %s of this repository is not a session (%s)", l.remote, agentlab.WithoutControls(url)).
			WithHint("rename it: git remote rename %s NAME", l.remote)
	}
	l.session = name
	return l, nil
}

// branchRemote returns the remote of the session of a branch. Branches such as feature/a
// and feature-a have the same name without the characters that a remote cannot have: the
// second one gets a hash.
func branchRemote(ctx context.Context, path, branch string) string {
	plain := repoLink{path: path, remote: remoteName + "-" + agentlab.SessionNameOf(branch)}
	hashed := repoLink{path: path, remote: plain.remote + "-" + shortHash(branch)}
	if owner := plain.key(ctx, branchKey); hashed.key(ctx, "url") != "" || owner != "" && owner != branch {
		return hashed.remote
	}
	return plain.remote
}

// shortHash is a hash of 6 characters, which makes names differ.
func shortHash(text string) string {
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:3])
}

// currentLink is findLink for the branch that is checked out if that has a session of its
// own, and otherwise for the repository.
func currentLink(ctx context.Context, path string) (repoLink, error) {
	if branch := gitsafe.CurrentBranch(ctx, path); branch != "" {
		if l, err := findLink(ctx, path, branch); err == nil && l.session != "" {
			return l, nil
		}
	}
	return findLink(ctx, path, "")
}

// projectName is the name of the session of a repository, from that of its directory.
func (l repoLink) projectName(branch string) string {
	name := agentlab.SessionNameOf(filepath.Base(l.path))
	if branch != "" {
		name = agentlab.SessionNameOf(name[:min(len(name), 20)] + "-" + branch)
	}
	if name == "" || agentlab.ValidateSessionName(name) != nil {
		name = "repo-" + l.hash()
	}
	return name
}

// hash is a short hash of the path, and of the branch if the session is for one.
func (l repoLink) hash() string {
	if l.branch == "" {
		return shortHash(l.path)
	}
	return shortHash(l.path + "\x00" + l.branch)
}

// set writes the link to the configuration of the repository.
// profile is that of the session, "" to keep what it has.
func (l *repoLink) set(ctx context.Context, session, profile string) error {
	for _, kv := range [][2]string{
		{"url", remoteScheme + session},
		{profileKey, profile},
		{branchKey, l.branch},
		{"fetch", "+refs/heads/*:" + l.ref("*")},
		{"tagOpt", "--no-tags"},
		{"skipFetchAll", "true"}, // it would start the sandbox
	} {
		if kv[1] == "" {
			continue
		}
		if err := l.setKey(ctx, kv[0], kv[1]); err != nil {
			return err
		}
	}
	l.session = session
	return nil
}

func (l *repoLink) setKey(ctx context.Context, name, value string) error {
	if _, err := gitsafe.Git(ctx, l.path, "config", "--local", "remote."+l.remote+"."+name, value); err != nil {
		return agentlab.Errorf(agentlab.CodeUnavailable, "the remote %s cannot be written to the configuration of %s: %w", l.remote, l.path, err)
	}
	return nil
}

// profileKey is the name in the configuration of a remote for the profile of its session.
// A session that takes the place of a deleted one has the same profile: otherwise the new
// one could have more network than the user chose for the repository.
const profileKey = "agentlabProfile"

// branchKey is like profileKey, for the branch that the session is for.
const branchKey = "agentlabBranch"

// profile returns the profile of the session, also after the session was deleted, or else
// the default.
func (l *repoLink) profile(ctx context.Context, c *client.Client) (string, error) {
	if name := l.key(ctx, profileKey); name != "" {
		return name, nil
	}
	if name, err := gitsafe.Git(ctx, l.path, "config", "--get", "agentlab.profile"); err == nil && name != "" {
		if _, err := c.Profile(ctx, name); agentlab.CodeOf(err) == agentlab.CodeNotFound {
			return "", agentlab.Errorf(agentlab.CodeNotFound, "git config agentlab.profile: %w", err).WithField("profile").WithHint("%s", agentlab.HintOf(err))
		}
		return name, nil
	}
	list, err := c.Profiles(ctx)
	for _, p := range list.Items {
		if p.SessionDefault {
			return p.Name, nil
		}
	}
	return defaultProfile, err
}

// carriedKey is like profileKey, for the tree with the uncommitted changes that were
// carried into the session last.
const carriedKey = "agentlabCarried"

// key returns a value of the remote in the configuration; "" if it is not there.
func (l *repoLink) key(ctx context.Context, name string) string {
	value, _ := gitsafe.Git(ctx, l.path, "config", "--local", "--get", "remote."+l.remote+"."+name)
	return value
}

// keepProfile writes the profile of the session to the link, for a session that replaces
// it.
func (l *repoLink) keepProfile(ctx context.Context, c *client.Client) error {
	s, err := c.Session(ctx, l.session)
	switch agentlab.CodeOf(err) {
	case "":
		return l.set(ctx, l.session, s.Profile)
	case agentlab.CodeNotFound:
		return nil
	}
	return err
}

// remove deletes the remote from the configuration of the repository, and its refs.
func (l *repoLink) remove(ctx context.Context) error {
	if err := gitsafe.DeleteRefs(ctx, l.path, strings.TrimSuffix(l.ref(""), "/")); err != nil {
		return err
	}
	_, err := gitsafe.Git(ctx, l.path, "remote", "remove", l.remote) // which would run a hook for refs
	l.session = ""
	return err
}

// ref is the local ref of a branch of the session.
func (l repoLink) ref(branch string) string { return "refs/remotes/" + l.remote + "/" + branch }

// heads are the commits of the branches of the session that were fetched.
func (l repoLink) heads(ctx context.Context) (map[string]string, error) {
	out, err := gitsafe.Git(ctx, l.path, "for-each-ref", "--format=%(objectname) %(refname:strip=3)", strings.TrimSuffix(l.ref(""), "/"))
	if err != nil {
		return nil, err
	}
	heads := map[string]string{}
	for line := range strings.Lines(out) {
		commit, branch, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		heads[branch] = commit
	}
	return heads, nil
}

// ensureSession returns the session of a repository, and creates it as in want if there is
// none. An empty profile is that of the session that was there before, or else the default.
// The name is written to the repository first: after a crash in between, the next call
// creates that session instead of a second one.
func (a *App) ensureSession(ctx context.Context, c *client.Client, l *repoLink, branch string, want api.SessionCreate) (s api.Session, created bool, err error) {
	unlock, err := gitsafe.LockRepo(ctx, a, l.path, false)
	if err != nil {
		return s, false, err
	}
	defer unlock()
	if *l, err = findLink(ctx, l.path, branch); err != nil { // another command may have created it
		return s, false, err
	}
	name := l.session
	if name != "" {
		s, err = c.Session(ctx, name)
		switch {
		case err == nil && l.owns(s, branch):
			if err := sameProfile(s, want.Profile); err != nil {
				return s, false, err
			}
			return s, false, l.set(ctx, s.ID, s.Profile)
		case err == nil: // of another repository, since this one was interrupted
			name = ""
		case agentlab.CodeOf(err) != agentlab.CodeNotFound:
			return s, false, err
		}
	}
	if want.Profile == "" {
		if want.Profile, err = l.profile(ctx, c); err != nil {
			return s, false, err
		}
	}
	if name == "" || agentlab.IsSessionID(name) { // of a session that was deleted
		if name, err = l.freeName(ctx, c, branch); err != nil {
			return s, false, err
		}
		if err := l.set(ctx, name, ""); err != nil {
			return s, false, err
		}
	}
	if l.key(ctx, carriedKey) != "" { // into the session that was there before
		if err := l.setKey(ctx, carriedKey, "none"); err != nil {
			return s, false, err
		}
	}
	plain := name == l.projectName(branch)
	want.Name, want.IfMissing = name, !plain
	s, err = c.CreateSession(ctx, want)
	if plain && agentlab.CodeOf(err) == agentlab.CodeExists { // another repository was faster
		name = l.longName(branch)
		if err := l.set(ctx, name, ""); err != nil {
			return s, false, err
		}
		want.Name, want.IfMissing = name, true
		s, err = c.CreateSession(ctx, want)
	}
	if err != nil {
		return s, false, err
	}
	return s, true, l.set(ctx, s.ID, s.Profile)
}

// sameProfile returns an error for a profile that a session does not have.
func sameProfile(s api.Session, profile string) error {
	if profile == "" || profile == s.Profile {
		return nil
	}
	return agentlab.Errorf(agentlab.CodeConflict, "session %s has the profile %s, not %s", s.Name, s.Profile, agentlab.WithoutControls(profile)).
		WithHint("continue it without --profile, or replace it by a new one with --fresh --profile %s", agentlab.WithoutControls(profile))
}

// owns reports whether a session that was found by the link is that of this repository.
// A name of which the repository has not recorded the ID may be another repository's, if
// it is only that of the directory.
func (l repoLink) owns(s api.Session, branch string) bool {
	return l.session == s.ID || l.session != l.projectName(branch) || len(s.History) == 0
}

// freeName returns the name of the directory, or longName if a session has that.
func (l repoLink) freeName(ctx context.Context, c *client.Client, branch string) (string, error) {
	name := l.projectName(branch)
	switch _, err := c.Session(ctx, name); agentlab.CodeOf(err) {
	case agentlab.CodeNotFound:
		return name, nil
	case "":
		return l.longName(branch), nil
	default:
		return "", err
	}
}

// longName is projectName with a hash of the path and the branch, which no other one has.
func (l repoLink) longName(branch string) string {
	name := l.projectName(branch)
	return agentlab.SessionNameOf(name[:min(len(name), 30)] + "-" + l.hash())
}

// chosenSession returns the session that an argument names, or without one that of the
// repository in the current directory. The repository's link is returned with it if
// there is one.
func (a *App) chosenSession(ctx context.Context, c *client.Client, arg string) (api.Session, repoLink, error) {
	l, err := currentLink(ctx, ".")
	if arg != "" {
		s, serr := c.Session(ctx, arg)
		if serr == nil && err == nil && l.session != s.ID {
			l = repoLink{path: l.path}
			l = a.otherLink(ctx, l, s.ID)
		}
		return s, l, serr
	}
	if err != nil {
		return api.Session{}, l, err
	}
	if l.session == "" {
		return api.Session{}, l, agentlab.Errorf(agentlab.CodeNotFound, "the repository %s has no session", l.path).
			WithHint("start one: agentlab start; list those of other repositories: agentlab ls")
	}
	s, err := c.Session(ctx, l.session)
	return s, l, err
}

// otherLink returns the link of a repository with a session that is not its first.
func (a *App) otherLink(ctx context.Context, l repoLink, id string) repoLink {
	none := repoLink{path: l.path}
	out, err := gitsafe.Git(ctx, l.path, "config", "--local", "--get-regexp", `^remote\.agentlab(-.*)?\.url$`)
	if err != nil {
		return none
	}
	for line := range strings.Lines(out) {
		key, url, _ := strings.Cut(strings.TrimSpace(line), " ")
		if url == remoteScheme+id {
			return repoLink{path: l.path, remote: strings.TrimSuffix(strings.TrimPrefix(key, "remote."), ".url"), session: id}
		}
	}
	return none
}

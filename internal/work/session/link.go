package session

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

// Link connects a repository of the user with a session. The repository's
// configuration has it, as a remote with the URL agentlab://SESSION.
type Link struct {
	Path    string // top of the work tree
	Remote  string
	Branch  string // that the session is for; "" if it is that of the repository
	Session string // ID, or the name of a session that is being created; "" if there is none
}

// FindLink returns the link of the repository that contains path. With a branch, it
// is that of the session of the branch.
func FindLink(ctx context.Context, path, branch string) (Link, error) {
	top, err := gitsafe.Git(ctx, path, "rev-parse", "--show-toplevel")
	if err != nil {
		if _, serr := os.Stat(path); serr != nil {
			return Link{}, agentlab.Errorf(agentlab.CodeNotFound, "there is no directory %s", path).WithHint("check the path, or clone the repository first")
		}
		if fault := gitsafe.GitRefuses(path, err); fault != nil {
			return Link{}, fault
		}
		if bare, berr := gitsafe.Git(ctx, path, "rev-parse", "--is-bare-repository"); berr == nil && bare == "true" {
			return Link{}, agentlab.Errorf(agentlab.CodeInvalid, "%s is a bare repository, which has no work tree", path).
				WithHint("clone it, and start there: git clone %s", work.ShellQuote(path))
		}
		return Link{}, agentlab.Errorf(agentlab.CodeInvalid, "%s is not in the work tree of a git repository: %v", path, err).
			WithHint("change to a repository, or create one: git init && git add . && git commit -m First")
	}
	l := Link{Path: top, Remote: remoteName}
	if branch != "" {
		if err := checkBranch(branch, "branch"); err != nil {
			return l, err
		}
		l.Branch, l.Remote = branch, branchRemote(ctx, top, branch)
	}
	url := l.Key(ctx, "url")
	if url == "" {
		return l, nil
	}
	name, ours := strings.CutPrefix(url, RemoteScheme)
	if !ours {
		return l, agentlab.Errorf(agentlab.CodeConflict, "the remote %s of this repository is not a session (%s)", l.Remote, agentlab.WithoutControls(url)).
			WithHint("rename it: git remote rename %s NAME", l.Remote)
	}
	l.Session = name
	return l, nil
}

// branchRemote returns the remote of the session of a branch. Branches such as feature/a
// and feature-a have the same name without the characters that a remote cannot have: the
// second one gets a hash.
func branchRemote(ctx context.Context, path, branch string) string {
	plain := Link{Path: path, Remote: remoteName + "-" + agentlab.SessionNameOf(branch)}
	hashed := Link{Path: path, Remote: plain.Remote + "-" + ShortHash(branch)}
	if owner := plain.Key(ctx, branchKey); hashed.Key(ctx, "url") != "" || owner != "" && owner != branch {
		return hashed.Remote
	}
	return plain.Remote
}

// ShortHash is a hash of 6 characters, which makes names differ.
func ShortHash(text string) string {
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:3])
}

// currentLink is FindLink for the branch that is checked out if that has a session of its
// own, and otherwise for the repository.
func currentLink(ctx context.Context, path string) (Link, error) {
	if branch := gitsafe.CurrentBranch(ctx, path); branch != "" {
		if l, err := FindLink(ctx, path, branch); err == nil && l.Session != "" {
			return l, nil
		}
	}
	return FindLink(ctx, path, "")
}

// ProjectName is the name of the session of a repository, from that of its directory.
func (l Link) ProjectName(branch string) string {
	name := agentlab.SessionNameOf(filepath.Base(l.Path))
	if branch != "" {
		name = agentlab.SessionNameOf(name[:min(len(name), 20)] + "-" + branch)
	}
	if name == "" || agentlab.ValidateSessionName(name) != nil {
		name = "repo-" + l.hash()
	}
	return name
}

// hash is a short hash of the path, and of the branch if the session is for one.
func (l Link) hash() string {
	if l.Branch == "" {
		return ShortHash(l.Path)
	}
	return ShortHash(l.Path + "\x00" + l.Branch)
}

// Set writes the link to the configuration of the repository.
// profile is that of the session, "" to keep what it has.
func (l *Link) Set(ctx context.Context, session, profile string) error {
	for _, kv := range [][2]string{
		{"url", RemoteScheme + session},
		{profileKey, profile},
		{branchKey, l.Branch},
		{"fetch", "+refs/heads/*:" + l.Ref("*")},
		{"tagOpt", "--no-tags"},
		{"skipFetchAll", "true"}, // it would start the sandbox
	} {
		if kv[1] == "" {
			continue
		}
		if err := l.SetKey(ctx, kv[0], kv[1]); err != nil {
			return err
		}
	}
	l.Session = session
	return nil
}

// SetKey writes a value of the remote to the configuration.
func (l *Link) SetKey(ctx context.Context, name, value string) error {
	if _, err := gitsafe.Git(ctx, l.Path, "config", "--local", "remote."+l.Remote+"."+name, value); err != nil {
		return agentlab.Errorf(agentlab.CodeUnavailable, "the remote %s cannot be written to the configuration of %s: %w", l.Remote, l.Path, err)
	}
	return nil
}

// profileKey is the name in the configuration of a remote for the profile of its session.
// A session that takes the place of a deleted one has the same profile: otherwise the new
// one could have more network than the user chose for the repository.
const profileKey = "agentlabProfile"

// branchKey is like profileKey, for the branch that the session is for.
const branchKey = "agentlabBranch"

// Profile returns the profile of the session, also after the session was deleted, or else
// the default.
func (l *Link) Profile(ctx context.Context, c *client.Client) (string, error) {
	if name := l.Key(ctx, profileKey); name != "" {
		return name, nil
	}
	if name, err := gitsafe.Git(ctx, l.Path, "config", "--get", "agentlab.profile"); err == nil && name != "" {
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

// Key returns a value of the remote in the configuration; "" if it is not there.
func (l *Link) Key(ctx context.Context, name string) string {
	value, _ := gitsafe.Git(ctx, l.Path, "config", "--local", "--get", "remote."+l.Remote+"."+name)
	return value
}

// KeepProfile writes the profile of the session to the link, for a session that replaces
// it.
func (l *Link) KeepProfile(ctx context.Context, c *client.Client) error {
	s, err := c.Session(ctx, l.Session)
	switch agentlab.CodeOf(err) {
	case "":
		return l.Set(ctx, l.Session, s.Profile)
	case agentlab.CodeNotFound:
		return nil
	}
	return err
}

// Remove deletes the remote from the configuration of the repository, and its refs.
func (l *Link) Remove(ctx context.Context) error {
	if err := gitsafe.DeleteRefs(ctx, l.Path, strings.TrimSuffix(l.Ref(""), "/")); err != nil {
		return err
	}
	_, err := gitsafe.Git(ctx, l.Path, "remote", "remove", l.Remote) // which would run a hook for refs
	l.Session = ""
	return err
}

// Ref is the local ref of a branch of the session.
func (l Link) Ref(branch string) string { return "refs/remotes/" + l.Remote + "/" + branch }

// Heads are the commits of the branches of the session that were fetched.
func (l Link) Heads(ctx context.Context) (map[string]string, error) {
	out, err := gitsafe.Git(ctx, l.Path, "for-each-ref", "--format=%(objectname) %(refname:strip=3)", strings.TrimSuffix(l.Ref(""), "/"))
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

// sameProfile returns an error for a profile that a session does not have.
func sameProfile(s api.Session, profile string) error {
	if profile == "" || profile == s.Profile {
		return nil
	}
	return agentlab.Errorf(agentlab.CodeConflict, "session %s has the profile %s, not %s", s.Name, s.Profile, agentlab.WithoutControls(profile)).
		WithHint("continue it without --profile, or replace it by a new one with --fresh --profile %s", agentlab.WithoutControls(profile))
}

// Owns reports whether a session that was found by the link is that of this repository.
// A name of which the repository has not recorded the ID may be another repository's, if
// it is only that of the directory.
func (l Link) Owns(s api.Session, branch string) bool {
	return l.Session == s.ID || l.Session != l.ProjectName(branch) || len(s.History) == 0
}

// FreeName returns the name of the directory, or LongName if a session has that.
func (l Link) FreeName(ctx context.Context, c *client.Client, branch string) (string, error) {
	name := l.ProjectName(branch)
	switch _, err := c.Session(ctx, name); agentlab.CodeOf(err) {
	case agentlab.CodeNotFound:
		return name, nil
	case "":
		return l.LongName(branch), nil
	default:
		return "", err
	}
}

// LongName is ProjectName with a hash of the path and the branch, which no other one has.
func (l Link) LongName(branch string) string {
	name := l.ProjectName(branch)
	return agentlab.SessionNameOf(name[:min(len(name), 30)] + "-" + l.hash())
}

// otherLink returns the link of a repository with a session that is not its first.
func otherLink(ctx context.Context, ui work.UI, l Link, id string) Link {
	none := Link{Path: l.Path}
	out, err := gitsafe.Git(ctx, l.Path, "config", "--local", "--get-regexp", `^remote\.agentlab(-.*)?\.url$`)
	if err != nil {
		return none
	}
	for line := range strings.Lines(out) {
		key, url, _ := strings.Cut(strings.TrimSpace(line), " ")
		if url == RemoteScheme+id {
			return Link{Path: l.Path, Remote: strings.TrimSuffix(strings.TrimPrefix(key, "remote."), ".url"), Session: id}
		}
	}
	return none
}

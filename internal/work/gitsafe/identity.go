package gitsafe

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"net/url"
	"path"
	"path/filepath"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/client"
)

// Identity is the repository that a workspace of --stateful or a session of --branch
// belongs to. The names of those have a hash of it: repositories in directories of the
// same name share nothing.
type Identity struct {
	arg  string // as the user named it
	ID   string // normalised URL, or the path of the Git directory without /.git
	path string // of a local repository; "" for a URL
}

// Identify returns the identity of the repository that --repo names. All work trees of a
// local repository have the same one.
func Identify(ctx context.Context, arg string) (Identity, error) {
	at, local, err := LocalRepo(arg)
	if err != nil || !local {
		return Identity{arg: arg, ID: normalURL(arg)}, err
	}
	r := Identity{arg: arg, ID: at, path: at}
	if dir, err := Git(ctx, at, "rev-parse", "--path-format=absolute", "--git-common-dir"); err == nil {
		r.ID = dir
	}
	if resolved, err := filepath.EvalSymlinks(r.ID); err == nil {
		r.ID = resolved
	}
	r.ID = strings.TrimSuffix(r.ID, "/.git")
	return r, nil
}

// normalURL returns the same text for different spellings of a repository's URL.
func normalURL(raw string) string {
	if !strings.Contains(raw, "://") { // user@host:path
		if host, path, ok := strings.Cut(raw, ":"); ok {
			raw = "ssh://" + host + "/" + strings.TrimPrefix(path, "/")
		}
	}
	u, err := url.Parse(raw)
	if err != nil {
		return raw
	}
	scheme := u.Scheme
	if scheme == "git+ssh" || scheme == "ssh+git" {
		scheme = "ssh"
	}
	host := strings.ToLower(u.Hostname())
	if port := u.Port(); port != "" && port != map[string]string{"https": "443", "http": "80", "ssh": "22", "git": "9418"}[scheme] {
		host += ":" + port
	}
	if user := u.User.Username(); scheme == "ssh" && user != "" { // a path can begin in the user's home
		host = user + "@" + host
	}
	return scheme + "://" + host + strings.TrimSuffix(path.Clean("/"+u.Path), ".git")
}

// named returns a name with the hash of the identity, and of a branch.
func (r Identity) named(prefix, branch string) string {
	sum := sha256.Sum256([]byte(r.ID + "\x00" + branch))
	prefix = cmp.Or(agentlab.SessionNameOf(prefix), "repo")
	return strings.Trim(prefix[:min(len(prefix), 31)], "-") + "-" + hex.EncodeToString(sum[:4])
}

// WorkspaceName is the name of the workspace of --stateful.
func (r Identity) WorkspaceName() string { return r.named(workspaceNameOf(r.ID), "") }

// SessionName is the name of the session of --branch.
func (r Identity) SessionName(branch string) string {
	base := workspaceNameOf(r.ID)
	return r.named(base[:min(len(base), 12)]+"-"+branch, branch)
}

// CheckStateful returns an error if the workspace of --stateful does not exist, but one
// with the name that versions before the hash used: that can be of another repository
// in a directory of the same name, so the user decides.
func (r Identity) CheckStateful(ctx context.Context, c *client.Client) error {
	name, old := r.WorkspaceName(), workspaceNameOf(r.arg)
	if w, err := c.Workspace(ctx, name); old == "" || err == nil && agentlab.WorkspaceState(w.State).Live() {
		return nil
	}
	w, err := c.Workspace(ctx, old)
	if code := agentlab.CodeOf(err); code == agentlab.CodeNotFound || code == agentlab.CodeConflict || err == nil && !agentlab.WorkspaceState(w.State).Live() {
		return nil
	} else if err != nil {
		return err
	}
	all, err := c.Sessions(ctx)
	if err != nil {
		return err
	}
	for _, s := range all.Items {
		if s.WorkspaceID == w.ID {
			return nil
		}
	}
	return agentlab.Errorf(agentlab.CodeConflict, "there is a workspace %s, and it is not known whether it is that of the repository %s", old, agentlab.WithoutControls(r.ID)).
		WithField("workspace").WithHint("if it is, rename it: agentlab workspace rename %s %s; otherwise create one for the repository: --workspace new:%s instead of --stateful, this time", old, name, name)
}

// WorkedIn reports whether the jobs of a session, if it has any, were on the repository.
func (r Identity) WorkedIn(ctx context.Context, c *client.Client, session string) (bool, error) {
	s, err := c.Session(ctx, session)
	if err != nil {
		return false, err
	}
	unused := true
	for _, h := range s.History {
		if h.JobID == "" {
			continue
		}
		unused = false
		j, err := c.Job(ctx, h.JobID)
		if agentlab.CodeOf(err) == agentlab.CodeNotFound {
			continue
		} else if err != nil {
			return false, err
		}
		if r.path == "" && j.RepoURL != "" && normalURL(j.RepoURL) == r.ID {
			return true, nil
		}
		if base := j.Result.BaseCommit; r.path != "" && j.Bundled && IsCommit(base) {
			if _, err := Git(ctx, r.path, "cat-file", "-e", base+"^{commit}"); err == nil {
				return true, nil
			}
		}
	}
	return unused, nil
}

// workspaceNameOf returns the name of the workspace of a repository: the last part of
// its path, as a DNS label; "" if that has no letter or digit.
func workspaceNameOf(repo string) string {
	if path, local, err := LocalRepo(repo); err == nil && local {
		repo = path
	}
	base := strings.TrimSuffix(filepath.Base(strings.TrimRight(repo, "/")), ".git")
	if i := strings.LastIndexByte(base, ':'); i >= 0 {
		base = base[i+1:]
	}
	return agentlab.SessionNameOf(base)
}

package cli

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
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/work"
)

// repoIdentity is the repository that a workspace of --stateful or a session of --branch
// belongs to. The names of those have a hash of it: repositories in directories of the
// same name share nothing.
type repoIdentity struct {
	arg  string // as the user named it
	id   string // normalised URL, or the path of the Git directory without /.git
	path string // of a local repository; "" for a URL
}

// identify returns the identity of the repository that --repo names. All work trees of a
// local repository have the same one.
func identify(ctx context.Context, arg string) (repoIdentity, error) {
	at, local, err := localRepo(arg)
	if err != nil || !local {
		return repoIdentity{arg: arg, id: normalURL(arg)}, err
	}
	r := repoIdentity{arg: arg, id: at, path: at}
	if dir, err := git(ctx, at, "rev-parse", "--path-format=absolute", "--git-common-dir"); err == nil {
		r.id = dir
	}
	if resolved, err := filepath.EvalSymlinks(r.id); err == nil {
		r.id = resolved
	}
	r.id = strings.TrimSuffix(r.id, "/.git")
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
func (r repoIdentity) named(prefix, branch string) string {
	sum := sha256.Sum256([]byte(r.id + "\x00" + branch))
	prefix = cmp.Or(agentlab.SessionNameOf(prefix), "repo")
	return strings.Trim(prefix[:min(len(prefix), 31)], "-") + "-" + hex.EncodeToString(sum[:4])
}

// workspaceName is the name of the workspace of --stateful.
func (r repoIdentity) workspaceName() string { return r.named(workspaceNameOf(r.id), "") }

// sessionName is the name of the session of --branch.
func (r repoIdentity) sessionName(branch string) string {
	base := workspaceNameOf(r.id)
	return r.named(base[:min(len(base), 12)]+"-"+branch, branch)
}

// checkStateful returns an error if the workspace of --stateful does not exist, but one
// with the name that versions before the hash used: that can be of another repository
// in a directory of the same name, so the user decides.
func (r repoIdentity) checkStateful(ctx context.Context, c *client.Client) error {
	name, old := r.workspaceName(), workspaceNameOf(r.arg)
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
	return agentlab.Errorf(agentlab.CodeConflict, "there is a workspace %s, and it is not known whether it is that of the repository %s", old, agentlab.WithoutControls(r.id)).
		WithField("workspace").WithHint("if it is, rename it: agentlab workspace rename %s %s; otherwise create one for the repository: --workspace new:%s instead of --stateful, this time", old, name, name)
}

// newSessionImage returns the image of a session that is created for a repository: the
// one that was asked for, or that of the project file of a local repository.
func newSessionImage(ctx context.Context, repo, ref, asked string) (string, error) {
	if repo == "" || asked != "" {
		return asked, nil
	}
	path, local, err := localRepo(repo)
	if err != nil || !local {
		return "", err
	}
	src, err := findSource(ctx, path, ref)
	if err != nil {
		return "", err
	}
	r := api.JobCreate{}
	_, err = useProject(ctx, src, &r)
	return r.Image, err
}

// branchSession returns the session of a branch of a repository, and creates it as
// requested if there is none. Without a repository it is that of the branch.
func (a *App) branchSession(ctx context.Context, c *client.Client, repo string, r api.SessionCreate) (api.Session, error) {
	branch := r.Branch
	r.IfMissing = true
	if repo == "" {
		return c.CreateSession(ctx, r)
	}
	of, err := identify(ctx, repo)
	if err != nil {
		return api.Session{}, err
	}
	r.Name = of.sessionName(branch)
	if _, err := c.Session(ctx, r.Name); agentlab.CodeOf(err) != agentlab.CodeNotFound {
		if err != nil {
			return api.Session{}, err
		}
		return c.CreateSession(ctx, r) // which checks the branch
	}
	all, err := c.Sessions(ctx)
	if err != nil {
		return api.Session{}, err
	}
	var others []string
	for _, s := range all.Items {
		if s.Branch != branch {
			continue
		}
		// Versions before the hash used this name, and so do sessions of a branch that were
		// created outside of a repository.
		if s.Name == agentlab.SessionNameOf(branch) {
			if ours, err := of.workedIn(ctx, c, s.ID); err != nil || ours {
				return s, err
			}
		}
		others = append(others, s.Name)
	}
	s, err := c.CreateSession(ctx, r)
	if err == nil && len(others) > 0 {
		a.Progressf("note: created session %s for branch %s of %s; other sessions for a branch of that name: %s\n  → to continue one of them: --session %s", s.Name, branch, agentlab.WithoutControls(of.id), work.JoinNames(others), others[0])
	}
	return s, err
}

// workedIn reports whether the jobs of a session, if it has any, were on the repository.
func (r repoIdentity) workedIn(ctx context.Context, c *client.Client, session string) (bool, error) {
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
		if r.path == "" && j.RepoURL != "" && normalURL(j.RepoURL) == r.id {
			return true, nil
		}
		if base := j.Result.BaseCommit; r.path != "" && j.Bundled && isCommit(base) {
			if _, err := git(ctx, r.path, "cat-file", "-e", base+"^{commit}"); err == nil {
				return true, nil
			}
		}
	}
	return unused, nil
}

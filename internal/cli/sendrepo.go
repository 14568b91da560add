package cli

import (
	"context"
	"fmt"
	"os"
	"regexp"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/client"
)

// localSource is a commit of a local repository that is to be sent.
type localSource struct {
	path, objects string
	commit        string
	branch        string // the branch in the bundle that holds the commit
	modules       []submodule
	unsent        []unsent
}

// commitID is the one commit that a revision may stand for, as git prints it.
var commitID = regexp.MustCompile(`^([0-9a-f]{40}|[0-9a-f]{64})$`)

// findSource looks up ref in the repository at path.
func findSource(ctx context.Context, path, ref string) (localSource, error) {
	none := localSource{}
	objects, err := git(ctx, path, "rev-parse", "--path-format=absolute", "--git-path", "objects")
	if err != nil {
		return none, agentlab.Errorf(agentlab.CodeInvalid, "%s is not a git repository: %v", path, err).WithField("repo").
			WithHint("run 'git init' there and commit something, or leave --repo out")
	}
	if ref == "" {
		ref = "HEAD"
	}
	commit, err := git(ctx, path, "rev-parse", "--verify", "--quiet", "--end-of-options", ref+"^{commit}")
	if err != nil || !commitID.MatchString(commit) {
		if ref == "HEAD" {
			return none, agentlab.Errorf(agentlab.CodeInvalid, "%s has no commit yet", path).WithField("repo").
				WithHint("commit something first: git add . && git commit -m First; or leave --repo out, and the agent starts in an empty folder")
		}
		return none, agentlab.Errorf(agentlab.CodeNotFound, "no branch, tag or commit %q in %s", plain(ref), path).WithField("ref").
			WithHint("see 'git branch' and 'git tag'")
	}
	if shallow, _ := git(ctx, path, "rev-parse", "--is-shallow-repository"); shallow == "true" {
		return none, agentlab.Errorf(agentlab.CodeUnsupported, "%s is a shallow clone, which cannot be sent", path).WithField("repo").
			WithHint("run 'git fetch --unshallow' first, or give the repository's URL")
	}
	src := localSource{path: path, objects: objects, commit: commit, branch: branchName(ctx, path, ref)}
	top, err := git(ctx, path, "rev-parse", "--show-toplevel")
	if err != nil {
		top = path // a bare repository, whose submodules are nowhere
	}
	src.modules, src.unsent, err = findModules(ctx, top, commit, "", 0)
	return src, err
}

// hexName is what a guest takes for the id of a commit in the bundle.
var hexName = regexp.MustCompile(`^[0-9a-f]{7,64}$`)

// shown returns the ref of the job that gets the commit of s: what the user
// asked for, or else the branch or HEAD. A guest that finds no such ref in the
// bundle takes the bundle's HEAD, unless it looks like another commit.
func (s localSource) shown(ctx context.Context, ref string) string {
	switch {
	case ref == "" && s.branch == detachedBranch:
		return "HEAD"
	case ref == "":
		return s.branch
	case hexName.MatchString(ref) && !strings.HasPrefix(s.commit, ref):
		full, err := git(ctx, s.path, "rev-parse", "--symbolic-full-name", "--end-of-options", ref)
		if ref = lastLine(full); err != nil || !strings.HasPrefix(ref, "refs/") {
			return s.commit // ref is the id of a tag
		}
	}
	if agentlab.ValidateRevision(ref) != nil {
		return s.commit
	}
	return ref
}

// sendBundle packs a commit with its history and uploads it. It goes through
// an empty repository that borrows the objects, so that the bundle holds
// exactly one branch, commits without a branch can be sent too, and the user's
// repository is not changed.
func (a *App) sendBundle(ctx context.Context, c *client.Client, src localSource) (id string, err error) {
	fail := func(format string, args ...any) (string, error) {
		return "", agentlab.Errorf(agentlab.CodeInvalid, format, args...).WithField("repo")
	}
	a.warnUncommitted(ctx, src.path)
	a.warnUnsent(ctx, src)
	dir, err := os.MkdirTemp("", "agentlab-bundle-*")
	if err != nil {
		return fail("no temporary folder: %w", err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	m := a.newMeter()
	defer m.done()
	file, err := packBundle(ctx, dir, src, &gitProgress{m: m, what: "packing " + src.path})
	m.done()
	if err != nil {
		return fail("cannot pack %s: %w", src.path, err)
	}
	defer func() { _ = file.Close() }()
	st, err := file.Stat()
	if err != nil {
		return fail("cannot pack %s: %w", src.path, err)
	}
	with := ""
	if n := len(src.modules); n > 0 {
		with = fmt.Sprintf(" with %d submodule(s)", n)
	}
	a.progressf("sending %s of %s (%.12s)%s", byteSize(st.Size()), src.path, src.commit, with)
	m.start()
	up, err := c.UploadBundle(ctx, &meterReader{r: file, m: m, what: "sending", total: st.Size()})
	return up.ID, err
}

// dropBundle deletes an uploaded bundle whose job was not accepted, also after
// an interrupt. What is left behind all the same, the daemon deletes later.
func (a *App) dropBundle(ctx context.Context, c *client.Client, id string) {
	if id == "" {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	if err := c.DeleteBundle(ctx, id); err != nil && agentlab.CodeOf(err) != agentlab.CodeNotFound {
		a.progressf("note: the uploaded repository is not deleted yet: %v", err)
	}
}

package cli

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/lfs"
	"github.com/agentlab-vm/agentlab/internal/returncheck"
	"github.com/agentlab-vm/agentlab/internal/work"
)

// localSource is a commit of a local repository to send.
type localSource struct {
	path, objects string
	commit        string
	branch        string // the branch in the bundle that holds the commit
	modules       []submodule
	unsent        []skippedSubmodule
	lfs           localLFS // set by sendBundle
}

// commitID matches the output of git rev-parse for one commit.
var commitID = regexp.MustCompile(`^([0-9a-f]{40}|[0-9a-f]{64})$`)

// findSource looks up ref in the repository at path.
func findSource(ctx context.Context, path, ref string) (localSource, error) {
	none := localSource{}
	objects, err := git(ctx, path, "rev-parse", "--path-format=absolute", "--git-path", "objects")
	if fault := gitRefuses(path, err); fault != nil {
		return none, fault
	}
	if err != nil {
		return none, agentlab.Errorf(agentlab.CodeInvalid, "%s is not a git repository: %v", path, err).WithField("repo").
			WithHint("run 'git init' there and commit something, or remove --repo")
	}
	ref = cmp.Or(ref, "HEAD")
	commit, err := git(ctx, path, "rev-parse", "--verify", "--quiet", "--end-of-options", ref+"^{commit}")
	if err != nil || !commitID.MatchString(commit) {
		if ref == "HEAD" {
			return none, agentlab.Errorf(agentlab.CodeInvalid, "%s has no commit yet", path).WithField("repo").
				WithHint("commit something first: git add . && git commit -m First; or remove --repo to start in an empty directory")
		}
		return none, agentlab.Errorf(agentlab.CodeNotFound, "no branch, tag or commit %q in %s", agentlab.WithoutControls(ref), path).WithField("ref").
			WithHint("list them with 'git branch' and 'git tag'")
	}
	if !isCommit(commit) {
		return none, agentlab.Errorf(agentlab.CodeUnsupported, "%s uses SHA-256 object names, which cannot be sent", path).WithField("repo").
			WithHint("convert a copy of it: git fast-export --all, and git fast-import in a repository of git init --object-format=sha1")
	}
	if err := wholeHistory(ctx, path, commit); err != nil {
		return none, err
	}
	src := localSource{path: path, objects: objects, commit: commit, branch: branchName(ctx, path, ref)}
	top, err := git(ctx, path, "rev-parse", "--show-toplevel")
	if err != nil {
		top = path // a bare repository has no checked-out submodules
	}
	src.modules, src.unsent, err = findModules(ctx, top, commit, "", 0)
	return src, err
}

// gitRefuses returns the error for a repository that git does not open, with what to do;
// nil for other errors.
func gitRefuses(path string, err error) error {
	if err == nil {
		return nil
	}
	text := err.Error()
	switch {
	case strings.Contains(text, "dubious ownership"):
		return agentlab.Errorf(agentlab.CodeDenied, "git does not open %s: it has dubious ownership, because it belongs to another user", path).WithField("repo").
			WithHint("if you trust it: git config --global --add safe.directory %s", work.ShellQuote(path))
	case strings.Contains(text, "repository extension"), strings.Contains(text, "repo version"):
		return agentlab.Errorf(agentlab.CodeUnsupported, "git does not open %s: %s", path, agentlab.WithoutControls(strings.ReplaceAll(text, "\t", ""))).WithField("repo").
			WithHint("a newer git can: see 'git version', and update it")
	}
	return nil
}

// wholeHistory returns an error for a clone that lacks objects of a commit.
func wholeHistory(ctx context.Context, path, commit string) error {
	if shallow, _ := git(ctx, path, "rev-parse", "--is-shallow-repository"); shallow == "true" {
		return agentlab.Errorf(agentlab.CodeUnsupported, "%s is a shallow clone, which cannot be sent", path).WithField("repo").
			WithHint("run 'git fetch --unshallow' first, or use the URL of the repository")
	}
	if _, err := git(ctx, path, "config", "--get-regexp", `^remote\..*\.(promisor|partialclonefilter)$`); err != nil {
		return nil //nolint:nilerr // no remote has more objects
	}
	out := &missingObjects{}
	_, err := gitInput{stdout: out}.run(ctx, path, "rev-list", "--objects", "--no-object-names", "--missing=print", commit)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil || out.found {
		return agentlab.Errorf(agentlab.CodeUnsupported, "%s is a partial clone without some objects, which cannot be sent", path).WithField("repo").
			WithHint("get them: git fetch --refetch --no-filter; or use the URL of the repository")
	}
	return nil
}

// missingObjects finds objects that git lists as missing: their lines begin with "?".
type missingObjects struct{ inLine, found bool }

// Write implements io.Writer.
func (m *missingObjects) Write(p []byte) (int, error) {
	for _, c := range p {
		m.found = m.found || c == '?' && !m.inLine
		m.inLine = c != '\n'
	}
	return len(p), nil
}

// shown returns the ref of the job: the requested one, or else the branch or
// HEAD. If the bundle has no such ref, a guest uses the bundle's HEAD, unless ref
// looks like the ID of another commit.
func (s localSource) shown(ctx context.Context, ref string) string {
	switch {
	case ref == "" && s.branch == detachedBranch:
		return "HEAD"
	case ref == "":
		return s.branch
	case agentlab.IsHex(ref, 7) && !strings.HasPrefix(s.commit, ref):
		full, err := git(ctx, s.path, "rev-parse", "--symbolic-full-name", "--end-of-options", ref)
		if ref = lastLine(full); err != nil || !strings.HasPrefix(ref, "refs/") {
			return s.commit // ref is the ID of a tag
		}
	}
	if agentlab.ValidateRevision(ref) != nil {
		return s.commit
	}
	return ref
}

// sendBundle packs a commit with its history and uploads it. It uses an empty
// repository with the user's as alternate, so that the bundle has exactly one
// branch, the commit needs no branch, and the user's repository does not change.
func (a *App) sendBundle(ctx context.Context, c *client.Client, src localSource) (id string, err error) {
	fail := func(format string, args ...any) (string, error) {
		return "", agentlab.Errorf(agentlab.CodeInvalid, format, args...).WithField("repo")
	}
	a.warnUncommitted(ctx, src.path)
	if src.lfs, err = findLFS(ctx, src.path, src.commit); err != nil {
		return fail("cannot read the files of Git LFS of %s: %w", src.path, err)
	}
	a.warnUnsent(ctx, src)
	dir, remove, err := tempDir("agentlab-bundle-*")
	if err != nil {
		return fail("cannot create a temporary directory: %w", err)
	}
	defer remove()
	m := a.Meter()
	defer m.Done()
	file, err := packBundle(ctx, dir, src, &gitProgress{m: m, what: "packing " + src.path})
	m.Done()
	if err != nil {
		return "", cannotPack(src.path, err)
	}
	defer func() { _ = file.Close() }()
	st, err := file.Stat()
	if err != nil {
		return "", cannotPack(src.path, err)
	}
	with := ""
	if n := len(src.modules); n > 0 {
		with = " with " + agentlab.Plural(n, "submodule")
	}
	a.Progressf("sending %s of %s (%.12s)%s", work.ByteSize(st.Size()), src.path, src.commit, with)
	m.Start()
	up, err := c.UploadBundle(ctx, &work.MeterReader{R: file, M: m, What: "sending", Total: st.Size()})
	return up.ID, err
}

// dropBundle deletes an uploaded bundle whose job was rejected, also after an
// interrupt. The daemon later deletes bundles that remain.
func (a *App) dropBundle(ctx context.Context, c *client.Client, id string) {
	if id == "" {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	if err := c.DeleteBundle(ctx, id); err != nil && agentlab.CodeOf(err) != agentlab.CodeNotFound {
		a.Progressf("note: cannot delete the uploaded repository now: %v", err)
	}
}

// submodule is a submodule that is sent.
type submodule struct {
	path    string // from the top
	commit  string // that the superproject records
	objects string // folder
}

// skippedSubmodule is a submodule that is not sent.
type skippedSubmodule struct{ path, why, fix string }

// findModules returns the submodules of a commit that are checked out with their
// history, recursively, and the other submodules. dir is the work tree, prefix
// its path from the top.
func findModules(ctx context.Context, dir, commit, prefix string, depth int) (found []submodule, missing []skippedSubmodule, err error) {
	tree, err := gitInput{raw: true}.run(ctx, dir, "ls-tree", "-r", "-z", "--full-tree", commit)
	if err != nil {
		return nil, nil, err
	}
	for line := range strings.SplitSeq(tree, "\x00") {
		info, name, _ := strings.Cut(line, "\t")
		f := strings.Fields(info)
		if len(f) != 3 || f[0] != modeModule {
			continue
		}
		m := submodule{path: prefix + name, commit: f[2]}
		why, fix := m.locate(ctx, dir, name)
		if why == "" && depth >= guestapi.MaxModuleDepth {
			why, fix = "it is nested too deeply", ""
		}
		if why != "" {
			missing = append(missing, skippedSubmodule{m.path, why, fix})
			continue
		}
		below, more, err := findModules(ctx, filepath.Join(dir, name), m.commit, m.path+"/", depth+1)
		if err != nil {
			return nil, nil, err
		}
		found, missing = append(append(found, m), below...), append(missing, more...)
	}
	if len(found) > guestapi.MaxModules {
		return nil, nil, agentlab.Errorf(agentlab.CodeLimit, "%d submodules exceed the maximum of %d", len(found), guestapi.MaxModules).WithField("repo").
			WithHint("use the URL of the repository, or exclude submodules: git submodule deinit PATH")
	}
	return found, missing, ctx.Err()
}

// locate finds the objects of a submodule, or returns why it cannot be sent and a
// command that fixes that. The name comes from the repository and may be
// hostile: submodules outside the work tree are rejected.
func (m *submodule) locate(ctx context.Context, dir, name string) (why, fix string) {
	if returncheck.BadPath(name) != "" || strings.ContainsAny(name, "\n\r") {
		return "its path is not allowed", ""
	}
	fix = "git submodule update --init --recursive -- " + work.ShellQuote(name)
	at := dir
	for part := range strings.SplitSeq(name, "/") {
		at = filepath.Join(at, part)
		if st, err := os.Lstat(at); err != nil || !st.IsDir() {
			return "it is not checked out", fix
		}
	}
	if st, err := os.Lstat(filepath.Join(at, ".git")); err != nil || st.Mode()&fs.ModeSymlink != 0 {
		return "it is not checked out", fix
	}
	top, err := git(ctx, at, "rev-parse", "--show-toplevel")
	here, _ := filepath.EvalSymlinks(at)
	if err != nil || top != here {
		return "it is not a repository", fix
	}
	if m.objects, err = git(ctx, at, "rev-parse", "--path-format=absolute", "--git-path", "objects"); err != nil {
		return "it is not a repository", fix
	}
	if _, err := git(ctx, at, "cat-file", "-e", m.commit+"^{commit}"); err != nil {
		return fmt.Sprintf("it lacks commit %.12s", m.commit), fix
	}
	if shallow, _ := git(ctx, at, "rev-parse", "--is-shallow-repository"); shallow != "false" {
		return "it is a shallow clone", "git -C " + work.ShellQuote(name) + " fetch --unshallow"
	}
	return "", ""
}

// warnUnsent lists the submodules and LFS files that are not sent.
func (a *App) warnUnsent(ctx context.Context, src localSource) {
	for i, m := range src.unsent {
		if i == 10 {
			a.Progressf("note: %d more submodules are not sent", len(src.unsent)-i)
			break
		}
		a.Progressf("note: the submodule %s is not sent: %s", agentlab.WithoutControls(m.path), m.why)
		if m.fix != "" {
			a.Progressf("  → %s", agentlab.WithoutControls(m.fix))
		}
	}
	sent := src.lfs.inBundle()
	missing := src.lfs.names(func(p lfs.Pointer) bool { return !slices.Contains(sent, p) })
	if len(missing) == 0 {
		return
	}
	a.Progressf("note: not sending the content of %s, only the pointers", lfsNames(missing))
	server := "https://HOST/ORG/REPO.git"
	if url, err := git(ctx, src.path, "config", "--get", "remote.origin.url"); err == nil && agentlab.ValidateRepoURL(url) == nil {
		server = url
	}
	a.Progressf("  → git lfs fetch, and try again; or in the task: git -c lfs.url=%s/info/lfs lfs pull", agentlab.WithoutControls(server))
}

// Meter returns a meter on standard error.
func (a *App) Meter() *work.Meter {
	_, tty := terminal(a.Stderr)
	return work.NewMeter(a.Stderr, time.Now, tty)
}

// gitProgress shows the percentages that git writes to standard error.
type gitProgress struct {
	m    *work.Meter
	what string
	rest []byte
}

var gitPercent = regexp.MustCompile(`^(Counting|Compressing|Writing) objects: +([0-9]{1,3})% \(([0-9]+)/([0-9]+)\)`)

func (g *gitProgress) Write(p []byte) (int, error) {
	g.rest = append(g.rest, p...)
	for {
		i := bytes.IndexAny(g.rest, "\r\n")
		if i < 0 {
			return len(p), nil
		}
		if f := gitPercent.FindSubmatch(g.rest[:i]); f != nil {
			g.m.Show(func() string {
				return fmt.Sprintf("%s: %s objects, %s%% of %s", g.what, bytes.ToLower(f[1]), f[2], f[4])
			})
		}
		g.rest = g.rest[i+1:]
	}
}

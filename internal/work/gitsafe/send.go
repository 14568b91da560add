package gitsafe

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

// LocalCommit is a commit of a local repository to send.
type LocalCommit struct {
	Path, Objects string
	Commit        string
	Branch        string // the branch in the bundle that holds the commit
	Modules       []Submodule
	Unsent        []skippedSubmodule
	Lfs           LFSFiles // set by SendBundle
}

// commitID matches the output of git rev-parse for one commit.
var commitID = regexp.MustCompile(`^([0-9a-f]{40}|[0-9a-f]{64})$`)

// FindCommit looks up ref in the repository at path.
func FindCommit(ctx context.Context, path, ref string) (LocalCommit, error) {
	none := LocalCommit{}
	objects, err := Git(ctx, path, "rev-parse", "--path-format=absolute", "--git-path", "objects")
	if fault := GitRefuses(path, err); fault != nil {
		return none, fault
	}
	if err != nil {
		return none, agentlab.Errorf(agentlab.CodeInvalid, "%s is not a git repository: %v", path, err).WithField("repo").
			WithHint("run 'git init' there and commit something, or remove --repo")
	}
	ref = cmp.Or(ref, "HEAD")
	commit, err := Git(ctx, path, "rev-parse", "--verify", "--quiet", "--end-of-options", ref+"^{commit}")
	if err != nil || !commitID.MatchString(commit) {
		if ref == "HEAD" {
			return none, agentlab.Errorf(agentlab.CodeInvalid, "%s has no commit yet", path).WithField("repo").
				WithHint("commit something first: git add . && git commit -m First; or remove --repo to start in an empty directory")
		}
		return none, agentlab.Errorf(agentlab.CodeNotFound, "no branch, tag or commit %q in %s", agentlab.WithoutControls(ref), path).WithField("ref").
			WithHint("list them with 'git branch' and 'git tag'")
	}
	if !IsCommit(commit) {
		return none, agentlab.Errorf(agentlab.CodeUnsupported, "%s uses SHA-256 object names, which cannot be sent", path).WithField("repo").
			WithHint("convert a copy of it: git fast-export --all, and git fast-import in a repository of git init --object-format=sha1")
	}
	if err := wholeHistory(ctx, path, commit); err != nil {
		return none, err
	}
	src := LocalCommit{Path: path, Objects: objects, Commit: commit, Branch: branchName(ctx, path, ref)}
	top, err := Git(ctx, path, "rev-parse", "--show-toplevel")
	if err != nil {
		top = path // a bare repository has no checked-out submodules
	}
	src.Modules, src.Unsent, err = findModules(ctx, top, commit, "", 0)
	return src, err
}

// GitRefuses returns the error for a repository that git does not open, with what to do;
// nil for other errors.
func GitRefuses(path string, err error) error {
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
	if shallow, _ := Git(ctx, path, "rev-parse", "--is-shallow-repository"); shallow == "true" {
		return agentlab.Errorf(agentlab.CodeUnsupported, "%s is a shallow clone, which cannot be sent", path).WithField("repo").
			WithHint("run 'git fetch --unshallow' first, or use the URL of the repository")
	}
	if _, err := Git(ctx, path, "config", "--get-regexp", `^remote\..*\.(promisor|partialclonefilter)$`); err != nil {
		return nil //nolint:nilerr // no remote has more objects
	}
	out := &missingObjects{}
	_, err := Command{Stdout: out}.Run(ctx, path, "rev-list", "--objects", "--no-object-names", "--missing=print", commit)
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

// Shown returns the ref of the job: the requested one, or else the branch or
// HEAD. If the bundle has no such ref, a guest uses the bundle's HEAD, unless ref
// looks like the ID of another commit.
func (s LocalCommit) Shown(ctx context.Context, ref string) string {
	switch {
	case ref == "" && s.Branch == DetachedBranch:
		return "HEAD"
	case ref == "":
		return s.Branch
	case agentlab.IsHex(ref, 7) && !strings.HasPrefix(s.Commit, ref):
		full, err := Git(ctx, s.Path, "rev-parse", "--symbolic-full-name", "--end-of-options", ref)
		if ref = LastLine(full); err != nil || !strings.HasPrefix(ref, "refs/") {
			return s.Commit // ref is the ID of a tag
		}
	}
	if agentlab.ValidateRevision(ref) != nil {
		return s.Commit
	}
	return ref
}

// SendBundle packs a commit with its history and uploads it. It uses an empty
// repository with the user's as alternate, so that the bundle has exactly one
// branch, the commit needs no branch, and the user's repository does not change.
func SendBundle(ctx context.Context, ui work.UI, c *client.Client, src LocalCommit) (id string, err error) {
	fail := func(format string, args ...any) (string, error) {
		return "", agentlab.Errorf(agentlab.CodeInvalid, format, args...).WithField("repo")
	}
	warnUncommitted(ctx, ui, src.Path)
	if src.Lfs, err = FindLFS(ctx, src.Path, src.Commit); err != nil {
		return fail("cannot read the files of Git LFS of %s: %w", src.Path, err)
	}
	WarnUnsent(ctx, ui, src)
	dir, remove, err := TempDir("agentlab-bundle-*")
	if err != nil {
		return fail("cannot create a temporary directory: %w", err)
	}
	defer remove()
	m := ui.Meter()
	defer m.Done()
	file, err := PackBundle(ctx, dir, src, &GitProgress{M: m, What: "packing " + src.Path})
	m.Done()
	if err != nil {
		return "", CannotPack(src.Path, err)
	}
	defer func() { _ = file.Close() }()
	st, err := file.Stat()
	if err != nil {
		return "", CannotPack(src.Path, err)
	}
	with := ""
	if n := len(src.Modules); n > 0 {
		with = " with " + agentlab.Plural(n, "submodule")
	}
	ui.Progressf("sending %s of %s (%.12s)%s", work.ByteSize(st.Size()), src.Path, src.Commit, with)
	m.Start()
	up, err := c.UploadBundle(ctx, &work.MeterReader{R: file, M: m, What: "sending", Total: st.Size()})
	return up.ID, err
}

// DropBundle deletes an uploaded bundle whose job was rejected, also after an
// interrupt. The daemon later deletes bundles that remain.
func DropBundle(ctx context.Context, ui work.UI, c *client.Client, id string) {
	if id == "" {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	if err := c.DeleteBundle(ctx, id); err != nil && agentlab.CodeOf(err) != agentlab.CodeNotFound {
		ui.Progressf("note: cannot delete the uploaded repository now: %v", err)
	}
}

// Submodule is a submodule that is sent.
type Submodule struct {
	Path    string // from the top
	Commit  string // that the superproject records
	Objects string // folder
}

// skippedSubmodule is a submodule that is not sent.
type skippedSubmodule struct{ path, why, fix string }

// findModules returns the submodules of a commit that are checked out with their
// history, recursively, and the other submodules. dir is the work tree, prefix
// its path from the top.
func findModules(ctx context.Context, dir, commit, prefix string, depth int) (found []Submodule, missing []skippedSubmodule, err error) {
	tree, err := Command{Raw: true}.Run(ctx, dir, "ls-tree", "-r", "-z", "--full-tree", commit)
	if err != nil {
		return nil, nil, err
	}
	for line := range strings.SplitSeq(tree, "\x00") {
		info, name, _ := strings.Cut(line, "\t")
		f := strings.Fields(info)
		if len(f) != 3 || f[0] != ModeModule {
			continue
		}
		m := Submodule{Path: prefix + name, Commit: f[2]}
		why, fix := m.Locate(ctx, dir, name)
		if why == "" && depth >= guestapi.MaxModuleDepth {
			why, fix = "it is nested too deeply", ""
		}
		if why != "" {
			missing = append(missing, skippedSubmodule{m.Path, why, fix})
			continue
		}
		below, more, err := findModules(ctx, filepath.Join(dir, name), m.Commit, m.Path+"/", depth+1)
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

// Locate finds the objects of a submodule, or returns why it cannot be sent and a
// command that fixes that. The name comes from the repository and may be
// hostile: submodules outside the work tree are rejected.
func (m *Submodule) Locate(ctx context.Context, dir, name string) (why, fix string) {
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
	top, err := Git(ctx, at, "rev-parse", "--show-toplevel")
	here, _ := filepath.EvalSymlinks(at)
	if err != nil || top != here {
		return "it is not a repository", fix
	}
	if m.Objects, err = Git(ctx, at, "rev-parse", "--path-format=absolute", "--git-path", "objects"); err != nil {
		return "it is not a repository", fix
	}
	if _, err := Git(ctx, at, "cat-file", "-e", m.Commit+"^{commit}"); err != nil {
		return fmt.Sprintf("it lacks commit %.12s", m.Commit), fix
	}
	if shallow, _ := Git(ctx, at, "rev-parse", "--is-shallow-repository"); shallow != "false" {
		return "it is a shallow clone", "git -C " + work.ShellQuote(name) + " fetch --unshallow"
	}
	return "", ""
}

// WarnUnsent lists the submodules and LFS files that are not sent.
func WarnUnsent(ctx context.Context, ui work.UI, src LocalCommit) {
	for i, m := range src.Unsent {
		if i == 10 {
			ui.Progressf("note: %d more submodules are not sent", len(src.Unsent)-i)
			break
		}
		ui.Progressf("note: the submodule %s is not sent: %s", agentlab.WithoutControls(m.path), m.why)
		if m.fix != "" {
			ui.Progressf("  → %s", agentlab.WithoutControls(m.fix))
		}
	}
	sent := src.Lfs.inBundle()
	missing := src.Lfs.Names(func(p lfs.Pointer) bool { return !slices.Contains(sent, p) })
	if len(missing) == 0 {
		return
	}
	ui.Progressf("note: not sending the content of %s, only the pointers", LFSNames(missing))
	server := "https://HOST/ORG/REPO.git"
	if url, err := Git(ctx, src.Path, "config", "--get", "remote.origin.url"); err == nil && agentlab.ValidateRepoURL(url) == nil {
		server = url
	}
	ui.Progressf("  → git lfs fetch, and try again; or in the task: git -c lfs.url=%s/info/lfs lfs pull", agentlab.WithoutControls(server))
}

// GitProgress shows the percentages that git writes to standard error.
type GitProgress struct {
	M    *work.Meter
	What string
	rest []byte
}

var gitPercent = regexp.MustCompile(`^(Counting|Compressing|Writing) objects: +([0-9]{1,3})% \(([0-9]+)/([0-9]+)\)`)

// Write implements io.Writer.
func (g *GitProgress) Write(p []byte) (int, error) {
	g.rest = append(g.rest, p...)
	for {
		i := bytes.IndexAny(g.rest, "\r\n")
		if i < 0 {
			return len(p), nil
		}
		if f := gitPercent.FindSubmatch(g.rest[:i]); f != nil {
			g.M.Show(func() string {
				return fmt.Sprintf("%s: %s objects, %s%% of %s", g.What, bytes.ToLower(f[1]), f[2], f[4])
			})
		}
		g.rest = g.rest[i+1:]
	}
}

// CannotPack is the error of a repository that git cannot pack.
func CannotPack(path string, err error) error {
	return agentlab.Errorf(agentlab.CodeInvalid, "%s cannot be packed: %w", path, err).WithField("repo").WithHint("find what is damaged: git fsck")
}

package cli

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
)

// submodule is a submodule that is sent.
type submodule struct {
	path    string // from the top
	commit  string // that the superproject records
	objects string // folder
}

// unsent is a submodule that is not sent.
type unsent struct{ path, why, fix string }

// findModules finds the submodules that a commit records and that are checked
// out with their history, recursively; the others are returned too. dir is the
// work tree, prefix its path from the top.
func findModules(ctx context.Context, dir, commit, prefix string, depth int) (found []submodule, missing []unsent, err error) {
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
			missing = append(missing, unsent{m.path, why, fix})
			continue
		}
		below, more, err := findModules(ctx, filepath.Join(dir, name), m.commit, m.path+"/", depth+1)
		if err != nil {
			return nil, nil, err
		}
		found, missing = append(append(found, m), below...), append(missing, more...)
	}
	if len(found) > guestapi.MaxModules {
		return nil, nil, agentlab.Errorf(agentlab.CodeLimit, "%d submodules are more than %d", len(found), guestapi.MaxModules).WithField("repo").
			WithHint("give the repository's URL, or leave submodules out: git submodule deinit PATH")
	}
	return found, missing, ctx.Err()
}

// locate finds the objects of a submodule, or tells why they cannot be sent
// and how to mend that. The name is the repository's, so it may be hostile:
// nothing outside the work tree is taken for a submodule.
func (m *submodule) locate(ctx context.Context, dir, name string) (why, fix string) {
	if safePath(name) != nil || strings.ContainsAny(name, "\n\r") {
		return "its path is not allowed", ""
	}
	fix = "git submodule update --init --recursive -- " + shellQuote(name)
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
		return "it is a shallow clone", "git -C " + shellQuote(name) + " fetch --unshallow"
	}
	return "", ""
}

// maxPointers is how many files the note about LFS names.
const maxPointers = 5

// warnUnsent names what of the repository does not come along.
func (a *App) warnUnsent(ctx context.Context, src localSource) {
	for i, m := range src.unsent {
		if i == 10 {
			a.progressf("note: %d more submodules are not sent", len(src.unsent)-i)
			break
		}
		a.progressf("note: the submodule %s is not sent: %s", plain(m.path), m.why)
		if m.fix != "" {
			a.progressf("  → %s", plain(m.fix))
		}
	}
	files, err := lfsFiles(ctx, src.path, src.commit)
	if err != nil || len(files) == 0 {
		return
	}
	more := ""
	if n := len(files) - maxPointers; n > 0 {
		more = fmt.Sprintf(" and %d more", n)
	}
	a.progressf("note: the content of %d Git LFS file(s) is not sent, the sandbox gets their pointers: %s%s", len(files),
		plain(strings.Join(files[:min(maxPointers, len(files))], ", ")), more)
	server := "https://HOST/ORG/REPO.git"
	if url, err := git(ctx, src.path, "config", "--get", "remote.origin.url"); err == nil && agentlab.ValidateRepoURL(url) == nil {
		server = url
	}
	a.progressf("  → in the task: git -c lfs.url=%s/info/lfs lfs pull", plain(server))
}

// lfsFiles lists the files of a commit that Git LFS keeps elsewhere.
func lfsFiles(ctx context.Context, path, commit string) ([]string, error) {
	patterns, err := git(ctx, path, "grep", "-l", "-z", "--fixed-strings", "-e", "filter=lfs", commit, "--", ":(glob)**/.gitattributes")
	if err != nil || patterns == "" {
		return nil, nil //nolint:nilerr // git grep fails when it finds nothing
	}
	out, err := gitInput{raw: true}.run(ctx, path, "grep", "-l", "-z", "-e", "^version https://git-lfs.github.com/spec/v1$", commit)
	if err != nil {
		return nil, nil //nolint:nilerr // as above
	}
	var files []string
	for line := range strings.SplitSeq(strings.TrimSuffix(out, "\x00"), "\x00") {
		files = append(files, strings.TrimPrefix(line, commit+":"))
	}
	return files, nil
}

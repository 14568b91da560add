package gitsafe

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"

	"github.com/agentlab-vm/agentlab/internal/work/worktest"
)

// plant runs git with input, to make objects that a user's git would not.
func plant(t *testing.T, dir, input string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "git", args...)
	cmd.Dir = dir
	cmd.Stdin = strings.NewReader(input)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("git %v: %v\n%s", args, err, out)
	}
	return strings.TrimSpace(string(out))
}

// guestBundle packs what comes after base, up to a commit of the tree.
func guestBundle(t *testing.T, repo, tree, base string) string {
	t.Helper()
	commit := worktest.Git(t, repo, "commit-tree", "-p", base, "-m", "work", tree)
	worktest.Git(t, repo, "update-ref", "refs/heads/agentlab/j", commit)
	file := filepath.Join(t.TempDir(), "b")
	worktest.Git(t, repo, "bundle", "create", "-q", file, base+"..agentlab/j")
	return file
}

func take(t *testing.T, bundle, repo string) (string, error) {
	t.Helper()
	return takeBundle(t.Context(), t.TempDir(), bundle, repo)
}

// takeBundle checks a bundle and takes its one branch.
func takeBundle(ctx context.Context, dir, bundle, repo string) (string, error) {
	b, err := OpenBundle(ctx, dir, bundle, repo, "refs/heads/agentlab/j")
	if err != nil {
		return "", err
	}
	defer b.Close()
	return b.Header.Refs["refs/heads/agentlab/j"], b.Keep(ctx, map[string]string{"refs/agentlab/j": "refs/heads/agentlab/j"})
}

func TestTakeBundle(t *testing.T) {
	t.Parallel()
	user := worktest.Repo(t)
	base := worktest.Git(t, user, "rev-parse", "HEAD")
	guest := filepath.Join(t.TempDir(), "guest")
	worktest.Git(t, user, "clone", "-q", user, guest)
	blob := plant(t, guest, "#!/bin/sh\n", "hash-object", "-w", "--stdin")
	hooks := plant(t, guest, "100755 blob "+blob+"\tpost-checkout\n", "mktree")
	dotgit := plant(t, guest, "040000 tree "+hooks+"\thooks\n", "mktree")
	modules := plant(t, guest, "[submodule \"x\"]\n\tpath = x\n\turl = -u./evil\n", "hash-object", "-w", "--stdin")
	bad := map[string]string{
		"hook":       plant(t, guest, "040000 tree "+dotgit+"\t.git\n", "mktree"),
		"gitmodules": plant(t, guest, "100644 blob "+modules+"\t.gitmodules\n", "mktree"),
	}
	for name, tree := range bad {
		// What the user's repository says about checks does not matter.
		worktest.Git(t, user, "config", "fetch.fsckObjects", "false")
		worktest.Git(t, user, "config", "fetch.fsck.hasDotgit", "ignore")
		_, err := take(t, guestBundle(t, guest, tree, base), user)
		if err == nil || !strings.Contains(err.Error(), "objects are invalid") {
			t.Errorf("%s: got %v, want a refusal", name, err)
		}
		if _, err := Git(t.Context(), user, "cat-file", "-e", tree); err == nil {
			t.Errorf("%s: its objects are in the user's repository", name)
		}
	}
	good := guestBundle(t, guest, plant(t, guest, "100644 blob "+blob+"\tb.txt\n", "mktree"), base)
	commit, err := take(t, good, user)
	if err != nil || commit != worktest.Git(t, user, "rev-parse", "refs/agentlab/j") {
		t.Fatalf("a sound bundle: %s, %v", commit, err)
	}
	worktest.Git(t, user, "fsck", "--strict")
	if _, err := take(t, good, user); err != nil {
		t.Errorf("the same again: %v", err)
	}
	other := filepath.Join(t.TempDir(), "other")
	worktest.Git(t, user, "init", "-q", other)
	if _, err := take(t, good, other); !errors.Is(err, errLacksBase) {
		t.Errorf("without its base: got %v", err)
	}
}

func TestTakeBrokenBundle(t *testing.T) {
	user := worktest.Repo(t)
	base := worktest.Git(t, user, "rev-parse", "HEAD")
	worktest.Git(t, user, "commit", "-q", "--allow-empty", "-m", "second")
	whole, err := os.ReadFile(guestBundle(t, user, worktest.Git(t, user, "rev-parse", "HEAD^{tree}"), base))
	if err != nil {
		t.Fatal(err)
	}
	id := strings.Repeat("a", 40)
	for name, text := range map[string]string{
		"empty":        "",
		"no header":    "PACK",
		"only header":  "# v2 git bundle\n" + id + " refs/heads/agentlab/j\n\n",
		"other branch": "# v2 git bundle\n" + id + " refs/heads/main\n\n",
		"option as id": "# v2 git bundle\n--upload-pack=x refs/heads/agentlab/j\n\n",
		"cut short":    string(whole[:len(whole)-5]),
		"not whole":    strings.Replace(string(whole), worktest.Git(t, user, "rev-parse", "agentlab/j"), id, 1),
	} {
		file := filepath.Join(t.TempDir(), "b")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if commit, err := take(t, file, user); err == nil {
			t.Errorf("%s: taken as %s", name, commit)
		}
	}
	if refs := worktest.Git(t, user, "for-each-ref", "refs/agentlab"); refs != "" {
		t.Errorf("a broken bundle left %s", refs)
	}
}

// A hook's GIT_DIR names the repository of the hook, not the one we mean.
func TestGitIgnoresInheritedVariables(t *testing.T) {
	repo, hooked := worktest.Repo(t), worktest.Repo(t)
	before := worktest.Git(t, hooked, "for-each-ref")
	commit := worktest.Git(t, repo, "rev-parse", "HEAD")
	t.Setenv("GIT_DIR", filepath.Join(hooked, ".git"))
	t.Setenv("GIT_INDEX_FILE", filepath.Join(hooked, ".git", "index"))
	t.Setenv("GIT_OBJECT_DIRECTORY", filepath.Join(hooked, ".git", "objects"))
	t.Setenv("GIT_CONFIG_PARAMETERS", "'core.bare=true'")
	file, err := PackBundle(t.Context(), t.TempDir(), LocalCommit{Objects: filepath.Join(repo, ".git", "objects"), Commit: commit, Branch: "evil"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	_ = file.Close()
	if dir, err := Git(t.Context(), repo, "rev-parse", "--absolute-git-dir"); err != nil || dir != filepath.Join(repo, ".git") {
		t.Errorf("git works in %s, %v", dir, err)
	}
	for _, name := range []string{"GIT_DIR", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_CONFIG_PARAMETERS"} {
		if err := os.Unsetenv(name); err != nil {
			t.Fatal(err)
		}
	}
	if after := worktest.Git(t, hooked, "for-each-ref"); after != before {
		t.Errorf("the hook's repository changed:\n%s\nbefore:\n%s", after, before)
	}
}

// Programs of filters, transports, signing and the like are not run, whatever
// the repository's configuration allows itself.
func TestNoProgramOfTheConfigurationRuns(t *testing.T) {
	t.Parallel()
	repo := worktest.Repo(t)
	dir := t.TempDir()
	marker, script := filepath.Join(dir, "ran"), filepath.Join(dir, "evil.sh")
	if err := os.WriteFile(script, []byte("#!/bin/sh\ntouch "+marker+"\ncat\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	bundle := guestBundle(t, repo, worktest.Git(t, repo, "rev-parse", "HEAD^{tree}"), worktest.Git(t, repo, "rev-parse", "HEAD"))
	worktest.Git(t, repo, "update-ref", "-d", "refs/heads/agentlab/j")
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(repo, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("b.txt", "b\n")
	write("c.txt", "c\n")
	worktest.Git(t, repo, "add", ".")
	worktest.Git(t, repo, "commit", "-q", "-m", "more")
	blob := worktest.Git(t, repo, "rev-parse", "HEAD:c.txt")
	write(".gitattributes", "a.txt filter=x diff=x\nb.txt filter=a=b.c\nc.txt filter=p\n")
	for _, kv := range [][2]string{
		{"filter.x.clean", script}, {"filter.x.required", "true"}, {"filter.a=b.c.clean", script}, {"filter.p.process", script},
		{"diff.x.textconv", script}, {"diff.x.command", script}, {"diff.external", script},
		{"core.sshCommand", script}, {"core.gitProxy", script}, {"core.editor", script}, {"core.askPass", script}, {"core.pager", script},
		{"credential.helper", script}, {"gpg.program", script}, {"gpg.ssh.program", script}, {"commit.gpgSign", "true"}, {"log.showSignature", "true"},
		{"protocol.allow", "always"}, {"protocol.file.allow", "always"}, {"protocol.ext.allow", "always"},
		{"url.ext::" + script + " .insteadOf", "/"}, {"uploadpack.packObjectsHook", script},
		{"remote.origin.url", dir}, {"remote.origin.uploadpack", script}, {"remote.origin.promisor", "true"},
		{"remote.ext.url", "ext::" + script}, {"remote.ext.promisor", "true"},
		{"core.repositoryFormatVersion", "1"}, {"extensions.partialClone", "origin"},
	} {
		worktest.Git(t, repo, "config", kv[0], kv[1])
	}
	included := filepath.Join(dir, "included")
	if err := os.WriteFile(included, []byte("[filter \"p\"]\nclean = "+script+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	worktest.Git(t, repo, "config", "include.path", included)
	write("a.txt", "two\n") // changed in place, so that status has to read them
	write("b.txt", "x\n")
	write("c.txt", "y\n")
	if err := os.Remove(filepath.Join(repo, ".git", "objects", blob[:2], blob[2:])); err != nil {
		t.Fatal(err)
	}
	_ = os.Remove(marker)
	var notes bytes.Buffer
	a := worktest.UI{Out: &notes}
	warnUncommitted(t.Context(), a, repo)
	if !strings.Contains(notes.String(), "4 uncommitted change") {
		t.Errorf("the note is %q", notes.String())
	}
	if _, err := FindCommit(t.Context(), repo, ""); agentlab.CodeOf(err) != agentlab.CodeUnsupported {
		t.Errorf("a repository that lacks an object: %v", err)
	}
	if _, err := Git(t.Context(), repo, "cat-file", "-p", blob); err == nil {
		t.Error("the missing object was fetched")
	}
	for _, url := range []string{"ext::" + script, dir, "origin", "ext"} {
		if _, err := Git(t.Context(), repo, "fetch", url); err == nil {
			t.Errorf("a fetch from %s was allowed", url)
		}
	}
	if _, err := take(t, bundle, repo); err != nil {
		t.Errorf("a sound bundle: %v", err)
	}
	if _, err := os.Stat(marker); err == nil {
		t.Error("a program that the configuration names was run")
	}
}

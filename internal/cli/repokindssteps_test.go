package cli_test

import (
	"cmp"
	"encoding/json"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/test/fakebackend"
	"github.com/agentlab-vm/agentlab/test/fakelfs"
	"github.com/agentlab-vm/agentlab/test/sample"
)

// kindLab is a daemon on the fake backend, whose guests have git.
type kindLab struct {
	*testing.T
	env    []string
	guests string
}

func newKindLab(t *testing.T) *kindLab {
	home, guests := t.TempDir(), t.TempDir()
	if err := os.MkdirAll(filepath.Join(home, "config"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(home, "config", "config.yaml"), []byte("backend: fake\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	k := &kindLab{T: t, guests: guests, env: append(append(os.Environ(), fakelfs.Environ(t)...), "AGENTLAB_HOME="+home, "HOME="+home, fakebackend.GuestGit+"="+guests,
		"GIT_CONFIG_GLOBAL=/dev/null", "GIT_AUTHOR_NAME=T", "GIT_AUTHOR_EMAIL=t@localhost", "GIT_COMMITTER_NAME=T", "GIT_COMMITTER_EMAIL=t@localhost")}
	t.Cleanup(func() { stopDaemon(t, home) })
	k.ok(home, "agentlab", "daemon", "start")
	return k
}

// run runs a program, and returns its output and whether it succeeded.
func (k *kindLab) run(dir string, args ...string) (stdout, stderr string, ok bool) {
	var out, errOut strings.Builder
	cmd := exec.CommandContext(k.Context(), args[0], args[1:]...)
	cmd.Dir, cmd.Env, cmd.Stdout, cmd.Stderr = dir, k.env, &out, &errOut
	err := cmd.Run()
	return strings.TrimSpace(out.String()), errOut.String(), err == nil
}

func (k *kindLab) ok(dir string, args ...string) string {
	k.Helper()
	stdout, stderr, ok := k.run(dir, args...)
	if !ok {
		k.Fatalf("%q failed: %s%s", args, stdout, stderr)
	}
	return stdout
}

// with returns the lab for a subtest.
func (k *kindLab) with(t *testing.T) *kindLab {
	return &kindLab{T: t, env: k.env, guests: k.guests}
}

// made is everything that a start makes: rows of the daemon, guests, and what is in a
// directory of the user.
func (k *kindLab) made(dir string) string {
	k.Helper()
	var all []string
	for _, what := range []string{"session", "sandbox", "workspace", "job"} {
		var list struct {
			Items []struct {
				ID, Name string
				VMID     int
			}
		}
		if err := json.Unmarshal([]byte(k.ok(dir, "agentlab", "--json", what, "list")), &list); err != nil {
			k.Fatal(err)
		}
		for _, item := range list.Items {
			all = append(all, what+" "+item.ID+item.Name)
		}
	}
	err := filepath.Walk(dir, func(path string, st os.FileInfo, err error) error {
		if err == nil && st.Mode().IsRegular() && st.Name() != "index" {
			text, _ := os.ReadFile(path)
			path += " " + string(text)
		}
		all = append(all, path)
		return err
	})
	if err != nil {
		k.Error(err)
	}
	return strings.Join(all, "\n")
}

// Each kind of repository works with each command, or is refused before anything is made.
func TestKindsOfRepositories(t *testing.T) {
	t.Parallel()
	if os.Getuid() != 0 {
		k := repoKinds["another owner"]
		k.begin = ""
		repoKinds["another owner"] = k
	}
	all := newKindLab(t)
	names := slices.Sorted(maps.Keys(repoKinds))
	if sample.Short(t, "it runs all commands with dozens of repositories") {
		names = sample.Of(t, 12, names)
	}
	for _, name := range names {
		t.Run(name, func(t *testing.T) {
			kind, k := repoKinds[name], all.with(t)
			if kind.begin == "" {
				t.Skip("only root can give files to another user")
			}
			dir := t.TempDir()
			k.ok(dir, "sh", "-euc", kind.begin)
			repo := filepath.Join(dir, "app")
			if kind.in != "" {
				repo = filepath.Join(dir, kind.in)
			}
			if kind.start != "" {
				k.refused(dir, repo, kind.start, "start", "--detach", "--agent", "none", "--no-env")
			} else {
				k.session(repo, kind)
			}
			job := []string{"job", "run", "--repo", repo, "--agent", "shell", "--task", "echo done"}
			if kind.job != "" {
				k.refused(dir, dir, kind.job, job...)
			} else {
				k.ok(dir, append([]string{"agentlab"}, job...)...)
			}
		})
	}
}

// refused checks that a command fails and leaves nothing behind.
func (k *kindLab) refused(dir, in, want string, args ...string) {
	k.Helper()
	before := k.made(dir)
	_, stderr, ok := k.run(in, append([]string{"agentlab"}, args...)...)
	if ok || !regexp.MustCompile(want).MatchString(stderr) || !strings.Contains(stderr, "→") {
		k.Errorf("%q: ok %v, want %q: %s", args, ok, want, stderr)
	}
	had := strings.Split(before, "\n")
	for line := range strings.SplitSeq(k.made(dir), "\n") {
		if !slices.Contains(had, line) {
			k.Errorf("%q left behind: %s", args, line)
		}
	}
}

// session does what a user does with a session.
func (k *kindLab) session(repo string, kind repoKind) {
	k.Helper()
	for _, old := range k.guestRepos() { // of a test that has failed
		if err := os.RemoveAll(filepath.Dir(old)); err != nil {
			k.Fatal(err)
		}
	}
	start := []string{"agentlab", "start", "--detach", "--agent", "none", "--no-env"}
	k.ok(repo, start...)
	guest := k.newGuest()
	if a, b := k.ok(repo, "git", "rev-parse", "HEAD"), k.ok(guest, "git", "rev-parse", "HEAD"); a != b {
		k.Errorf("the guest is at %s, not %s", b, a)
	}
	if got := k.ok(guest, "git", "status", "--porcelain"); got != "" {
		k.Errorf("the guest has changes: %s", got)
	}
	if kind.guest != "" {
		k.ok(guest, "sh", "-euc", kind.guest)
	}

	k.ok(guest, "sh", "-euc", `echo agent >from-agent; git add from-agent; git commit -qm agent; echo draft >draft`)
	k.ok(repo, "agentlab", "apply")
	top := k.ok(repo, "git", "rev-parse", "--show-toplevel")
	if text, err := os.ReadFile(filepath.Join(top, "draft")); strings.TrimSpace(string(text)) != "draft" {
		k.Errorf("the uncommitted change is %q, %v", text, err)
	}
	k.ok(top, "rm", "draft")
	sync := []string{"agentlab", "sync"}
	if kind.into != "" {
		sync = append(sync, "--into", kind.into)
	}
	want := k.ok(guest, "git", "rev-parse", "HEAD")
	_, stderr, ok := k.run(repo, sync...)
	if kind.noMerge != "" {
		if ok || !strings.Contains(stderr, kind.noMerge) {
			k.Errorf("sync: %v, %s", ok, stderr)
		}
	} else if at := k.ok(repo, "git", "rev-parse", cmp.Or(kind.into, "HEAD")); !ok || at != want {
		k.Errorf("after sync the branch is at %s, not %s: %s", at, want, stderr)
	}
	if err := os.WriteFile(filepath.Join(top, "local"), []byte("local\n"), 0o600); err != nil {
		k.Fatal(err)
	}
	k.ok(guest, "rm", "draft")
	if kind.noMerge == "" {
		k.ok(repo, append(start, "--with-changes")...)
		if text, err := os.ReadFile(filepath.Join(guest, "local")); strings.TrimSpace(string(text)) != "local" {
			k.Errorf("the carried change is %q, %v", text, err)
		}
	}
	k.ok(repo, "agentlab", "rm", "--yes", "--force")
	if config := k.ok(repo, "git", "config", "--list", "--local"); strings.Contains(config, "agentlab") {
		k.Errorf("after rm the configuration is %s", config)
	}
}

// newGuest returns the repository in the only guest.
func (k *kindLab) newGuest() string {
	k.Helper()
	found := k.guestRepos()
	if len(found) != 1 {
		k.Fatalf("guests: %q", found)
	}
	return found[0]
}

func (k *kindLab) guestRepos() []string {
	k.Helper()
	found, err := filepath.Glob(filepath.Join(k.guests, "*", "repo"))
	if err != nil {
		k.Fatal(err)
	}
	return found
}

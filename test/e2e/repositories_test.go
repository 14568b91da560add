package e2e

import (
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// lfsObject stores an object of Git LFS in a repository, as git lfs does, and returns its
// pointer.
func lfsObject(t *testing.T, repo, content string) string {
	t.Helper()
	oid := fmt.Sprintf("%x", sha256.Sum256([]byte(content)))
	dir := filepath.Join(repo, ".git/lfs/objects", oid[:2], oid[2:4])
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, oid), []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize %d\n", oid, len(content))
}

// The git-lfs of the image sees the objects that the host sends as files, and the host
// gets those that the agent commits. Submodules come along, a shallow clone is refused
// before a VM exists, and a job gets the same.
func TestRepositoriesAsTheyAre(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.workProfile("work", "base")
	const session = "lfs-app"
	lib, repo := sampleRepo(t), filepath.Join(t.TempDir(), session)
	if err := os.Rename(sampleRepo(t), repo); err != nil {
		t.Fatal(err)
	}
	git(t, repo, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", lib, "libs/greet")
	gone := "version https://git-lfs.github.com/spec/v1\noid sha256:" + strings.Repeat("ab", 32) + "\nsize 4\n"
	for name, text := range map[string]string{".gitattributes": "*.bin filter=lfs diff=lfs merge=lfs -text\n", "a.bin": lfsObject(t, repo, "content of a"), "gone.bin": gone} {
		if err := os.WriteFile(filepath.Join(repo, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	git(t, repo, "add", "-A")
	git(t, repo, "commit", "-q", "-m", "LFS and a submodule")

	shallow := filepath.Join(t.TempDir(), "shallow")
	git(t, repo, "clone", "-q", "--depth", "1", "file://"+lib, shallow)
	if r := l.run(shallow, "start", "--profile", "work", "--agent", "none", "--detach"); r.code == 0 || !strings.Contains(r.stderr, "is a shallow clone") {
		t.Errorf("a shallow clone: %v", r)
	}
	if got := l.ok("--json", "session", "list"); strings.Contains(got, "shallow") {
		t.Errorf("the refused start has left %s", got)
	}

	r := l.run(repo, "start", "--profile", "work", "--agent", "none", "--detach")
	if r.code != 0 || !strings.Contains(r.stderr, "only the pointers of 1 Git LFS file (gone.bin)") {
		t.Fatalf("%v", r)
	}
	if got := l.guest(session, `cat a.bin; echo; head -c 7 gone.bin; echo; cat libs/greet/greeting.txt; git status --porcelain
git lfs ls-files --long | wc -l
git config user.name A; git config user.email a@localhost
printf 'content of b' >b.bin; git add b.bin; git commit -qm b; git status --porcelain
printf 'changed' >a.bin; touch gone.bin; git status --porcelain`); got != "content of a\nversion\nhelo\n2\n M a.bin" {
		t.Errorf("in the VM: %q", got)
	}
	if r := l.run(repo, "apply"); r.code != 0 || !strings.HasPrefix(git(t, repo, "diff", "--", "a.bin"), "diff --git a/a.bin") {
		t.Errorf("apply: %v", r)
	}
	git(t, repo, "checkout", "-q", "a.bin")
	git(t, repo, "config", "filter.lfs.smudge", "git-lfs smudge -- %f") // it is not run
	if r := l.run(repo, "sync"); r.code != 0 {
		t.Fatalf("sync: %v", r)
	}
	if text, err := os.ReadFile(filepath.Join(repo, "b.bin")); string(text) != "content of b" {
		t.Errorf("the file that the agent committed is %q, %v", text, err)
	}
	l.in(repo, "rm", "--yes", "--force")
	lfsJob(t, l, repo)
}

// lfsJob checks a job with files of Git LFS.
func lfsJob(t *testing.T, l *lab, repo string) {
	t.Helper()
	git(t, repo, "checkout", "-q", "-f", "HEAD~1")
	j, r := l.job("--repo", repo, "--agent", "shell", "--task", `cat a.bin; echo; git status --porcelain
printf 'content of c' >c.bin; git add c.bin; git -c user.name=A -c user.email=a@localhost commit -qm c`)
	if r.code != 0 || j.Result.Commits != 1 || j.Result.Uncommitted != 0 {
		t.Fatalf("%+v\n%v", j, r)
	}
	if log := l.ok("job", "logs", j.ID); !strings.HasPrefix(log, "content of a\n") || strings.Contains(log, ".bin") {
		t.Errorf("log is %q", log)
	}
	l.in(repo, "job", "fetch", j.ID)
	oid := fmt.Sprintf("%x", sha256.Sum256([]byte("content of c")))
	if text, err := os.ReadFile(filepath.Join(repo, ".git/lfs/objects", oid[:2], oid[2:4], oid)); string(text) != "content of c" {
		t.Errorf("the object of the job is %q, %v", text, err)
	}
}

package runner

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/lfs"
	"github.com/agentlab-vm/agentlab/test/fakelfs"
)

// lfsBundle packs a repository with two files of Git LFS, and the object of one, which has
// a content.
func lfsBundle(t *testing.T, content string) string {
	t.Helper()
	p, text := fakelfs.Pointer(content)
	_, goneText := fakelfs.Pointer("gone")
	repo := newRepo(t, map[string]string{".gitattributes": "*.bin filter=lfs diff=lfs merge=lfs -text\n", "a.bin": text, "gone.bin": goneText})
	object := filepath.Join(t.TempDir(), "object")
	if err := os.WriteFile(object, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	ref := guestapi.RefLFS + p.OID
	runGit(t, repo, "update-ref", ref, runGit(t, repo, "hash-object", "-w", "--no-filters", object))
	bundle := filepath.Join(t.TempDir(), "bundle")
	runGit(t, repo, "bundle", "create", "-q", bundle, "HEAD", "main", ref)
	return bundle
}

// A job gets the objects of Git LFS that its bundle has, as files if git-lfs is there. Its
// new ones are an artifact.
func TestLFSObjectsOfJob(t *testing.T) {
	s := bundledSandbox(t, lfsBundle(t, "one"), "cat a.bin")
	if rep := s.finish(); rep.Status != "COMPLETED" || !strings.HasPrefix(s.Log(), "version https://git-lfs.github.com/spec/v1") {
		t.Fatalf("without git-lfs: %+v %q", rep, s.Log())
	}
	fakelfs.Install(t)
	s = bundledSandbox(t, lfsBundle(t, "one"), `cat a.bin; echo; head -c 7 gone.bin; echo; git status --short
printf two >new.bin; git add new.bin; git commit -qm new; git status --short; git ls-files -s .git/lfs`)
	if rep := s.finish(); rep.Status != "COMPLETED" || !strings.HasPrefix(s.Log(), "one\nversion\n") || strings.Contains(s.Log(), ".bin") {
		t.Fatalf("%+v %q", rep, s.Log())
	}
	two, _ := fakelfs.Pointer("two")
	if got := s.File(agentlab.ArtifactLFS); got != two.OID+" 3\ntwo" {
		t.Errorf("the objects are %q", got)
	}
	if d := s.File(artDiff); !strings.Contains(d, "+oid sha256:"+two.OID) || strings.Contains(d, "a.bin") {
		t.Errorf("the diff is %q", d)
	}
}

// A job on the workspace of an earlier one gets other objects in place of the files, and
// keeps the objects and changes of the earlier one.
func TestLFSOnAWorkspace(t *testing.T) {
	fakelfs.Install(t)
	w := newWorkspace(t)
	job := func(content, script string) string {
		t.Helper()
		f, err := os.Open(lfsBundle(t, content))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = f.Close() }()
		job := shellJob(script)
		job.Bundled = true
		s := w.sandbox(job, nil)
		s.GiveBundle(f)
		if rep := s.finish(); rep.Status != "COMPLETED" {
			t.Fatalf("%+v, log %q", rep, s.Log())
		}
		return s.Log()
	}
	job("one", `printf mine >mine.bin; git add mine.bin; git commit -qm mine; touch a.bin`)
	log := job("two", `cat a.bin; git status --short; git branch --list '*changes*'`)
	if !strings.Contains("\n"+log, "\ntwo") || strings.Contains(log, ".bin") || strings.Contains(log, "changes") {
		t.Errorf("log %q", log)
	}
	for _, content := range []string{"one", "two", "mine"} {
		if p, _ := fakelfs.Pointer(content); !lfsStore(w.repo).Has(p) {
			t.Errorf("the object %q is lost", content)
		}
	}
	w.clean()
}

// An object whose content is not that of its name ends the job.
func TestWrongLFSObject(t *testing.T) {
	repo := newRepo(t, nil)
	ref := guestapi.RefLFS + strings.Repeat("ab", 32)
	runGit(t, repo, "update-ref", ref, runGit(t, repo, "rev-parse", "main:file.txt"))
	bundle := filepath.Join(t.TempDir(), "bundle")
	runGit(t, repo, "bundle", "create", "-q", bundle, "HEAD", "main", ref)
	if rep := bundledSandbox(t, bundle, "true").finish(); rep.Status != "FAILED" || !strings.Contains(rep.Message, "Git LFS") {
		t.Errorf("%+v", rep)
	}
}

// An update of a checkout keeps the objects of Git LFS that an earlier job has made, and
// follows no link.
func TestKeepLFS(t *testing.T) {
	old, clone, outside := t.TempDir(), t.TempDir(), t.TempDir()
	p, _ := fakelfs.Pointer("kept")
	q, _ := fakelfs.Pointer("outside")
	if err := lfsStore(old).Put(p, strings.NewReader("kept")); err != nil {
		t.Fatal(err)
	}
	if err := (lfs.Store{Dir: outside}).Put(q, strings.NewReader("outside")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(filepath.Join(outside, q.OID[:2]), filepath.Join(old, ".git/lfs/objects", q.OID[:2])); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := keepLFS(old, clone); err != nil || !lfsStore(clone).Has(p) || lfsStore(clone).Has(q) {
			t.Errorf("%v", err)
		}
	}
	if err := keepLFS(outside, clone); err == nil {
		t.Error("a directory that is no checkout was accepted")
	}
}

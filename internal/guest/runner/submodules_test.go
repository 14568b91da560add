package runner

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/artifact"
)

// moduleBundle packs main of a repository with the given further commits, as
// the command line does for submodules. The repository must have their objects.
func moduleBundle(t *testing.T, repo string, commits ...string) string {
	t.Helper()
	args := []string{"bundle", "create", "-q", filepath.Join(t.TempDir(), "bundle"), "HEAD", "main"}
	for _, c := range commits {
		runGit(t, repo, "update-ref", guestapi.RefModules+c, c)
		args = append(args, guestapi.RefModules+c)
	}
	runGit(t, repo, args...)
	return args[3]
}

// bundledSandbox has a job with that bundle.
func bundledSandbox(t *testing.T, bundle, script string) *sandbox {
	t.Helper()
	job := shellJob(script)
	job.Bundled = true
	s := newSandbox(t, guestapi.BootstrapResponse{Job: job}, artifact.Limits{})
	f, err := os.Open(bundle)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	s.GiveBundle(f)
	return s
}

// withModules makes a repository with a submodule in lib/a, which has one in
// deep/b. All objects are in the first repository, as in a bundle.
func withModules(t *testing.T) (repo string, a, b string) {
	t.Helper()
	inner, outer, repo := newRepo(t, nil), newRepo(t, nil), newRepo(t, map[string]string{".gitmodules": "[submodule \"evil\"]\n\tpath = lib/a\n\turl = ext::sh -c 'touch /tmp/pwned-by-submodule'\n"})
	b = runGit(t, inner, "rev-parse", "main")
	runGit(t, outer, "update-index", "--add", "--cacheinfo", "160000,"+b+",deep/b")
	runGit(t, outer, "commit", "-q", "-m", "with b")
	a = runGit(t, outer, "rev-parse", "main")
	runGit(t, repo, "update-index", "--add", "--cacheinfo", "160000,"+a+",lib/a", "--cacheinfo", "160000,"+strings.Repeat("5", 40)+",absent")
	runGit(t, repo, "commit", "-q", "-m", "with a")
	for _, from := range []string{inner, outer} {
		runGit(t, repo, "fetch", "-q", "--no-recurse-submodules", from, "main")
	}
	return repo, a, b
}

func TestSubmodulesAreCheckedOut(t *testing.T) {
	repo, a, b := withModules(t)
	s := bundledSandbox(t, moduleBundle(t, repo, a, b), `cat lib/a/file.txt lib/a/deep/b/file.txt; ls -A absent; git status --short
git -C lib/a status --short; git -C lib/a rev-parse HEAD; git -C lib/a/deep/b rev-parse HEAD
echo changed >> lib/a/file.txt; echo new > lib/a/deep/b/new.txt; git -C lib/a/deep/b add new.txt; git -C lib/a/deep/b commit -qm new`)
	rep := s.finish()
	if rep.Status != "COMPLETED" {
		t.Fatalf("%+v %q", rep, s.Log())
	}
	if log := s.Log(); !strings.HasPrefix(log, "three\nthree\n"+a+"\n"+b+"\n") {
		t.Errorf("the log is %q", log)
	}
	if d := s.File("submodules/lib/a.diff"); !strings.Contains(d, "+changed") {
		t.Errorf("the diff of lib/a is %q", d)
	}
	if d := s.File("submodules/lib/a/deep/b.diff"); !strings.Contains(d, "new.txt") {
		t.Errorf("the diff of lib/a/deep/b is %q", d)
	}
	if !strings.Contains(rep.Message, "submodules/lib/a.diff") {
		t.Errorf("the report does not say where the changes are: %q", rep.Message)
	}
	if _, err := os.Stat("/tmp/pwned-by-submodule"); err == nil {
		t.Error("a program that .gitmodules names was run")
	}
}

// What a repository says of its submodules leads nowhere but into it.
func TestHostileSubmodules(t *testing.T) {
	repo, a, _ := withModules(t)
	// A submodule in itself ends at the allowed depth.
	runGit(t, repo, "update-index", "--add", "--cacheinfo", "160000,"+a+",one", "--cacheinfo", "160000,"+a+",two")
	runGit(t, repo, "commit", "-q", "-m", "again")
	s := bundledSandbox(t, moduleBundle(t, repo, a), "cat one/file.txt two/file.txt lib/a/file.txt; ls -A lib/a/deep/b")
	if rep := s.finish(); rep.Status != "COMPLETED" || s.Log() != "three\nthree\nthree\n" {
		t.Errorf("%+v %q", rep, s.Log())
	}
}

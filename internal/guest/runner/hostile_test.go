package runner

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/artifact"
)

// armScript makes a repository in which everything that git can be made to run is
// armed.
const armScript = `
echo work > work.txt; git add -A; git commit -qm work
trap=$PWD/../trap; mkdir -p $trap .git/hooks
cat > $trap/run <<'EOT'
#!/bin/sh
echo "$0 $*" >> "$(dirname "$0")/sprung"
cat
EOT
chmod +x $trap/run
mkdir sub; (cd sub; git init -q; echo x > x; git add x; git commit -qm x; git config core.fsmonitor $trap/run)
for h in pre-commit post-checkout post-index-change reference-transaction pre-push post-rewrite fsmonitor-watchman; do cp $trap/run .git/hooks/$h; done
set() { git -c core.fsmonitor=false config "$@"; }
set filter.evil.clean $trap/run; set filter.evil.smudge $trap/run; set filter.evil.process $trap/run; set filter.evil.required true
set diff.evil.command $trap/run; set diff.evil.textconv $trap/run; set diff.external $trap/run
set core.hooksPath $PWD/.git/hooks; set core.sshCommand $trap/run; set core.pager $trap/run
set core.editor $trap/run; set credential.helper $trap/run; set core.gitProxy $trap/run; set core.alternateRefsCommand $trap/run
set alias.diff "!$trap/run"; set include.path $trap/more; set uploadpack.packObjectsHook $trap/run
set url."ext::$trap/run ".insteadOf http://; set remote.origin.pushurl "ext::$trap/run"; set core.worktree /; set core.fsmonitor $trap/run
echo '* filter=evil diff=evil' > .gitattributes
echo more > more.txt
cp $trap/run $trap/armed; rm -f $trap/sprung
`

// The agent leaves an armed repository. Our git runs none of it, and still gets the
// result.
func TestArmedRepository(t *testing.T) {
	const token = "ghp_0123456789abcdef"
	repo := newRepo(t, nil)
	git := newGitServer(t, token)
	job := shellJob(armScript)
	job.RepoURL, job.Keepalive = git.add(t, "repo", repo), true
	s := newSandbox(t, guestapi.BootstrapResponse{Job: job, Git: &guestapi.Git{Token: token}}, artifact.Limits{})
	rep := s.finish()
	if rep.Status != "COMPLETED" || rep.Result.Commits != 1 || !rep.Result.Dirty || !rep.Result.Pushed {
		t.Errorf("%+v %+v log %q", rep, rep.Result, s.Log())
	}
	if p, err := os.ReadFile(filepath.Join(filepath.Dir(s.cfg.ClonePath), "trap/sprung")); err == nil {
		t.Errorf("the agent's programs were run: %s", p)
	}
	if d := s.File(artDiff); !strings.Contains(d, "work.txt") || !strings.Contains(d, "more.txt") {
		t.Errorf("diff %q", d)
	}
	s.fetchable(repo, rep)
	// The trap works: the agent's own git falls into it.
	_ = exec.Command("git", "-C", s.cfg.ClonePath, "--work-tree=.", "status").Run()
	if _, err := os.Stat(filepath.Join(filepath.Dir(s.cfg.ClonePath), "trap/sprung")); err != nil {
		t.Error("nothing was armed")
	}
}

// A repository that is hostile before the agent sees it.
func TestHostileClone(t *testing.T) {
	repo := newRepo(t, map[string]string{
		".gitattributes": "* filter=evil diff=evil\n", ".gitmodules": "[submodule \"x\"]\n\tpath = x\n\turl = ext::sh -c 'touch ../pwned'\n\tupdate = !touch ../pwned\n",
	})
	s := gitSandbox(t, newGitServer(t, "").add(t, "repo", repo), "", 0, "true")
	if rep := s.finish(); rep.Status != "COMPLETED" {
		t.Errorf("%+v", rep)
	}
	if _, err := os.Stat(filepath.Join(filepath.Dir(s.cfg.ClonePath), "pwned")); err == nil {
		t.Error("a program of the repository ran")
	}
}

// What is left of .git may be anything. The job still ends, with a warning.
func TestBrokenRepository(t *testing.T) {
	url := newGitServer(t, "").add(t, "repo", newRepo(t, nil))
	for name, script := range map[string]string{
		"no .git":          `rm -rf .git`,
		".git is a file":   `mv .git ../real; echo "gitdir: ../real" > .git`,
		".git is a link":   `mv .git ../real; ln -s ../real .git`,
		"HEAD is a pipe":   `rm .git/HEAD; mkfifo .git/HEAD`,
		"HEAD is a link":   `rm .git/HEAD; ln -s /etc/passwd .git/HEAD`,
		"HEAD is garbage":  `head -c 5000 /dev/urandom > .git/HEAD`,
		"no objects":       `rm -rf .git/objects`,
		"missing objects":  commitWork + `; find .git/objects -type f -delete`,
		"bad commit":       `echo 1111111111111111111111111111111111111111 > .git/$(sed 's/ref: //' .git/HEAD)`,
		"index is garbage": `head -c 5000 /dev/urandom > .git/index`,
		"index is a pipe":  `rm .git/index; mkfifo .git/index`,
		"endless refs":     `mkdir -p .git/refs/heads/x; for i in $(seq 100); do echo $i > .git/refs/heads/x/$i; done; ln -s . .git/refs/heads/loop`,
		"alternates loop":  `echo "$PWD/.git/objects" > .git/objects/info/alternates`,
		"unreadable file":  `echo x > secret; chmod 0 secret`,
		"pipe in tree":     `mkfifo pipe; ln -s /dev/zero zero`,
	} {
		t.Run(name, func(t *testing.T) {
			s := gitSandbox(t, url, "", 0, script)
			if rep := s.finish(); rep.Status != "COMPLETED" {
				t.Errorf("%+v log %q", rep, s.Log())
			}
			if !slices.Contains(s.Paths(), "report.json") {
				t.Errorf("artifacts %q", s.Paths())
			}
		})
	}
}

func TestOutputs(t *testing.T) {
	repo := newRepo(t, map[string]string{projectFile: "outputs:\n  - dist/**/*.js\n  - '*.xml'\n  - .coverage\n  - dir\n  - escape*/**\n  - \"**/secret*\"\n"})
	url := newGitServer(t, "").add(t, "repo", repo)
	s := gitSandbox(t, url, "", 0, `
mkdir -p dist/a/b dir ../outside; echo 1 > dist/top.js; echo 2 > dist/a/b/deep.js; echo 3 > dist/a/b/not.css; echo "$API_KEY" > r.xml; echo 5 > .coverage
echo no > dir/file; echo secret > ../outside/secret.txt
ln -s ../outside escape; ln -s ../outside/secret.txt secret-link; ln -s /etc/passwd l.xml; mkfifo p.xml; ln -s top.js dist/in.js; cp .git/config .git/secret-config
printf x > 'dist/bad:name.js'`)
	rep := s.finish()
	if rep.Status != "COMPLETED" {
		t.Errorf("%+v log %q", rep, s.Log())
	}
	var got []string
	for _, p := range s.Paths() {
		if strings.HasPrefix(p, "outputs/") {
			got = append(got, p)
		}
	}
	want := []string{"outputs/dist/a/b/deep.js", "outputs/dist/top.js", "outputs/dot.coverage", "outputs/r.xml"}
	if len(got) == 5 && got[1] == "outputs/dist/in.js" { // a link inside is the file that it names
		want = slices.Insert(want, 1, "outputs/dist/in.js")
	}
	if !slices.Equal(got, want) {
		t.Errorf("outputs %q, want %q; message %q", got, want, rep.Message)
	}
	if s.File("outputs/dist/a/b/deep.js") != "2\n" || s.File("outputs/r.xml") != secret+"\n" {
		t.Error("wrong content")
	}
	if !strings.Contains(s.File("report.json"), `"source": ".coverage"`) || !strings.Contains(rep.Message, "bad:name") {
		t.Errorf("report.json %s, message %q", s.File("report.json"), rep.Message)
	}
}

// No two outputs share a path among the artifacts.
func TestOutputPathsDiffer(t *testing.T) {
	for name, want := range map[string]string{
		".cov": "outputs/dot.cov", "dot.cov": "outputs/dotdot.cov", "dotdot.cov": "outputs/dotdotdot.cov", "dotty": "outputs/dotty",
		"a/.b/c": "outputs/a/dot.b/c", "a/dot.b/c": "outputs/a/dotdot.b/c", "dot": "outputs/dot", "a.dot.b": "outputs/a.dot.b",
	} {
		if got := outputPath(name); got != want {
			t.Errorf("%q becomes %q, want %q", name, got, want)
		}
	}
	rapid.Check(t, func(rt *rapid.T) {
		name := rapid.StringMatching(`((dot){0,2}[.a]{1,2}/?){1,3}`)
		a, b := name.Draw(rt, "a"), name.Draw(rt, "b")
		if a != b && outputPath(a) == outputPath(b) {
			rt.Fatalf("%q and %q both become %q", a, b, outputPath(a))
		}
	})
}

// A mistake in the project file ends the job before the agent starts.
func TestProjectFileIsStrict(t *testing.T) {
	for name, c := range map[string]struct{ text, want string }{
		"unknown key": {"output:\n  - x\n", "outputs"},
		"not YAML":    {"{", projectFile},
		"absolute":    {"outputs: [/etc/passwd]\n", `outputs: line 1: "/etc/passwd"`},
		"outside":     {"outputs: [a/../../b]\n", `outputs: line 1: "a/../../b"`},
		"bad pattern": {"outputs: ['a[']\n", `outputs: line 1: "a["`},
		"too large":   {"outputs: [" + strings.Repeat("a,", 40000) + "]", "too large"},
		"bomb":        {"a: &a [x,x]\noutputs: *a\n", projectFile},
	} {
		t.Run(name, func(t *testing.T) {
			url := newGitServer(t, "").add(t, "repo", newRepo(t, map[string]string{projectFile: c.text}))
			s := gitSandbox(t, url, "", 0, "touch ../ran")
			if rep := s.finish(); rep.Status != "FAILED" || !strings.Contains(rep.Message, c.want) || rep.ExitCode != nil {
				t.Errorf("%+v", rep)
			}
			if _, err := os.Stat(filepath.Join(filepath.Dir(s.cfg.ClonePath), "ran")); err == nil {
				t.Error("the agent ran")
			}
		})
	}
	t.Run("broken later", func(t *testing.T) {
		url := newGitServer(t, "").add(t, "repo", newRepo(t, nil))
		s := gitSandbox(t, url, "", 0, "echo 'x: 1' > "+projectFile)
		if rep := s.finish(); rep.Status != "COMPLETED" || !strings.Contains(rep.Message, "outputs are not collected") {
			t.Errorf("%+v", rep)
		}
	})
}

func FuzzProjectFile(f *testing.F) {
	f.Add("outputs:\n  - dist/**\n")
	f.Add("outputs: [a, 'b[', ../c]\nx: {y: 1}\n")
	dir := f.TempDir()
	root, err := os.OpenRoot(dir)
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if err := os.WriteFile(filepath.Join(dir, projectFile), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		p, err := readProject(root)
		if err != nil {
			return
		}
		names, _ := findOutputs(context.Background(), root, p.Outputs)
		for _, n := range names {
			if !filepath.IsLocal(n) || agentlab.ValidateArtifactPath(outputPath(n)) == nil && n != projectFile {
				t.Errorf("%q is found", n)
			}
		}
	})
}

// FuzzGitDir reads branches from files that an agent wrote.
func FuzzGitDir(f *testing.F) {
	f.Add("ref: refs/heads/main\n", "# pack-refs with: peeled\n1111111111111111111111111111111111111111 refs/heads/a\n", "2222222222222222222222222222222222222222\n", "[core]\n[remote \"origin\"]\nurl=x\n")
	dir := f.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, ".git/refs/heads"), 0o700); err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, head, packed, main, config string) {
		for name, content := range map[string]string{"HEAD": head, "packed-refs": packed, "refs/heads/main": main, "config": config} {
			if err := os.WriteFile(filepath.Join(dir, ".git", name), []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		g, err := openGitDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		defer g.close()
		if branch, commit, err := g.head(); err == nil && (branch != "" && !validBranch(branch) || commit != "" && !isCommit(commit)) {
			t.Errorf("HEAD is %q %q", branch, commit)
		}
		heads, err := g.heads()
		for name, commit := range heads {
			if err == nil && (!validBranch(name) || !isCommit(commit)) {
				t.Errorf("branch %q %q", name, commit)
			}
		}
		_ = g.dropRemote()
	})
}

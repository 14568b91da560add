package session

import (
	"archive/tar"
	"bytes"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/returncheck"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/source"
	"github.com/agentlab-vm/agentlab/internal/work/transfer"
	"github.com/agentlab-vm/agentlab/internal/work/worktest"
)

// trick is what a guest leaves behind to run something on the host, in a directory of its
// own. A content that begins with "-> " is a link, with "+x" a program, "module" a commit.
type trick struct {
	name  string
	level returncheck.Level
	at    string            // the path that must be refused, held or named
	files map[string]string // of the guest
	host  map[string]string // that the host has already
}

const aCommit = "1111111111111111111111111111111111111111"

var bareHost = map[string]string{"r/HEAD": "ref: refs/heads/main\n", "r/objects/x": "x", "r/refs/x": "x", "r/config": "[core]\n"}

var tricks = []trick{
	{"bare repository", returncheck.Refused, "HEAD", map[string]string{"HEAD": "ref: refs/heads/main\n", "objects/x": "x", "refs/x": "x", "config": "[core]\n\tfsmonitor = touch /tmp/x\n"}, nil},
	{"its HEAD is a link", returncheck.Refused, "HEAD", map[string]string{"HEAD": "-> refs/heads/main", "objects/x": "x", "refs/x": "x", "config": "[core]\n"}, nil},
	{"in small letters", returncheck.Refused, "head", map[string]string{"head": "x", "Objects/x": "x", "REFS/x": "x"}, nil},
	{"with commondir", returncheck.Refused, "commondir", map[string]string{"HEAD": "x", "commondir": "../../x"}, nil},
	{"deep in a directory", returncheck.Refused, "a/b/c/HEAD", map[string]string{"a/b/c/HEAD": "x", "a/b/c/objects/x": "x", "a/b/c/refs/x": "x"}, nil},
	{"second half of a repository", returncheck.Refused, "refs/x", map[string]string{"refs/x": "x"}, map[string]string{"HEAD": "x", "objects/x": "x"}},
	{"configuration of the host's bare repository", returncheck.Refused, "r/config", map[string]string{"r/config": "[core]\n\tfsmonitor = touch /tmp/x\n"}, bareHost},
	{"hook of the host's bare repository", returncheck.Refused, "r/hooks/post-update", map[string]string{"r/hooks/post-update": "+x"}, bareHost},
	{".git", returncheck.Refused, ".git/config", map[string]string{".git/config": "x"}, nil},
	{".git in capitals", returncheck.Refused, ".GIT/config", map[string]string{".GIT/config": "x"}, nil},
	{".git with an invisible character", returncheck.Refused, ".g\u200cit/config", map[string]string{".g\u200cit/config": "x"}, nil},
	{".git as a short name", returncheck.Refused, "GIT~1/config", map[string]string{"GIT~1/config": "x"}, nil},
	{".git with a blank", returncheck.Refused, ".git /config", map[string]string{".git /config": "x"}, nil},
	{".git with a stream", returncheck.Refused, ".git::$INDEX_ALLOCATION/config", map[string]string{".git::$INDEX_ALLOCATION/config": "x"}, nil},
	{".git as a file", returncheck.Refused, ".git", map[string]string{".git": "gitdir: ../x\n"}, nil},
	{".git as a link", returncheck.Refused, ".git", map[string]string{".git": "-> x"}, nil},
	{".git with a backslash", returncheck.Refused, `.git\config`, map[string]string{`.git\config`: "x"}, nil},
	{"absolute link", returncheck.Refused, "l", map[string]string{"l": "-> /etc/passwd"}, nil},
	{"link out of the tree", returncheck.Refused, "l", map[string]string{"l": "-> ../../../../../../../../x"}, nil},
	{"link with .. after a name", returncheck.Refused, "l", map[string]string{"l": "-> a/../../b"}, nil},
	{"link to .git", returncheck.Refused, "l", map[string]string{"l": "-> ../.git/config"}, nil},
	{"name that differs in case", returncheck.Named, "ReadMe", map[string]string{"ReadMe": "x"}, map[string]string{"readme": "x"}},
	{"name in another form of Unicode", returncheck.Named, "e\u0301", map[string]string{"e\u0301": "x"}, map[string]string{"\u00e9": "x"}},
	{"direnv", returncheck.Held, ".envrc", map[string]string{".envrc": "x"}, nil},
	{"dotenv", returncheck.Held, ".env", map[string]string{".env": "x"}, nil},
	{"mise", returncheck.Held, "mise.toml", map[string]string{"mise.toml": "x"}, nil},
	{"VS Code", returncheck.Held, ".vscode/tasks.json", map[string]string{".vscode/tasks.json": "{}"}, map[string]string{".vscode/tasks.json": "x"}},
	{"VS Code in other case", returncheck.Held, ".VSCode/tasks.json", map[string]string{".VSCode/tasks.json": "x"}, nil},
	{"VS Code through a link", returncheck.Held, ".vscode", map[string]string{".vscode": "-> other", "other/tasks.json": "x"}, nil},
	{"JetBrains", returncheck.Held, ".idea/workspace.xml", map[string]string{".idea/workspace.xml": "x"}, nil},
	{"Zed", returncheck.Held, ".zed/tasks.json", map[string]string{".zed/tasks.json": "x"}, nil},
	{"vim", returncheck.Held, ".exrc", map[string]string{".exrc": "x"}, nil},
	{"Claude Code", returncheck.Held, ".claude/settings.json", map[string]string{".claude/settings.json": "x"}, nil},
	{"MCP", returncheck.Held, ".mcp.json", map[string]string{".mcp.json": "x"}, nil},
	{"Codex", returncheck.Held, ".codex/config.toml", map[string]string{".codex/config.toml": "x"}, nil},
	{"OpenCode", returncheck.Held, "opencode.json", map[string]string{"opencode.json": "x"}, nil},
	{"Gemini CLI", returncheck.Held, ".gemini/settings.json", map[string]string{".gemini/settings.json": "x"}, nil},
	{"Cursor", returncheck.Held, ".cursor/hooks.json", map[string]string{".cursor/hooks.json": "x"}, nil},
	{"dev container", returncheck.Held, ".devcontainer/devcontainer.json", map[string]string{".devcontainer/devcontainer.json": "x"}, nil},
	{"GitHub", returncheck.Held, ".github/workflows/ci.yml", map[string]string{".github/workflows/ci.yml": "x"}, nil},
	{"GitLab", returncheck.Held, ".gitlab-ci.yml", map[string]string{".gitlab-ci.yml": "x"}, nil},
	{"npm", returncheck.Held, ".npmrc", map[string]string{".npmrc": "x"}, nil},
	{"Yarn", returncheck.Held, ".yarnrc.yml", map[string]string{".yarnrc.yml": "x"}, nil},
	{"Cargo", returncheck.Held, ".cargo/config.toml", map[string]string{".cargo/config.toml": "x"}, nil},
	{"Gradle", returncheck.Held, "gradle/wrapper/gradle-wrapper.jar", map[string]string{"gradle/wrapper/gradle-wrapper.jar": "x"}, nil},
	{"attributes of git", returncheck.Held, ".gitattributes", map[string]string{".gitattributes": "* filter=x\n"}, nil},
	{"submodules", returncheck.Held, ".gitmodules", map[string]string{".gitmodules": "[submodule \"a\"]\n\tpath = a\n\turl = https://example.invalid/a\n"}, nil},
	{"directory of hooks", returncheck.Held, ".githooks/pre-commit", map[string]string{".githooks/pre-commit": "+x"}, nil},
	{"hook", returncheck.Held, "hooks/pre-push", map[string]string{"hooks/pre-push": "+x"}, nil},
	{"husky", returncheck.Held, ".husky/pre-commit", map[string]string{".husky/pre-commit": "x"}, nil},
	{"pre-commit", returncheck.Held, ".pre-commit-config.yaml", map[string]string{".pre-commit-config.yaml": "x"}, nil},
	{"AgentLab", returncheck.Held, ".agentlab.yaml", map[string]string{".agentlab.yaml": "x"}, nil},
	{"scripts of npm", returncheck.Named, "package.json", map[string]string{"package.json": "{}"}, nil},
	{"make", returncheck.Named, "Makefile", map[string]string{"Makefile": "x"}, nil},
	{"program", returncheck.Named, "tool", map[string]string{"tool": "+x"}, map[string]string{"tool": "x"}},
	{"instructions", returncheck.Named, "CLAUDE.md", map[string]string{"CLAUDE.md": "x"}, nil},
	{"submodule", returncheck.Named, "lib", map[string]string{"lib": "module"}, nil},
}

// dir is the directory of a trick.
func (tr trick) dir() string {
	return fmt.Sprintf("t%02d", slices.IndexFunc(tricks, func(o trick) bool { return o.name == tr.name }))
}

func (tr trick) path() string { return tr.dir() + "/" + tr.at }

// filesOf returns the guest's files of tricks, by path.
func filesOf(list []trick) map[string]string {
	files := map[string]string{}
	for _, tr := range list {
		for name, text := range tr.host {
			files[tr.dir()+"/"+name] = text
		}
		for name, text := range tr.files {
			files[tr.dir()+"/"+name] = text
		}
	}
	return files
}

func gitIn(t *testing.T, dir, in string, args ...string) string {
	t.Helper()
	cmd := exec.Command("git", append([]string{"-C", dir}, args...)...)
	cmd.Stdin = strings.NewReader(in)
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("git %q: %v", args, err)
	}
	return strings.TrimSpace(string(out))
}

// makeTree stores files as a tree, with names that git add refuses. more are further lines
// of git ls-tree -z.
func makeTree(t *testing.T, repo string, files map[string]string, more ...string) string {
	t.Helper()
	below := map[string]map[string]string{}
	var lines strings.Builder
	lines.WriteString(strings.Join(more, ""))
	for name, text := range files {
		if dir, rest, deep := strings.Cut(name, "/"); deep {
			if below[dir] == nil {
				below[dir] = map[string]string{}
			}
			below[dir][rest] = text
			continue
		}
		mode := gitsafe.ModeFile
		if target, is := strings.CutPrefix(text, "-> "); is {
			mode, text = gitsafe.ModeLink, target
		} else if text == "+x" {
			mode = gitsafe.ModeProgram
		}
		if text == "module" {
			fmt.Fprintf(&lines, "%s commit %s\t%s\x00", gitsafe.ModeModule, aCommit, name)
			continue
		}
		fmt.Fprintf(&lines, "%s blob %s\t%s\x00", mode, gitIn(t, repo, text, "hash-object", "-w", "--stdin"), name)
	}
	for dir, in := range below {
		fmt.Fprintf(&lines, "040000 tree %s\t%s\x00", makeTree(t, repo, in), dir)
	}
	return gitIn(t, repo, lines.String(), "mktree", "-z", "--missing")
}

// newTrickWorld is a session whose user has the host's files of all tricks.
func newTrickWorld(t *testing.T) *sessionWorld {
	w := newSessionWorld(t)
	host := map[string]string{}
	for _, tr := range tricks {
		for name, text := range tr.host {
			host[tr.dir()+"/"+name] = text
		}
	}
	host["keep"] = "1"
	worktest.Put(t, w.user, host)
	worktest.Git(t, w.user, "add", "-A")
	worktest.Git(t, w.user, "commit", "-q", "-m", "host")
	worktest.Git(t, w.guest, "pull", "-q")
	return w
}

// leave commits tricks in the guest, on top of the user's commits.
func (w *sessionWorld) leave(list []trick) (commit string) {
	w.Helper()
	files := filesOf(list)
	var kept []string
	for line := range strings.SplitAfterSeq(gitIn(w.T, w.guest, "", "ls-tree", "-z", "origin/trunk"), "\x00") {
		_, name, _ := strings.Cut(strings.TrimSuffix(line, "\x00"), "\t")
		if name != "" && !slices.ContainsFunc(list, func(tr trick) bool { return tr.dir() == name }) {
			kept = append(kept, line)
		}
	}
	commit = gitIn(w.T, w.guest, "", "commit-tree", makeTree(w.T, w.guest, files, kept...), "-p", "origin/trunk", "-m", "tricks")
	worktest.Git(w.T, w.guest, "update-ref", "refs/heads/trunk", commit)
	return commit
}

func tricksOf(level returncheck.Level) []trick {
	return slices.DeleteFunc(slices.Clone(tricks), func(tr trick) bool { return tr.level != level })
}

// checkFound checks that each trick is found at its path and level.
func checkFound(t *testing.T, way string, list []trick, found []returncheck.Finding) {
	t.Helper()
	have := map[string]returncheck.Level{}
	for _, f := range found {
		have[f.Path] = f.Level
	}
	for _, tr := range list {
		if level, is := have[tr.path()]; !is || level != tr.level {
			t.Errorf("%s, %s: %s is found: %v, at level %d", way, tr.name, tr.path(), is, level)
		}
	}
}

// Every trick is refused, held or named on every path on which commits come back.
func TestTricksInCommits(t *testing.T) {
	t.Parallel()
	if len(tricks) < 45 {
		t.Fatalf("only %d tricks", len(tricks))
	}
	w := newTrickWorld(t)
	var rest []trick // what git's own check of objects lets through
	for _, tr := range tricks {
		w.leave([]trick{tr})
		bundle := filepath.Join(t.TempDir(), "b")
		if err := os.WriteFile(bundle, w.bundle("trunk", "^origin/trunk"), 0o600); err != nil {
			t.Fatal(err)
		}
		b, err := gitsafe.OpenBundle(t.Context(), t.TempDir(), bundle, w.user, "refs/heads/trunk")
		if err == nil {
			b.Close()
			rest = append(rest, tr)
		} else if tr.level != returncheck.Refused {
			t.Errorf("%s: %v", tr.name, err)
		}
	}
	for _, ff := range []bool{true, false} {
		if !ff {
			worktest.Git(t, w.user, "commit", "-q", "--allow-empty", "-m", "of the user")
		}
		w.leave(rest)
		s := w.fetched()
		j, err := gitsafe.JudgeCommit(t.Context(), w.user, w.user, true, "HEAD", s.Link.Ref("trunk"))
		if err != nil {
			t.Fatal(err)
		}
		checkFound(t, fmt.Sprintf("merge, fast-forward %v", ff), rest, j.Found)
		// What 'job fetch' and 'sync --fetch-only' name.
		found, err := gitsafe.JudgeFetched(t.Context(), w.user, worktest.Git(t, w.user, "rev-parse", s.Link.Ref("trunk")))
		if err != nil {
			t.Fatal(err)
		}
		checkFound(t, "fetch", rest, found)
		h := &remoteHelper{ui: w.app, repo: Repo{Path: filepath.Join(w.user, ".git")}}
		if err := h.judge(t.Context(), worktest.Git(t, w.user, "rev-parse", s.Link.Ref("trunk"))); agentlab.CodeOf(err) != agentlab.CodeDenied {
			t.Errorf("git fetch: %v", err)
		}
	}
}

// Sync merges nothing that is refused, nor what must be confirmed, unless the
// configuration allows it.
func TestSyncOfTricks(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		level  returncheck.Level
		policy string
		merged bool
	}{
		"refused": {returncheck.Refused, "allow", false}, "held": {returncheck.Held, "", false}, "hold": {returncheck.Held, "hold", false},
		"allowed": {returncheck.Held, "allow", true}, "named": {returncheck.Named, "hold", true},
	} {
		t.Run(name, func(t *testing.T) {
			w := newTrickWorld(t)
			if tc.policy != "" {
				worktest.Git(t, w.user, "config", "agentlab.return", tc.policy)
			}
			var list []trick
			for _, tr := range tricksOf(tc.level) {
				if bad := returncheck.BadPath(tr.path()); bad == "" { // git's check refuses the others
					list = append(list, tr)
				}
			}
			commit := w.leave(list)
			s, err := w.open(w.honest)
			if err != nil {
				t.Fatal(err)
			}
			before := worktest.Git(t, w.user, "rev-parse", "HEAD")
			auto := &autoSync{}
			auto.once(t.Context(), w.app, s)
			auto.report(w.app)
			if is := worktest.Git(t, w.user, "rev-parse", "HEAD") == commit; is != tc.merged || (auto.held == nil) != tc.merged || auto.err != nil {
				t.Errorf("automatically: merged %v, held %v, %v", is, auto.held, auto.err)
			}
			for _, into := range []string{"", "review"} {
				worktest.Git(t, w.user, "reset", "-q", "--hard", before)
				_, found, err := mergeSession(t.Context(), w.app, s, into, "trunk")
				if (err == nil) != tc.merged || err != nil && agentlab.CodeOf(err) != agentlab.CodeDenied {
					t.Errorf("into %q: %v", into, err)
				}
				if tc.merged {
					checkFound(t, "sync", list, found)
				}
			}
			if !tc.merged && (worktest.Git(t, w.user, "status", "--porcelain") != "" || worktest.Git(t, w.user, "rev-parse", "HEAD") != before) {
				t.Error("the work tree has changed")
			}
			if tc.level == returncheck.Named && !strings.Contains(w.notes.String(), "read before you run") {
				t.Errorf("nothing is named: %s", w.notes.String())
			}
		})
	}
}

// Apply leaves out links out of the tree, refuses other refused files, and asks.
func TestApplyOfTricks(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		level  returncheck.Level
		policy string
		code   agentlab.Code
	}{
		"refused": {returncheck.Refused, "allow", agentlab.CodeDenied}, "held": {returncheck.Held, "", agentlab.CodeDenied},
		"allowed": {returncheck.Held, "allow", ""}, "named": {returncheck.Named, "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			w := newTrickWorld(t)
			if tc.policy != "" {
				worktest.Git(t, w.user, "config", "agentlab.return", tc.policy)
			}
			var list []trick
			for _, tr := range tricksOf(tc.level) {
				if returncheck.BadPath(tr.path()) == "" {
					list = append(list, tr)
				}
			}
			commit := w.leave(list)
			worktest.Git(t, w.guest, "update-ref", guestapi.RefChanges, commit)
			bundle := filepath.Join(t.TempDir(), "b")
			if err := os.WriteFile(bundle, w.bundle(guestapi.RefChanges, "^origin/trunk"), 0o600); err != nil {
				t.Fatal(err)
			}
			dir := t.TempDir()
			b, err := gitsafe.OpenBundle(t.Context(), dir, bundle, w.user, guestapi.RefChanges)
			if err != nil {
				t.Fatal(err)
			}
			defer b.Close()
			_, err = source.Apply(t.Context(), w.app, b, source.Source{Kind: "session", ID: "s", Diff: "agentlab diff"}, dir, source.Options{Force: true})
			if agentlab.CodeOf(err) != tc.code {
				t.Fatal(err)
			}
			for _, tr := range list {
				_, err := os.Lstat(filepath.Join(w.user, tr.path()))
				isNew := tr.host[tr.at] == ""
				if there := err == nil; isNew && there != (tc.code == "" && tr.files[tr.at] != "module") {
					t.Errorf("%s: it is there: %v", tr.name, there)
				}
			}
		})
	}
}

// trickArchive is what cp and exports get of a guest.
func trickArchive(t *testing.T, list []trick) []byte {
	var entries []tar.Header
	files := filesOf(list)
	for _, name := range slices.Sorted(maps.Keys(files)) {
		h := tar.Header{Name: "./" + name, Mode: 0o644}
		switch target, isLink := strings.CutPrefix(files[name], "-> "); {
		case isLink:
			h.Typeflag, h.Linkname = tar.TypeSymlink, target
		case files[name] == "+x":
			h.Mode = 0o755
		case files[name] == "module":
			continue
		}
		entries = append(entries, h)
	}
	return worktest.ArchiveOf(t, append([]tar.Header{worktest.DirEntry("./")}, entries...)...)
}

// cp leaves out what is refused, asks about what must be confirmed, and names the rest; an
// export names everything.
func TestCopyOfTricks(t *testing.T) {
	t.Parallel()
	for _, policy := range []string{"", "allow"} {
		w := newTrickWorld(t)
		if policy != "" {
			worktest.Git(t, w.user, "config", "agentlab.return", policy)
		}
		stageAt := t.TempDir()
		stage, err := os.OpenRoot(stageAt)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = stage.Close() }()
		var got transfer.Copied
		if _, err := transfer.Unpack(stage, bytes.NewReader(trickArchive(t, tricks)), 1<<20, &got, nil); err != nil {
			t.Fatal(err)
		}
		found, err := transfer.AdmitCopy(t.Context(), w.app, stage, w.user, ".", &got)
		if policy == "" && agentlab.CodeOf(err) != agentlab.CodeDenied || policy != "" && err != nil {
			t.Fatalf("policy %q: %v", policy, err)
		}
		for _, tr := range tricks {
			if _, err := stage.Lstat("top/" + tr.path()); err == nil && tr.level == returncheck.Refused {
				t.Errorf("%s is copied", tr.name)
			}
		}
		others := slices.DeleteFunc(slices.Clone(tricks), func(tr trick) bool {
			return tr.level == returncheck.Refused || tr.name == "submodule"
		})
		checkFound(t, "cp", others, found)
	}
	see := &gitsafe.ArchiveNames{}
	if _, err := transfer.CopyArchive(&bytes.Buffer{}, bytes.NewReader(trickArchive(t, tricks)), 1<<20, see.See); err != nil {
		t.Fatal(err)
	}
	found := see.Findings()
	for _, tr := range tricks {
		named := slices.ContainsFunc(found, func(f returncheck.Finding) bool {
			return returncheck.Fold(f.Path) == returncheck.Fold(tr.path()) || strings.HasPrefix(tr.path(), f.Path+"/")
		})
		if !named && tr.name != "submodule" && tr.name != "program" { // the archive has the host's version of it
			t.Errorf("an export does not name %s", tr.name)
		}
	}
}

// Artifacts never are files that are refused or must be confirmed; a download is judged
// by the place where it is written.
func TestArtifactsOfTricks(t *testing.T) {
	t.Parallel()
	w := newTrickWorld(t)
	root, err := os.OpenRoot(w.user)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = root.Close() }()
	var names []string
	for _, tr := range tricks {
		for name := range tr.files {
			names = append(names, tr.dir()+"/"+name)
		}
	}
	wanted, err := transfer.WantedArtifacts(t.Context(), root, w.user, names, &transfer.Copied{})
	if err != nil {
		t.Fatal(err)
	}
	for _, tr := range tricks {
		isLink := strings.HasPrefix(tr.files[tr.at], "-> ") // those are left out because they are links
		if slices.Contains(wanted, tr.path()) && tr.level != returncheck.Named && !isLink {
			t.Errorf("%s is an artifact", tr.name)
		}
		if tr.level != returncheck.Held || tr.host != nil {
			continue
		}
		name := filepath.Join(w.user, filepath.FromSlash(tr.path()))
		if err := os.MkdirAll(path.Dir(name), 0o750); err != nil {
			t.Fatal(err)
		}
		if _, err := transfer.AdmitFile(t.Context(), w.app, name, false); agentlab.CodeOf(err) != agentlab.CodeDenied {
			t.Errorf("the download of %s: %v", tr.name, err)
		}
	}
}

// A tree of few objects with too many paths, or with too many bytes of files, is refused
// before git writes anything.
func TestSyncOfBombs(t *testing.T) {
	t.Parallel()
	w := newSessionWorld(t)
	blob := gitIn(t, w.guest, strings.Repeat("\x00", 32<<20), "hash-object", "-w", "--stdin")
	tree := func(kind, id string, n int) string {
		var lines strings.Builder
		for i := range n {
			fmt.Fprintf(&lines, "%s %s\t%03d\x00", kind, id, i)
		}
		return gitIn(t, w.guest, lines.String(), "mktree", "-z")
	}
	paths := tree("100644 blob", gitIn(t, w.guest, "x", "hash-object", "-w", "--stdin"), 10)
	for range 9 {
		paths = tree("040000 tree", paths, 10)
	}
	before := worktest.Git(t, w.user, "rev-parse", "HEAD")
	for name, bomb := range map[string]string{"paths": paths, "bytes": tree("100644 blob", blob, 40)} {
		for _, ff := range []bool{true, false} {
			worktest.Git(t, w.user, "reset", "-q", "--hard", before)
			if !ff {
				worktest.Git(t, w.user, "commit", "-q", "--allow-empty", "-m", "of the user")
			}
			commit := gitIn(t, w.guest, "", "commit-tree", bomb, "-p", "origin/trunk", "-m", "bomb")
			worktest.Git(t, w.guest, "update-ref", "refs/heads/trunk", commit)
			s := w.fetched()
			if _, _, err := mergeSession(t.Context(), w.app, s, "", ""); agentlab.CodeOf(err) != agentlab.CodeLimit {
				t.Errorf("%s, fast-forward %v: %v", name, ff, err)
			}
			if _, err := os.Stat(filepath.Join(w.user, ".git/index.lock")); err == nil || worktest.Git(t, w.user, "status", "--porcelain") != "" {
				t.Errorf("%s: the repository has changed", name)
			}
		}
	}
}

// A file that a merge moves or changes under a name that matters is found, although the
// guest changed another one: git follows renames.
func TestReturnCheckSeesTheMergedTree(t *testing.T) {
	t.Parallel()
	w := newSessionWorld(t)
	worktest.Put(t, w.user, map[string]string{"env.txt": worktest.TenLines, "conf/a": "a\n", "conf/b": "b\n", "conf/c": "c\n"})
	worktest.Git(t, w.user, "add", "-A")
	worktest.Git(t, w.user, "commit", "-q", "-m", "files")
	worktest.Git(t, w.guest, "pull", "-q")
	w.commit(map[string]string{"env.txt": worktest.TenLines + "touch /tmp/x\n"})
	worktest.Git(t, w.user, "mv", "env.txt", ".envrc")
	worktest.Git(t, w.user, "commit", "-q", "-m", "rename")
	s := w.fetched()
	if _, _, err := mergeSession(t.Context(), w.app, s, "", ""); agentlab.CodeOf(err) != agentlab.CodeDenied || !strings.Contains(err.Error(), ".envrc") {
		t.Errorf("%v", err)
	}
	worktest.Git(t, w.user, "config", "core.hooksPath", "tools")
	w.commit(map[string]string{"env.txt": worktest.TenLines, "tools/anything": "x"})
	s = w.fetched()
	if _, _, err := mergeSession(t.Context(), w.app, s, "", ""); agentlab.CodeOf(err) != agentlab.CodeDenied || !strings.Contains(err.Error(), "tools/anything (git runs it as a hook") {
		t.Errorf("the directory of hooks: %v", err)
	}
}

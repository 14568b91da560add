package returncheck

import (
	"path"
	"strconv"
	"strings"
	"testing"
)

// host is a place with files.
func host(files ...string) Host {
	names := map[string][]string{}
	for _, f := range files {
		for at := f; at != "."; at = path.Dir(at) {
			names[path.Dir(at)] = append(names[path.Dir(at)], path.Base(at))
		}
	}
	return Host{Names: func(dir string) []string { return names[dir] }}
}

func TestCheck(t *testing.T) {
	folding := host("src/main.go", "Kelvin")
	folding.FoldsNames = true
	hooks := host("build/hook.sh")
	hooks.Obeyed = map[string]string{"build": "git runs it as a hook of this repository"}
	linked := host(".claude", "agents/settings.json")
	linked.Links = map[string]string{".claude": "agents", "CLAUDE.md": "doc/notes.md"}
	deep := host("home/u/src/app/main.go", "home/u/src/app/.git/config")
	deep.Top = "home/u/src/app"
	bare := host("lib.git/HEAD", "lib.git/objects/x", "lib.git/refs/y", "lib.git/config")
	inBare := host("proj/HEAD", "proj/objects/x", "proj/refs/x", "proj/main/.git")
	inBare.Top = "proj/main"
	for _, tc := range []struct {
		name  string
		entry Entry
		more  []string // other files that arrive
		host  Host
		want  string // level and the beginning of the reason; "" for no finding
	}{
		{"an ordinary file", Entry{Path: "src/a.go", Kind: File}, nil, host(), ""},
		{"git's directory", Entry{Path: "a/.git/config", Kind: File}, nil, host(), "refused belongs to git"},
		{"in capitals", Entry{Path: ".GIT", Kind: File}, nil, host(), "refused belongs to git"},
		{"with ignored characters", Entry{Path: ".g\u200cit/hooks/x", Kind: File}, nil, host(), "refused belongs to git"},
		{"short name", Entry{Path: "GIT~1/config", Kind: File}, nil, host(), "refused belongs to git"},
		{"with a stream", Entry{Path: ".git::$INDEX_ALLOCATION/config", Kind: File}, nil, host(), "refused belongs to git"},
		{"backslashes", Entry{Path: `.git\config`, Kind: File}, nil, host(), "refused belongs to git"},
		{"backslashes up", Entry{Path: `a\..\..\b`, Kind: File}, nil, host(), "refused is not a clean"},
		{"out of the tree", Entry{Path: "../x", Kind: File}, nil, host(), "refused is not a clean"},
		{"absolute link", Entry{Path: "x", Kind: Link, Target: "/etc"}, nil, host(), "refused is a link to the absolute"},
		{"link out of the tree", Entry{Path: "a/x", Kind: Link, Target: "../../y"}, nil, host(), "refused is a link out"},
		{"link with .. after a name", Entry{Path: "x", Kind: Link, Target: "a/../b"}, nil, host(), "refused is a link with .."},
		{"link to git's directory", Entry{Path: "x", Kind: Link, Target: ".git/config"}, nil, host(), "refused is a link to git"},
		{"link in the tree", Entry{Path: "a/x", Kind: Link, Target: "../b"}, nil, host(), ""},
		{"link to the tree", Entry{Path: "a/x", Kind: Link, Target: ".."}, nil, host(), ""},
		{"repository", Entry{Path: "d/HEAD", Kind: File}, []string{"d/objects/x", "d/refs/x"}, host(), "refused its directory is"},
		{"repository with a link", Entry{Path: "d/HEAD", Kind: Link, Target: "refs/heads/main"}, []string{"d/objects/x", "d/refs/x"}, host(), "refused its directory is"},
		{"repository in two steps", Entry{Path: "d/HEAD", Kind: File}, nil, host("d/objects/x", "d/refs/x"), "refused its directory is"},
		{"repository in two steps, the other half", Entry{Path: "d/refs/heads/x", Kind: File}, nil, host("d/HEAD", "d/objects/x"), "refused its directory is"},
		{"repository with commondir", Entry{Path: "d/commondir", Kind: File}, nil, host("d/head"), "refused its directory is"},
		{"repository at the top", Entry{Path: "HEAD", Kind: File}, nil, host("objects/x", "refs/x"), "refused its directory is"},
		{"configuration of one that exists", Entry{Path: "lib.git/config", Kind: File, Was: File}, nil, bare, "refused its directory is"},
		{"hook of one that exists", Entry{Path: "lib.git/hooks/post-update", Kind: Program}, nil, bare, "refused its directory is"},
		{"repository that an empty directory completes", Entry{Path: "d/refs", Kind: Dir}, nil, host("d/HEAD", "d/objects/x"), "refused its directory is"},
		{"empty directory of an editor", Entry{Path: ".vscode", Kind: Dir}, nil, host(), ""},
		{"not quite one", Entry{Path: "d/HEAD", Kind: File}, []string{"d/refs/x"}, host(), ""},
		{"same name where case does not count", Entry{Path: "SRC/x", Kind: File}, nil, folding, "refused has the name of src"},
		{"same name as another that arrives", Entry{Path: "b", Kind: File}, []string{"B"}, folding, "refused has the name of B"},
		{"same name in another form of Unicode", Entry{Path: "\u212aelvin", Kind: File}, nil, folding, "refused has the name of Kelvin"},
		{"same name where case counts", Entry{Path: "SRC/x", Kind: File}, nil, host("src/y"), "named has the name of src"},
		{"the same name", Entry{Path: "src/x", Kind: File}, nil, folding, ""},
		{"direnv", Entry{Path: "a/.envrc", Kind: File}, nil, host(), "held direnv"},
		{"editor", Entry{Path: ".vscode/tasks.json", Kind: File, Was: File}, nil, host(), "held VS Code"},
		{"editor, in capitals", Entry{Path: ".VSCode/tasks.json", Kind: File}, nil, host(), "held VS Code"},
		{"editor, as a link", Entry{Path: ".vscode", Kind: Link, Target: "evil"}, nil, host(), "held VS Code"},
		{"directory above, as a link", Entry{Path: ".config", Kind: Link, Target: "evil"}, nil, host(), "held is a link, through which"},
		{"directory above, as a link, deeper", Entry{Path: "a/gradle", Kind: Link, Target: "../evil"}, nil, host(), "held is a link, through which IDEs"},
		{"backslash in a name", Entry{Path: `units/dev-disk\x2dlabel.mount`, Kind: File}, nil, host(), ""},
		{"below a link of the host", Entry{Path: "agents/settings.json", Kind: File, Was: File}, nil, linked, "held the link .claude leads to it"},
		{"the target of a link of the host", Entry{Path: "doc/notes.md", Kind: File}, nil, linked, "named the link CLAUDE.md leads to it"},
		{"directory of hooks", Entry{Path: "build/hook.sh", Kind: File, Was: File}, nil, hooks, "held git runs it as a hook"},
		{"name of a hook", Entry{Path: "hooks/pre-push", Kind: Program}, nil, host(), "held git runs it"},
		{"code below such a name", Entry{Path: "cmd/hooks/pre-commit/main.go", Kind: File}, nil, host(), ""},
		{"another version control system", Entry{Path: "a/.hg/hgrc", Kind: File}, nil, host(), "refused belongs to the repository"},
		{"three packages", Entry{Path: "p/head/a.go", Kind: File}, []string{"p/objects/a.go", "p/refs/a.go"}, host(), ""},
		{"too deep", Entry{Path: strings.Repeat("d/", 300) + "f", Kind: File}, nil, host(), "refused is too deep"},
		{"work tree in a bare repository", Entry{Path: "proj/main/x.go", Kind: File}, nil, inBare, ""},
		{"other hooks", Entry{Path: "hooks/useState.ts", Kind: File}, nil, host(), ""},
		{"workflow", Entry{Path: ".github/workflows/ci.yml", Kind: File}, nil, host(), "held it runs with the secrets"},
		{"template of an issue", Entry{Path: ".github/ISSUE_TEMPLATE/bug.md", Kind: File}, nil, host(), ""},
		{"example of variables", Entry{Path: ".env.example", Kind: File}, nil, host(), ""},
		{"variables", Entry{Path: ".env.local", Kind: File}, nil, host(), "held plugins of shells"},
		{"deleted", Entry{Path: ".claude/settings.json", Was: File}, nil, host(), "named is deleted"},
		{"deleted ordinary file", Entry{Path: "x", Was: Program}, nil, host(), ""},
		{"scripts", Entry{Path: "web/package.json", Kind: File, Was: File}, nil, host(), "named runs with"},
		{"build script in a directory with such a name", Entry{Path: "build/x.txt", Kind: File}, nil, host(), ""},
		{"new program", Entry{Path: "tool", Kind: Program}, nil, host(), "named is a new program"},
		{"changed program", Entry{Path: "tool", Kind: Program, Was: Program}, nil, host(), ""},
		{"instructions", Entry{Path: "a/AGENTS.md", Kind: File, Was: File}, nil, host(), "named instructs"},
		{"submodule", Entry{Path: "lib", Kind: Module, Was: Module}, nil, host(), "named is a submodule"},
		{"above the work tree", Entry{Path: "home/u/src/app/x.go", Kind: File}, nil, deep, ""},
		{"in a repository of the host", Entry{Path: "home/u/src/app/.git/config", Kind: File, Was: File}, nil, deep, "refused belongs to git"},
	} {
		entries := []Entry{tc.entry}
		for _, p := range tc.more {
			entries = append(entries, Entry{Path: p, Kind: File})
		}
		got := ""
		for _, f := range Check(entries, tc.host) {
			if f.Path == tc.entry.Path {
				got = [...]string{"refused ", "held ", "named "}[f.Level] + f.Why
			}
		}
		if tc.want == "" && got != "" || !strings.HasPrefix(got, tc.want) {
			t.Errorf("%s: %q, want %q", tc.name, got, tc.want)
		}
	}
}

// Each rule has a reason and a source, and each name has a rule of its own.
func TestRules(t *testing.T) {
	seen := map[string]Level{}
	for _, r := range rules {
		if r.why == "" || r.source == "" || len(r.names) == 0 {
			t.Errorf("rule %q is incomplete", r.why)
		}
		for _, name := range r.names {
			if strings.Count(name, "*") > 1 || strings.Contains(path.Dir(strings.TrimSuffix(name, "/")), "*") {
				t.Errorf("%s: only the last element may have a *, and only one", name)
			}
			if level, is := seen[Fold(name)]; is && level != r.level {
				t.Errorf("%s has two levels", name)
			}
			seen[Fold(name)] = r.level
			if len(strings.Split(name, "/")) > maxTail {
				t.Errorf("%s is longer than maxTail", name)
			}
			sample := strings.ReplaceAll(strings.TrimRight(name, "/$"), "*", "x")
			if got := find("some/dir/" + sample); got == nil || got.level > r.level {
				t.Errorf("%s: %v", sample, got)
			}
		}
	}
}

func BenchmarkCheck(b *testing.B) {
	var entries []Entry
	for i := range 100_000 {
		entries = append(entries, Entry{Path: "src/pkg" + string(rune('a'+i%26)) + "/deep/er/file" + strings.Repeat("x", i%7) + ".go", Kind: File})
	}
	b.Run("files", func(b *testing.B) {
		for b.Loop() {
			Check(entries, Host{})
		}
	})
	for i := range entries { // of a hostile guest
		entries[i].Path = strings.Repeat("d/", MaxDepth-2) + strconv.Itoa(i)
	}
	b.Run("deep", func(b *testing.B) {
		for b.Loop() {
			Check(entries, Host{})
		}
	})
}

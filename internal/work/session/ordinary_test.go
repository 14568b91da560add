package session

import (
	"bytes"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/worktest"
)

// ordinary are repositories as they are: what they have from the beginning, and what
// later commits change.
var ordinary = map[string]struct {
	begin  string
	change []string
}{
	"Go":       {"go.mod main.go main_test.go Makefile .github/workflows/ci.yml .golangci.yml .gitignore AGENTS.md +scripts/release.sh", []string{"main.go", "main_test.go internal/a/a.go", "go.mod go.sum", "docs/index.md README.md testdata/HEAD testdata/refs"}},
	"Node":     {"package.json package-lock.json .npmrc .husky/pre-commit .vscode/settings.json src/index.ts eslint.config.js", []string{"src/index.ts src/app/button.tsx", "src/hooks/useState.ts src/hooks/index.ts", "package-lock.json", "public/logo.svg .env.example"}},
	"Python":   {"pyproject.toml app/__init__.py .pre-commit-config.yaml tox.ini .envrc", []string{"app/models.py app/config/settings.py", "tests/test_models.py", "docs/conf.txt app/objects/__init__.py app/refs.py"}},
	"Rust":     {"Cargo.toml Cargo.lock src/main.rs .cargo/config.toml build.rs rust-toolchain.toml", []string{"src/main.rs src/lib.rs", "benches/a.rs Cargo.lock", "src/git/objects/mod.rs src/git/refs/mod.rs"}},
	"C":        {"configure.ac Makefile.am src/main.c .gitattributes", []string{"src/main.c include/api.h", "po/de.po po/fr.po", "doc/manual.texi"}},
	"Java":     {"pom.xml mvnw .mvn/wrapper/maven-wrapper.properties src/main/java/App.java", []string{"src/main/java/App.java", "src/test/java/AppTest.java src/main/resources/application.yml"}},
	"Ruby":     {"Gemfile Gemfile.lock Rakefile app/models/user.rb .gitlab-ci.yml", []string{"app/models/user.rb db/schema.rb", "Gemfile.lock app/views/users/index.html.erb"}},
	"docs":     {"mkdocs.yml docs/index.md .readthedocs.yaml", []string{"docs/index.md docs/guide/start.md", "docs/img/a.png docs/workflows/ci.md"}},
	"monorepo": {"package.json packages/a/package.json packages/b/Makefile .gitmodules .claude/settings.json CLAUDE.md", []string{"packages/a/src/x.ts", "packages/b/lib/y.c packages/a/config/z.json"}},
	"dotfiles": {".bashrc .vimrc .config/git/config .config/fish/config.fish", []string{"README.md notes/today.txt", "bin.txt"}},
}

// Changes of ordinary files are merged and applied without a word.
func TestOrdinaryRepositories(t *testing.T) {
	t.Parallel()
	write := func(w *sessionWorld, dir, names, text string) {
		files := map[string]string{}
		for name := range strings.FieldsSeq(names) {
			files[strings.TrimPrefix(name, "+")] = text
		}
		worktest.Put(w.T, dir, files)
		worktest.Git(w.T, dir, "add", "-A")
		for name := range strings.FieldsSeq(names) {
			if program, is := strings.CutPrefix(name, "+"); is {
				worktest.Git(w.T, dir, "update-index", "--chmod=+x", program)
			}
		}
		worktest.Git(w.T, dir, "commit", "-q", "-m", text)
	}
	for _, name := range slices.Sorted(maps.Keys(ordinary)) {
		t.Run(name, func(t *testing.T) {
			w := newSessionWorld(t)
			write(w, w.user, ordinary[name].begin, "begin")
			worktest.Git(t, w.guest, "pull", "-q")
			for i, change := range ordinary[name].change {
				write(w, w.guest, change, fmt.Sprintf("change %d", i))
			}
			for _, diverged := range []bool{false, true} {
				if diverged {
					write(w, w.user, "only-here.txt", "of the user")
				}
				s := w.fetched()
				j, err := gitsafe.JudgeCommit(t.Context(), w.user, w.user, true, "HEAD", s.Link.Ref("trunk"))
				if err != nil || len(j.Found)+len(j.InWay) > 0 {
					t.Errorf("diverged %v: %+v, %v", diverged, j, err)
				}
			}
		})
	}
}

// On a terminal the user sees what must be confirmed, and decides.
func TestReturnCheckAsks(t *testing.T) {
	t.Parallel()
	for answer, merged := range map[string]bool{"y": true, "n": false} {
		w := newSessionWorld(t)
		w.commit(map[string]string{".envrc": "touch /tmp/x\n", ".vscode/tasks.json": "{}", "Makefile": "all:\n"})
		s := w.fetched()
		var out bytes.Buffer
		a := worktest.Asking{UI: worktest.UI{Out: &out}, Answer: func(string) string { return answer }}
		m, found, err := mergeSession(t.Context(), a, s, "", "")
		if merged && (err != nil || m == nil || len(found) != 3) || !merged && agentlab.CodeOf(err) != agentlab.CodeDenied {
			t.Errorf("%q: %+v, %+v, %v", answer, m, found, err)
		}
		for _, want := range []string{".envrc              new      direnv runs it", ".vscode/tasks.json  new      VS Code", "→ git diff HEAD...agentlab/trunk"} {
			if !strings.Contains(out.String(), want) {
				t.Errorf("%q is not in\n%s", want, out.String())
			}
		}
	}
}

// settings of git that users have, in groups that do not contradict each other. None of
// them changes what a sync does.
var settings = []map[string]string{
	{
		"merge.ff": "only", "branch.trunk.mergeOptions": "--squash --no-commit -X theirs", "merge.verifySignatures": "true", "commit.gpgSign": "true", "gpg.program": "/bin/false",
		"merge.log": "20", "merge.stat": "true", "merge.renames": "false", "merge.directoryRenames": "true", "pull.twohead": "ours", "rerere.enabled": "true", "rerere.autoUpdate": "true",
		"color.ui": "always", "core.pager": "false", "core.editor": "false", "diff.noprefix": "true", "diff.external": "/bin/false", "diff.renames": "copies", "status.short": "true",
		"status.showUntrackedFiles": "no", "status.branch": "true", "column.ui": "always", "submodule.recurse": "true", "fetch.prune": "true", "log.showSignature": "true",
		"format.pretty": "fuller", "log.decorate": "full", "core.quotePath": "false", "core.abbrev": "4", "log.date": "relative", "gc.auto": "1",
	},
	{
		"merge.ff": "false", "branch.trunk.mergeOptions": "--no-ff --signoff --log", "merge.conflictStyle": "zdiff3", "merge.autoStash": "true", "merge.renormalize": "true",
		"diff.mnemonicPrefix": "true", "diff.algorithm": "histogram", "diff.submodule": "log", "core.fsmonitor": "/bin/false", "core.untrackedCache": "true", "core.logAllRefUpdates": "always",
		"core.sharedRepository": "group", "core.commentChar": "auto", "alias.merge": "!false", "alias.config": "!false", "user.useConfigOnly": "true", "transfer.fsckObjects": "true",
		"fetch.fsckObjects": "true", "safe.bareRepository": "explicit", "pull.rebase": "true", "branch.autoSetupMerge": "always", "i18n.logOutputEncoding": "latin1", "pack.threads": "3", "advice.detachedHead": "false",
	},
}

// A sync makes the same commits whatever the user has configured.
func TestSyncWithUnusualSettings(t *testing.T) {
	t.Parallel()
	for i, set := range settings {
		for _, diverged := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d, diverged %v", i, diverged), func(t *testing.T) {
				w := newSessionWorld(t)
				worktest.Put(t, w.user, map[string]string{"old-name": worktest.TenLines})
				worktest.Git(t, w.user, "add", "-A")
				worktest.Git(t, w.user, "commit", "-q", "-m", "file")
				worktest.Git(t, w.guest, "pull", "-q")
				commit := w.commit(map[string]string{"old-name": "one\n" + worktest.TenLines[2:], "new": "1"})
				if diverged {
					worktest.Git(t, w.user, "mv", "old-name", "new-name")
					worktest.Git(t, w.user, "commit", "-q", "-m", "of the user")
				}
				before := worktest.Git(t, w.user, "rev-parse", "HEAD")
				for key, value := range set {
					worktest.Git(t, w.user, "config", key, value)
				}
				s := w.fetched()
				m, _, err := mergeSession(t.Context(), w.app, s, "", "")
				if err != nil || m == nil || m.FastForward == diverged {
					t.Fatalf("%+v, %v", m, err)
				}
				got := gitIn(t, w.user, "", "-c", "color.ui=false", "-c", "core.abbrev=40", "log", "-1", "--no-show-signature", "--no-decorate", "--format=%P|%B")
				want := before + "|of the guest"
				if diverged {
					want = before + " " + commit + "|Merge remote-tracking branch 'refs/remotes/agentlab/trunk' into trunk"
				}
				if got != want {
					t.Errorf("the commit is %q, want %q", got, want)
				}
				name := "old-name"
				if diverged {
					name = "new-name"
				}
				// No setting decides a conflict.
				w.commit(map[string]string{"new": "of the guest"})
				worktest.Put(t, w.user, map[string]string{"new": "of the user"})
				worktest.Git(t, w.user, "-c", "commit.gpgSign=false", "-c", "core.fsmonitor=false", "-c", "user.useConfigOnly=false", "commit", "-q", "-a", "--no-verify", "-m", "mine")
				s = w.fetched()
				if _, _, err := mergeSession(t.Context(), w.app, s, "", ""); agentlab.CodeOf(err) != agentlab.CodeConflict || !strings.HasSuffix(err.Error(), "conflicts with branch trunk in new") {
					t.Errorf("a conflict: %v", err)
				}
				if files := worktest.Tree(t, w.user); files[name] != "one\n"+worktest.TenLines[2:] || !strings.Contains(files["new"], "<<<<<<<") {
					t.Errorf("files: %v", files)
				}
			})
		}
	}
}

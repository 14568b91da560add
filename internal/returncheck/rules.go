package returncheck

import (
	"slices"
	"strings"
	"sync"
)

// rule says what to do with a file because of its name.
type rule struct {
	level  Level
	why    string // completes "PATH: …"
	source string
	names  []string
}

// Hooks are the programs that git looks for in a directory of hooks, from githooks(5).
var Hooks = []string{
	"applypatch-msg", "pre-applypatch", "post-applypatch", "pre-commit", "pre-merge-commit", "prepare-commit-msg", "commit-msg", "post-commit",
	"pre-rebase", "post-checkout", "post-merge", "pre-push", "reference-transaction", "push-to-checkout", "pre-auto-gc", "post-rewrite",
	"sendemail-validate", "fsmonitor-watchman", "post-index-change",
}

// rules lists the names that matter. A name is one or more elements of a path, which match
// at any depth and in any case; one * matches any characters of the last element. A
// name of a Held file also matches everything below it, unless it ends with $, as does a name
// with a slash at its end.
var rules = []rule{
	// What runs when a shell enters a directory.
	{Held, "direnv runs it when a shell enters the directory", "direnv(1)", []string{".envrc"}},
	{Held, "plugins of shells read it when a shell enters the directory", "https://github.com/ohmyzsh/ohmyzsh/tree/master/plugins/dotenv", []string{".env", ".env.*", ".envrc.local", ".direnvrc", ".config/direnv", ".shadowenv.d", ".autoenv", ".autoenv.zsh", ".autoenv_leave.zsh"}},
	{Held, "mise sets variables and runs hooks from it when a shell enters the directory", "https://mise.jdx.dev/configuration.html", []string{"mise.toml", ".mise.toml", "mise.*.toml", ".mise.*.toml", ".mise", ".config/mise", ".config/mise.toml", ".tool-versions"}},
	{Held, "a shell reads it when it starts", "bash(1), zsh(1), fish(1)", []string{".bashrc", ".bash_profile", ".bash_login", ".bash_logout", ".bash_aliases", ".profile", ".zshrc", ".zshenv", ".zprofile", ".zlogin", ".zlogout", ".kshrc", ".cshrc", ".tcshrc", ".login", ".config/fish", ".inputrc", ".tmux.conf", ".zshrc.local", ".bashrc.local", ".local/bin", ".config/tmux"}},
	{Held, "OpenSSH obeys it", "ssh_config(5), sshd(8)", []string{".ssh"}},
	{Held, "the desktop or the system manager starts it", "https://specifications.freedesktop.org/autostart-spec/latest/, systemd.unit(5)", []string{".config/autostart", ".config/systemd", ".config/environment.d", ".xprofile", ".xinitrc", ".xsession", "Library/LaunchAgents"}},

	// What an editor obeys when it opens a directory.
	{Held, "VS Code and editors based on it obey it: tasks, debuggers, paths of programs", "https://code.visualstudio.com/docs/editor/workspace-trust", []string{".vscode", "*.code-workspace", ".theia", ".cursor", ".windsurf", ".trae", ".void", ".positron"}},
	{Held, "JetBrains IDEs obey it: run configurations, startup tasks, file watchers", "https://www.jetbrains.com/help/idea/project-security.html", []string{".idea", ".run", ".fleet", "*.iml", "*.ipr"}},
	{Held, "Zed obeys it: tasks and language servers", "https://zed.dev/docs/configuring-zed", []string{".zed"}},
	{Held, "an editor runs it when it opens files of the directory", "vim(1) 'exrc', nvim(1), the Emacs manual on directory variables, https://docs.helix-editor.com/configuration.html", []string{".vimrc", ".exrc", "_vimrc", ".gvimrc", ".nvimrc", ".nvim.lua", ".lvimrc", ".local.vimrc", ".dir-locals.el", ".dir-locals-2.el", ".helix", ".vim", ".nvim", ".config/nvim", ".lazy.lua", ".emacs", ".emacs.d", ".config/zed", ".bsp", "hie.yaml", ".luacheckrc", ".rubocop.yml", ".formatter.exs", ".externalToolBuilders", ".latexmkrc", ".kakrc", "*.sublime-project", ".vs", ".nova", ".settings", ".kateproject", ".lsp.json", ".neoconf.json", ".ycm_extra_conf.py", ".clangd"}},
	{Held, "a debugger or an interpreter runs it when it starts in the directory", "gdb(1), lldb(1) and the manuals of the languages", []string{".gdbinit", ".gdbearlyinit", ".lldbinit", ".Rprofile", ".Renviron", ".pdbrc", ".irbrc", ".pryrc", ".ghci", ".iex.exs", ".erlang", ".ocamlinit", ".octaverc", ".pythonrc", ".pythonstartup"}},
	{Held, "language servers run what it names when an editor opens the project", "https://doc.rust-lang.org/cargo/reference/config.html", []string{".cargo/config", ".cargo/config.toml", "rust-toolchain", "rust-toolchain.toml"}},
	{Held, "IDEs run it when they import the project", "https://docs.gradle.org/current/userguide/gradle_wrapper.html, https://maven.apache.org/configure.html", []string{"gradle/wrapper", ".mvn"}},
	{Held, "tools for development containers run its initializeCommand on this machine", "https://containers.dev/implementors/json_reference/", []string{".devcontainer", ".devcontainer.json", "devcontainer.json", ".gitpod.yml", ".gitpod", ".idx", ".codesandbox", "devbox.json", ".devfile.yaml", "devfile.yaml"}},

	// What an agent on this machine obeys when it starts.
	{Held, "Claude Code obeys it: hooks, permissions, commands", "https://code.claude.com/docs/en/settings", []string{".claude", ".claude.json", ".claude-plugin"}},
	{Held, "agents start the servers that it names", "https://modelcontextprotocol.io", []string{".mcp.json", ".mcp"}},
	{Held, "a coding agent obeys it: settings, hooks, commands", "https://developers.openai.com/codex, https://opencode.ai/docs/config, https://google-gemini.github.io/gemini-cli and the manuals of the others", []string{
		".codex", ".opencode", "opencode.json", "opencode.jsonc", ".gemini", ".qwen", ".kiro", ".junie", ".amazonq", ".augment", ".continue", ".roo", ".roomodes", ".kilocode", ".cline", ".clinerules/hooks", "conductor.json", "codebuff.json", ".goose", ".crush", ".crush.json", "crush.json",
		".aider.conf.yml", ".aider.*", ".copilot", ".github/hooks", ".github/agents", ".github/copilot", ".agents", ".agent", ".pi", ".factory", ".amp", ".trae", ".openhands", ".tabnine", ".warp",
	}},
	{Held, "AgentLab obeys it", "docs/project.md, docs/interactive.md", []string{".agentlab.yaml", ".agentlabignore"}},

	// What git obeys, or runs when it works.
	{Held, "it sets filters, merge drivers and diff drivers of git", "gitattributes(5)", []string{".gitattributes"}},
	{Held, "it sets the addresses and directories of submodules", "gitmodules(5)", []string{".gitmodules"}},
	{Held, "git or git-lfs takes addresses and programs from it", "git-config(1), git-lfs-config(5)", []string{".lfsconfig", ".gitconfig", ".config/git", ".git-credentials", ".netrc", "_netrc"}},
	{Held, "git runs it when it commits, merges or pushes", "githooks(5)", []string{".githooks", ".git-hooks", ".hooks"}},
	{Held, "git runs it when it commits, merges or pushes", "githooks(5)", slices.Concat(under("hooks", Hooks), under("githooks", Hooks), under("git-hooks", Hooks))},
	{Held, "a manager of git's hooks runs what it names", "https://pre-commit.com, https://typicode.github.io/husky, https://lefthook.dev", []string{".husky", ".huskyrc*", "husky.config.js", ".pre-commit-config.yaml", ".pre-commit-hooks.yaml", "prek.toml", "lefthook.yml", "lefthook.yaml", "lefthook.toml", "lefthook.json", ".lefthook.yml", ".lefthook.yaml", "lefthook-local.*", ".lefthook", ".overcommit.yml", ".overcommit", ".git-hooks", ".lintstagedrc*", "lint-staged.config.*", ".simple-git-hooks.*", "simple-git-hooks.*", ".commitlintrc*", "commitlint.config.*", ".czrc"}},

	// What makes a directory the repository of another system, whose configuration runs
	// programs too.
	{Refused, "belongs to the repository of another version control system, whose configuration runs programs", "hgrc(5), https://docs.jj-vcs.dev/latest/config", []string{".hg/", ".jj/", ".sl/"}},

	// What runs elsewhere with the user's rights after a push.
	{Held, "it runs with the secrets of the repository after a push", "https://docs.github.com/actions", []string{".github/workflows", ".github/actions", ".github/settings.yml", ".github/dependabot.yml", "renovate.json", "renovate.json5", ".renovaterc*", ".github/renovate.json"}},
	{Held, "a CI service runs it after a push", "the manuals of GitLab CI, Gitea, Forgejo, CircleCI, Azure Pipelines, Jenkins, Travis CI, Drone, Woodpecker, Buildkite, Bitbucket, Cirrus CI, AppVeyor, Google Cloud Build, AWS CodeBuild, Tekton", []string{
		".gitlab-ci.yml", ".gitlab-ci", ".gitlab", ".gitea", ".forgejo", ".circleci", "azure-pipelines.yml", "azure-pipelines.yaml", ".azure-pipelines", ".azuredevops", "Jenkinsfile", "Jenkinsfile.*", "*.jenkinsfile", ".travis.yml", ".drone.yml", ".drone.jsonnet", ".woodpecker", ".woodpecker.yml", ".woodpecker.yaml",
		".buildkite", "bitbucket-pipelines.yml", ".cirrus.yml", ".cirrus.star", "appveyor.yml", ".appveyor.yml", "cloudbuild.yaml", "cloudbuild.yml", "buildspec.yml", "buildspec.yaml", ".tekton", ".builds", ".build.yml", ".semaphore", ".teamcity", "wercker.yml", "codefresh.yml", "amplify.yml", "heroku.yml", "render.yaml", "bitrise.yml", "codemagic.yaml", ".vela.yml", "screwdriver.yaml", ".harness", ".mergify.yml", "vercel.json", "netlify.toml", "fly.toml", ".readthedocs.yaml", ".readthedocs.yml",
	}},

	// What package managers obey before they run anything.
	{Held, "a package manager takes registries, credentials and programs from it", "https://docs.npmjs.com/cli/configuring-npm/npmrc, https://yarnpkg.com/configuration/yarnrc, https://pip.pypa.io/en/stable/topics/configuration", []string{
		".npmrc", ".yarnrc", ".yarnrc.yml", ".yarn/releases", ".yarn/plugins", ".pnp.cjs", "pnpm-workspace.yaml", ".pnp.loader.mjs", ".pnpmfile.cjs", ".pnpmfile.mjs", "bunfig.toml", "pip.conf", "pip.ini", ".pypirc", "uv.toml", ".condarc", ".bundle", ".gemrc", "nuget.config", ".cargo/credentials.toml", ".bazelrc", ".bazeliskrc", "user.bazelrc", ".buckconfig", ".sbtopts", ".jvmopts",
	}},

	// What runs with the user's usual commands.
	{Named, "runs with usual commands of the project", "the manuals of the build tools", []string{
		"package.json", "deno.json", "deno.jsonc", "gradle.properties", "action.yml", "action.yaml", "lakefile.lean", "Makefile", "makefile", "GNUmakefile", "BSDmakefile", "*.mk", "Justfile", ".justfile", "*.just", "Taskfile.yml", "Taskfile.yaml", "Taskfile.dist.yml", "Rakefile", "*.rake", "Gemfile", "*.gemspec", "Guardfile", "Thorfile", "CMakeLists.txt", "*.cmake", "CMakePresets.json", "configure", "configure.ac", "autogen.sh", "meson.build", "SConstruct", "SConscript", "wscript", "BUILD", "BUILD.bazel", "WORKSPACE", "WORKSPACE.bazel", "MODULE.bazel", "*.bzl", "pants.toml",
		"build.gradle", "build.gradle.kts", "settings.gradle", "settings.gradle.kts", "init.gradle", "gradlew", "gradlew.bat", "buildSrc/", "mvnw", "mvnw.cmd", "pom.xml", "build.xml", "ivy.xml", "build.sbt", "project/*.sbt", "build.sc", "project.clj", "deps.edn", "build.boot", "build.rs", "Cargo.toml", "build.zig", "Package.swift", "Podfile", "Fastfile", "Cartfile", "*.podspec", "mix.exs", "rebar.config", "rebar.config.script", "dune", "dune-project", "*.opam", "Setup.hs", "stack.yaml", "*.cabal", "shard.yml", "pubspec.yaml", "composer.json", "magefile.go", "magefiles/", "tools.go",
		"setup.py", "setup.cfg", "pyproject.toml", "tox.ini", "noxfile.py", "conftest.py", "pytest.ini", "fabfile.py", "tasks.py", "dodo.py", "manage.py", "sitecustomize.py", "usercustomize.py", "*.pth", ".pylintrc", "pylintrc", ".flake8", "requirements.txt", "requirements-*.txt", "environment.yml",
		"*.csproj", "*.fsproj", "*.vbproj", "*.vcxproj", "*.sln", "*.props", "*.targets", "Directory.Build.rsp", "*.proj", "*.cake", "*.xcodeproj/", "*.xcworkspace/",
		"*.config.js", "*.config.cjs", "*.config.mjs", "*.config.ts", "*.config.mts", "*.config.cts", ".eslintrc*", ".babelrc*", ".prettierrc*", ".stylelintrc*", ".postcssrc*", ".swcrc", ".mocharc*", ".nycrc*", "gulpfile.*", "Gruntfile.*", "Jakefile", "turbo.json", "nx.json", "lerna.json", "rush.json", "angular.json", "tsconfig.json", "tsconfig.*.json",
		"Dockerfile", "Dockerfile.*", "*.dockerfile", "Containerfile", "compose.yaml", "compose.yml", "compose.*.yaml", "compose.*.yml", "docker-compose.yaml", "docker-compose.yml", "docker-compose.*.yml", "docker-bake.hcl", "Earthfile", "Tiltfile", "skaffold.yaml", "Vagrantfile", "Procfile", "Procfile.*", "Brewfile", "flake.nix", "shell.nix", "default.nix", "devenv.nix", "devenv.yaml", "*.tf", "Pulumi.yaml", "ansible.cfg", "Chart.yaml", "Snakefile", "dagger.json", ".goreleaser.yml", ".goreleaser.yaml", ".golangci.yml", ".golangci.yaml",
	}},
	{Named, "instructs coding agents", "https://agents.md and the manuals of the agents", []string{
		"AGENTS.md", "AGENT.md", "AGENTS.override.md", "CLAUDE.md", "CLAUDE.local.md", "GEMINI.md", "QWEN.md", "SKILL.md", "WARP.md", "CRUSH.md", ".cursorrules", ".windsurfrules", ".clinerules/", ".clinerules", ".roorules*", ".kilocoderules", ".goosehints", ".rules", ".github/copilot-instructions.md", ".github/instructions/", ".github/prompts/", ".github/chatmodes/",
	}},
}

// under returns names below a directory.
func under(dir string, names []string) []string {
	var out []string
	for _, name := range names {
		out = append(out, dir+"/"+name+"$")
	}
	return out
}

// exceptions are names that a rule with a * matches and that nothing obeys.
var exceptions = map[string]bool{".env.example": true, ".env.sample": true, ".env.template": true, ".env.dist": true}

// pattern is a name of a rule, folded.
type pattern struct {
	dirs       []string // elements before the last one
	begin, end string   // of the last element
	exact      bool     // the last element is begin
	below      bool     // it matches everything below it too
	longerThan int      // length of begin and end
	*rule
}

func newPattern(name string, r *rule) pattern {
	name, below := strings.CutSuffix(name, "/")
	name, leaf := strings.CutSuffix(name, "$")
	elements := strings.Split(Fold(name), "/")
	last := len(elements) - 1
	p := pattern{dirs: elements[:last], below: below || r.level == Held && !leaf, rule: r}
	var glob bool
	p.begin, p.end, glob = strings.Cut(elements[last], "*")
	p.exact, p.longerThan = !glob, len(p.begin)+len(p.end)
	return p
}

// matches reports whether elements end with the name.
func (p *pattern) matches(elements []string) bool {
	last := len(elements) - 1
	name, dirs := elements[last], elements[:last]
	switch {
	case p.exact && name != p.begin, !p.exact && (len(name) < p.longerThan || !strings.HasPrefix(name, p.begin) || !strings.HasSuffix(name, p.end)):
		return false
	case len(dirs) < len(p.dirs):
		return false
	}
	return slices.Equal(dirs[len(dirs)-len(p.dirs):], p.dirs)
}

// patterns has the names of all rules, those without a * by their last element.
var patterns = sync.OnceValues(func() (exact map[string][]pattern, globs []pattern) {
	exact = map[string][]pattern{}
	for i := range rules {
		for _, name := range rules[i].names {
			if p := newPattern(name, &rules[i]); p.exact {
				exact[p.begin] = append(exact[p.begin], p)
			} else {
				globs = append(globs, p)
			}
		}
	}
	return exact, globs
})

// parents has a rule for each directory above a name of a Held file.
var parents = sync.OnceValue(func() map[string]*rule {
	dirs := map[string]*rule{}
	for i := range rules {
		for _, name := range rules[i].names {
			for at := Fold(name); rules[i].level == Held && strings.Contains(at, "/"); {
				at = at[:strings.LastIndexByte(at, '/')]
				if dirs[at] == nil {
					dirs[at] = &rule{level: Held, why: "is a link, through which " + rules[i].why, source: rules[i].source}
				}
			}
		}
	}
	return dirs
})

// maxTail is the number of elements that the longest name has.
const maxTail = 4

// tailOf returns the last elements of a path, folded, for a name in a directory.
func tailOf(dir []string, name string) []string {
	return append(slices.Clone(dir[max(0, len(dir)-maxTail+1):]), Fold(name))
}

// findName returns the strictest rule that the last elements of a path match; isDir means
// that the path is a directory, whose rule counts below it.
func findName(tail []string, isDir bool) (best *rule) {
	exact, globs := patterns()
	name := tail[len(tail)-1]
	if exceptions[name] {
		return nil
	}
	for _, list := range [2][]pattern{exact[name], globs} {
		for i := range list {
			if p := &list[i]; (p.below || !isDir) && p.matches(tail) {
				best = stricter(best, p.rule)
			}
		}
	}
	return best
}

// findParent returns the rule for a link: it can be a directory above a name of a Held
// file, whose content is elsewhere.
func findParent(tail []string) (best *rule) {
	for i := range tail {
		best = stricter(best, parents()[strings.Join(tail[i:], "/")])
	}
	return best
}

// find returns the strictest rule for a path; nil if there is none.
func find(path string) (best *rule) {
	var tail []string
	elements := strings.Split(path, "/")
	for i, e := range elements {
		tail = tailOf(tail, e)
		best = stricter(best, findName(tail, i < len(elements)-1))
	}
	return best
}

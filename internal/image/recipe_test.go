package image

import (
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/images"
)

func mustShipped(t testing.TB, name string) *Recipe {
	t.Helper()
	r, err := Shipped(name)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestShippedRecipes(t *testing.T) {
	if got := ShippedNames(); !slices.Contains(got, "base") || !slices.Contains(got, "agents") {
		t.Fatalf("shipped recipes are %v", got)
	}
	for _, name := range ShippedNames() {
		if r := mustShipped(t, name); r.Name != name {
			t.Errorf("the recipe in %s.yaml is named %s", name, r.Name)
		}
	}
	base, agents := mustShipped(t, "base"), mustShipped(t, "agents")
	for _, p := range base.Packages {
		if !slices.Contains(agents.Packages, p) {
			t.Errorf("agents extends base but lacks %s", p)
		}
	}
	if got := strings.Join(agents.commands(), " "); got != "node npm claude codex opencode gemini" {
		t.Errorf("commands of agents are %q", got)
	}
	dev := mustShipped(t, "dev") // two recipes are between it and the first
	if dev.Agents.Node != agents.Agents.Node || !slices.Contains(dev.Packages, "bubblewrap") || dev.Shell != "/usr/bin/zsh" ||
		strings.Join(dev.commands(), " ") != "node npm claude codex opencode gemini devcontainer n lazygit docker-compose" {
		t.Errorf("dev extends agents, but is %+v with commands %v", dev, dev.commands())
	}
	if !slices.IsSorted(base.Packages) || !slices.Contains(base.Packages, "systemd") {
		t.Errorf("packages are not completed: %v", base.Packages)
	}
}

// Ubuntu is two lines away.
func TestUbuntuRecipe(t *testing.T) {
	text, err := images.Recipes.ReadFile("base.yaml")
	if err != nil {
		t.Fatal(err)
	}
	noble := strings.Replace(string(text), "suite: bookworm\n", "suite: noble\n", 1)
	noble = strings.Replace(noble, "mirror: host\n", "mirror: http://archive.ubuntu.com/ubuntu\n", 1)
	r, err := ParseRecipe([]byte(noble))
	if err != nil {
		t.Fatal(err)
	}
	if r.Kernel != "linux-image-virtual" || !slices.Equal(r.Components, []string{"main", "universe"}) {
		t.Errorf("kernel %s, components %v", r.Kernel, r.Components)
	}
	if got := lines(r.publicSources()); !strings.Contains(got, "http://archive.ubuntu.com/ubuntu noble-security main universe") {
		t.Errorf("sources:\n%s", got)
	}
}

func TestRecipeRefuses(t *testing.T) {
	const ok = "name: x\nsuite: bookworm\n"
	if _, err := ParseRecipe([]byte(ok)); err != nil {
		t.Fatal(err)
	}
	npm := func(pkg, version, command string) string {
		return ok + "agents:\n  packages:\n    - package: \"" + pkg + "\"\n      version: \"" + version + "\"\n      command: \"" + command + "\"\n"
	}
	pip := func(pkg, version string) string {
		return ok + "pip: [{package: \"" + pkg + "\", version: \"" + version + "\"}]\n"
	}
	apt := func(edit ...string) string {
		text := ok + "apt: [{name: x, url: \"https://example.com/debian\", components: [main], key: \"-----BEGIN PGP PUBLIC KEY BLOCK-----\\n\\nAAAA\\n-----END PGP PUBLIC KEY BLOCK-----\\n\"}]\n"
		return strings.NewReplacer(edit...).Replace(text)
	}
	golang := func(keys string) string { return ok + "go: {toolchain: 1.26.0, programs: [{" + keys + "}]}\n" }
	file := func(keys string) string { return ok + "files: [{" + keys + "}]\n" }
	for _, text := range []string{
		apt(), apt("components: [main]", "suite: ./"), pip("ruff", "0.14.2"), file("path: /a, content: b"), file("path: /home/agent/.a, content: b, owner: agent, mode: 0600"),
		file("path: /a, url: \"https://example.com/a?b=c\", sha256: " + strings.Repeat("0a", 32)), ok + "run: [\"true\"]\n", ok + "shell: /usr/bin/zsh\n",
		golang("module: github.com/docker/compose/v2, version: 2.40.3, package: cmd, command: docker-compose, set: {github.com/docker/compose/v2/internal.Version: v2.40.3}"),
	} {
		if _, err := ParseRecipe([]byte(text)); err != nil {
			t.Errorf("%v:\n%s", err, text)
		}
	}
	for _, tc := range []struct {
		name, text, field, say string
		code                   agentlab.Code
	}{
		{"apt without a key", apt("key:", "components: [main], suite:"), "", "", agentlab.CodeInvalid},
		{"apt with an empty key", apt("AAAA", ""), "apt", "public key", agentlab.CodeInvalid},
		{"apt with a private key", apt("PUBLIC", "PRIVATE"), "apt", "public key", agentlab.CodeInvalid},
		{"apt with a key that ends the file's stanza", apt("AAAA", "AAAA\\nTrusted: yes"), "apt", "public key", agentlab.CodeInvalid},
		{"apt with a long key", apt("AAAA", strings.Repeat("AAAA\\n", 20000)), "apt", "64 KiB", agentlab.CodeInvalid},
		{"apt with credentials", apt("https://", "https://u:secret@"), "apt", "credentials", agentlab.CodeInvalid},
		{"apt from a file", apt("https://example.com", "file:///srv"), "apt", "http", agentlab.CodeInvalid},
		{"apt from the host's", apt("https://example.com/debian", "host"), "apt", "http", agentlab.CodeInvalid},
		{"apt with options", apt("com/debian", "com/debian [trusted=yes]"), "apt", "http", agentlab.CodeInvalid},
		{"apt name with a slash", apt("{name: x", "{name: ../x"), "apt", "name", agentlab.CodeInvalid},
		{"apt name of the distribution", apt("{name: x", "{name: debian"), "apt", "name", agentlab.CodeInvalid},
		{"apt suite with a blank", apt("components", "suite: \"a b\", components"), "apt", "suite", agentlab.CodeInvalid},
		{"apt without components", apt("components: [main]", "suite: stable"), "apt", "components", agentlab.CodeInvalid},
		{"apt with a path and components", apt("components", "suite: ./, components"), "apt", "components", agentlab.CodeInvalid},
		{"apt component that is an option", apt("[main]", "[-x]"), "apt", "component", agentlab.CodeInvalid},
		{"file without a source", file("path: /a"), "files", "content or url", agentlab.CodeInvalid},
		{"file with two sources", file("path: /a, content: b, url: \"http://e/a\""), "files", "content or url", agentlab.CodeInvalid},
		{"download without a sum", file("path: /a, url: \"http://e/a\""), "files", "sha256", agentlab.CodeInvalid},
		{"download with a bad sum", file("path: /a, url: \"http://e/a\", sha256: abc"), "files", "sha256", agentlab.CodeInvalid},
		{"content with a sum", file("path: /a, content: b, sha256: " + strings.Repeat("0a", 32)), "files", "sha256", agentlab.CodeInvalid},
		{"download of a file", file("path: /a, url: \"file:///etc/shadow\", sha256: " + strings.Repeat("0a", 32)), "files", "http", agentlab.CodeInvalid},
		{"download with credentials", file("path: /a, url: \"https://u:secret@e/a\", sha256: " + strings.Repeat("0a", 32)), "files", "credentials", agentlab.CodeInvalid},
		{"relative path", file("path: a, content: b"), "files", "absolute", agentlab.CodeInvalid},
		{"path that goes up", file("path: /a/../b, content: b"), "files", "absolute", agentlab.CodeInvalid},
		{"path with a blank", file("path: \"/a b\", content: b"), "files", "absolute", agentlab.CodeInvalid},
		{"path with a line", file("path: \"/a\\n/b\", content: b"), "files", "absolute", agentlab.CodeInvalid},
		{"path of a directory", file("path: /a/, content: b"), "files", "absolute", agentlab.CodeInvalid},
		{"sudoers", file("path: /etc/sudoers.d/a, content: b"), "files", "cannot write", agentlab.CodeInvalid},
		{"run directory", file("path: /run/a, content: b"), "files", "cannot write", agentlab.CodeInvalid},
		{"setuid", file("path: /a, content: b, mode: \"4755\""), "files", "mode", agentlab.CodeInvalid},
		{"mode in words", file("path: /a, content: b, mode: u+s"), "files", "mode", agentlab.CodeInvalid},
		{"owner", file("path: /a, content: b, owner: sshd"), "files", "own", agentlab.CodeInvalid},
		{"agent in /etc", file("path: /etc/a, content: b, owner: agent"), "files", "/home/agent", agentlab.CodeInvalid},
		{"file twice", ok + "files: [{path: /a, content: b}, {path: /a, content: c}]\n", "files", "twice", agentlab.CodeInvalid},
		{"many files", ok + "files:\n" + strings.Repeat("  - {path: /a, content: b}\n", 65), "files", "64", agentlab.CodeInvalid},
		{"pip range", pip("ruff", ">=1"), "pip", "exact", agentlab.CodeInvalid},
		{"pip URL", pip("ruff @ https://evil.example/x.whl", "1.0"), "pip", "Python package", agentlab.CodeInvalid},
		{"pip option", pip("--index-url=x", "1.0"), "pip", "Python package", agentlab.CodeInvalid},
		{"pip command with arguments", ok + "pip: [{package: x, version: \"1\", command: \"x; reboot\"}]\n", "pip", "command", agentlab.CodeInvalid},
		{"npm tag outside agents", ok + "npm: [{package: x, version: latest}]\n", "npm", "exact", agentlab.CodeInvalid},
		{"npm package of agents again", npm("x", "1.0.0", "") + "npm: [{package: x, version: 1.0.0}]\n", "npm", "twice", agentlab.CodeInvalid},
		{"empty step", ok + "run: [\" \"]\n", "run", "empty", agentlab.CodeInvalid},
		{"long step", ok + "run: [\"" + strings.Repeat("x", 64<<10+1) + "\"]\n", "run", "64 KiB", agentlab.CodeInvalid},
		{"many steps", ok + "run: [" + strings.Repeat("a, ", 33) + "]\n", "run", "32", agentlab.CodeInvalid},
		{"empty", "", "name", "needs a name", agentlab.CodeInvalid},
		{"unknown key", ok + "packges: [git]\n", "packges", "packages", agentlab.CodeInvalid},
		{"key twice", ok + "suite: noble\n", "", "", agentlab.CodeInvalid},
		{"bad name", "name: Über\nsuite: bookworm\n", "name", "", agentlab.CodeInvalid},
		{"no suite", "name: x\n", "suite", "bookworm", agentlab.CodeInvalid},
		{"unknown suite", "name: x\nsuite: hardy\n", "suite", "noble", agentlab.CodeInvalid},
		{"suite that is an option", "name: x\nsuite: --help\n", "suite", "", agentlab.CodeInvalid},
		{"mirror of another kind", ok + "mirror: file:///srv/debian\n", "mirror", "http", agentlab.CodeInvalid},
		{"mirror with options", ok + "mirror: \"http://m/debian [trusted=yes]\"\n", "mirror", "", agentlab.CodeInvalid},
		{"mirror with credentials", ok + "mirror: http://u:secret@m/debian\n", "mirror", "auth.conf", agentlab.CodeInvalid},
		{"no components", ok + "components: []\n", "components", "", agentlab.CodeInvalid},
		{"component with a blank", ok + "components: [\"main [trusted=yes]\"]\n", "components", "", agentlab.CodeInvalid},
		{"package that is an option", ok + "packages: [--yes]\n", "packages", "", agentlab.CodeInvalid},
		{"package with a version", ok + "packages: [git=1.0]\n", "packages", "", agentlab.CodeInvalid},
		{"two packages in one", ok + "packages: [\"git,curl\"]\n", "packages", "", agentlab.CodeInvalid},
		{"packages as text", ok + "packages: git\n", "packages", "list", agentlab.CodeInvalid},
		{"size as text", ok + "size_gb: big\n", "size_gb", "", agentlab.CodeInvalid},
		{"too small", ok + "size_gb: 1\n", "size_gb", "2", agentlab.CodeInvalid},
		{"too large", ok + "size_gb: 99999\n", "size_gb", "2048", agentlab.CodeInvalid},
		{"other architecture", ok + "arch: s390x\n", "arch", runtime.GOARCH, agentlab.CodeUnsupported},
		{"kernel that is a path", ok + "kernel: /boot/vmlinuz\n", "kernel", "", agentlab.CodeInvalid},
		{"Go programs without Go", ok + "go: {programs: [{module: example.com/x, version: 1.0.0, command: x}]}\n", "go.toolchain", "version of Go", agentlab.CodeInvalid},
		{"Go range", ok + "go: {toolchain: '1.26'}\n", "go.toolchain", "1.26.0", agentlab.CodeInvalid},
		{"Go tag", golang("module: example.com/x, version: latest, command: x"), "go.programs", "exact", agentlab.CodeInvalid},
		{"Go module of another major version", golang("module: example.com/x, version: 2.0.0, command: x"), "go.programs", "/v2", agentlab.CodeInvalid},
		{"Go module that is an option", golang("module: -x, version: 1.0.0, command: x"), "go.programs", "exact", agentlab.CodeInvalid},
		{"Go package outside", golang("module: example.com/x, version: 1.0.0, package: ../y, command: x"), "go.programs", "directory", agentlab.CodeInvalid},
		{"Go command with a path", golang("module: example.com/x, version: 1.0.0, command: ../x"), "go.programs", "command", agentlab.CodeInvalid},
		{"Go command missing", golang("module: example.com/x, version: 1.0.0"), "go.programs", "command", agentlab.CodeInvalid},
		{"Go flag as a value", golang("module: example.com/x, version: 1.0.0, command: x, set: {main.v: 'a -extld=x'}"), "go.programs", "variable", agentlab.CodeInvalid},
		{"Go flag as a variable", golang("module: example.com/x, version: 1.0.0, command: x, set: {'main.v -linkmode': x}"), "go.programs", "variable", agentlab.CodeInvalid},
		{"Go command twice", golang("module: example.com/x, version: 1.0.0, command: x}, {module: example.com/y, version: 1.0.0, command: x"), "go.programs", "twice", agentlab.CodeInvalid},
		{"shell with arguments", ok + "shell: /bin/sh -c\n", "shell", "absolute", agentlab.CodeInvalid},
		{"shell without a directory", ok + "shell: zsh\n", "shell", "absolute", agentlab.CodeInvalid},
		{"extends nothing", "name: x\nextends: nothing\n", "extends", "base", agentlab.CodeInvalid},
		{"extends a path", "name: x\nextends: ../embed.go\n", "extends", "base", agentlab.CodeInvalid},
		{"node range", ok + "agents:\n  node: ^24\n", "agents.node", "24.21.0", agentlab.CodeInvalid},
		{"npm tag", npm("codex", "latest", ""), "agents.packages", "exact", agentlab.CodeInvalid},
		{"npm URL", npm("https://evil.example/x.tgz", "1.0.0", ""), "agents.packages", "", agentlab.CodeInvalid},
		{"npm option", npm("--registry=x", "1.0.0", ""), "agents.packages", "", agentlab.CodeInvalid},
		{"npm path", npm("../x", "1.0.0", ""), "agents.packages", "", agentlab.CodeInvalid},
		{"command with arguments", npm("x", "1.0.0", "x; reboot"), "agents.packages", "command", agentlab.CodeInvalid},
		{"alias", "name: &n x\nsuite: *n\n", "", "", agentlab.CodeInvalid},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := ParseRecipe([]byte(tc.text))
			if agentlab.CodeOf(err) != tc.code {
				t.Fatalf("error is %v with code %q, want %s", err, agentlab.CodeOf(err), tc.code)
			}
			if text := err.Error() + " " + agentlab.HintOf(err); !strings.Contains(text, tc.field) || !strings.Contains(text, tc.say) {
				t.Errorf("error is %q; it should name %q and say %q", text, tc.field, tc.say)
			}
			if strings.Contains(err.Error(), "secret") {
				t.Errorf("the error repeats a credential: %v", err)
			}
		})
	}
}

func TestRecipeKey(t *testing.T) {
	key := func(text string) string {
		t.Helper()
		r, err := ParseRecipe([]byte(text))
		if err != nil {
			t.Fatal(err)
		}
		return r.Key()
	}
	base := key("name: x\nsuite: bookworm\npackages: [jq, curl]\n")
	for _, same := range []string{
		"suite: bookworm\nname: x\npackages: [curl, jq, jq, systemd]\n", // order, repetition, what is there anyway
		"name: x\nsuite: bookworm\nmirror: host\nsize_gb: 20\ncomponents: [main]\npackages: [jq, curl]\n",
	} {
		if key(same) != base {
			t.Errorf("means the same, has another key:\n%s", same)
		}
	}
	for _, other := range []string{
		"name: x\nsuite: bookworm\npackages: [jq]\n",
		"name: x\nsuite: trixie\npackages: [jq, curl]\n",
		"name: x\nsuite: bookworm\npackages: [jq, curl]\nsize_gb: 21\n",
		"name: x\nsuite: bookworm\npackages: [jq, curl]\nagents: {node: 24.21.0}\n",
		"name: x\nsuite: bookworm\npackages: [jq, curl]\nrun: [a]\n",
		"name: x\nsuite: bookworm\npackages: [jq, curl]\nfiles: [{path: /a, content: b}]\n",
	} {
		if key(other) == base {
			t.Errorf("means something else, has the same key:\n%s", other)
		}
	}
	const ordered = "name: x\nsuite: bookworm\n"
	if key(ordered+"run: [a, b]\n") == key(ordered+"run: [b, a]\n") {
		t.Error("the order of steps does not count")
	}
	if key(ordered+"files: [{path: /a, content: b}]\n") != key(ordered+"files: [{path: /a, content: b, mode: 0644, owner: root}]\n") {
		t.Error("a default that is written out makes another key")
	}
}

func FuzzParseRecipe(f *testing.F) {
	for _, name := range ShippedNames() {
		text, _ := images.Recipes.ReadFile(name + ".yaml")
		f.Add(string(text))
	}
	f.Add("name: x\nsuite: bookworm\n" + everything[strings.Index(everything, "packages:"):])
	f.Fuzz(func(t *testing.T, text string) {
		r, err := ParseRecipe([]byte(text))
		if err != nil {
			return
		}
		words := slices.Concat(r.Packages, r.npmSpecs(), r.pipSpecs(), r.commands())
		for _, f := range r.Files {
			words = append(words, f.Path, f.Mode, f.Owner)
		}
		for _, a := range r.Apt {
			src := a.source(r.Suite)
			words = append(append(words, a.Name, src.uri, src.suite), a.Components...)
		}
		for _, p := range words {
			if strings.HasPrefix(p, "-") || strings.ContainsAny(p, " ,;\n'\"$") {
				t.Errorf("%q would be more than one word of a command", p)
			}
		}
	})
}

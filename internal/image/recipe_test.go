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
	if !slices.IsSorted(base.Packages) || !slices.Contains(base.Packages, "systemd") {
		t.Errorf("packages are not completed: %v", base.Packages)
	}
}

// Ubuntu is two lines away.
func TestUbuntuByTwoLines(t *testing.T) {
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
	for _, tc := range []struct {
		name, text, field, say string
		code                   agentlab.Code
	}{
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
	} {
		if key(other) == base {
			t.Errorf("means something else, has the same key:\n%s", other)
		}
	}
}

func FuzzParseRecipe(f *testing.F) {
	for _, name := range ShippedNames() {
		text, _ := images.Recipes.ReadFile(name + ".yaml")
		f.Add(string(text))
	}
	f.Fuzz(func(t *testing.T, text string) {
		r, err := ParseRecipe([]byte(text))
		if err != nil {
			return
		}
		for _, p := range append(slices.Clone(r.Packages), r.npmSpecs()...) {
			if strings.HasPrefix(p, "-") || strings.ContainsAny(p, " ,;\n'\"$") {
				t.Errorf("%q would be more than one word of a command", p)
			}
		}
	})
}

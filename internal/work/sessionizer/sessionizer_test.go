package sessionizer

import (
	"encoding/json"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/work/worktest"
	"github.com/agentlab-vm/agentlab/profiles"
)

func TestSessionizerRepos(t *testing.T) {
	t.Parallel()
	got, err := parseRepos("# x\no/a\n  o/b\t~/src/b # mine\no/c https://example.com/c.git\n", "/home/u")
	want := []listedRepo{{"o/a", ""}, {"o/b", "/home/u/src/b"}, {"o/c", "https://example.com/c.git"}}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("got %v, %v", got, err)
	}
	for _, bad := range []string{"a", "a/b/c", "../x", "-o/r", "o/..", "o/r\nO/R", "o/r ext::sh", "o/r rel/path"} {
		if got, err := parseRepos(bad, "/home/u"); err == nil {
			t.Errorf("%q is accepted: %v", bad, got)
		}
	}
}

func TestSessionizerNames(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for _, name := range []string{"anthropics/claude-code", "a-b/c", "a/b-c", "_/_", strings.Repeat("x", 90) + "/" + strings.Repeat("y.", 40) + "y"} {
		got := listedRepo{name: name}.sessionName()
		if agentlab.ValidateSessionName(got) != nil || len(got) > 40 || seen[got] {
			t.Errorf("%s: %q", name, got)
		}
		seen[got] = true
	}
	if got := (listedRepo{name: "Anthropics/Claude-Code"}).sessionName(); !seen[got] || !strings.HasPrefix(got, "agent-anthropics-claude-code-") {
		t.Errorf("got %q", got)
	}
}

func TestSessionizerResources(t *testing.T) {
	t.Parallel()
	cfg, err := parseResources([]byte("defaults: {cpus: 2, memory: 512MiB}\noverrides:\n  o/r: {disk: 1TiB, network: profile}\n"))
	if err != nil || cfg.MaxConcurrent != 10 {
		t.Fatal(cfg, err)
	}
	if p, err := cfg.planFor("O/R"); err != nil || p != (vmPlan{2, 512, 1024, "interactive", false}) {
		t.Errorf("got %+v, %v", p, err)
	}
	if p, err := cfg.planFor("o/other"); err != nil || p != (vmPlan{2, 512, 50, "interactive", true}) {
		t.Errorf("got %+v, %v", p, err)
	}
	for _, bad := range []string{"cpu: 1", "defaults: {cpus: -1}", "defaults: {memory: 8}", "defaults: {disk: 1500MiB}", "overrides: {x: {cpus: 1}}", "max_concurrent: 0", "defaults: {network: open}"} {
		if _, err := parseResources([]byte(bad)); err == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
	if _, err := parseResources([]byte(examples[resourcesFile])); err != nil {
		t.Error(err)
	}
}

func TestSessionizerProfile(t *testing.T) {
	t.Parallel()
	base, err := profiles.FS.ReadFile("interactive.yaml")
	if err != nil {
		t.Fatal(err)
	}
	rules, err := parseAllowlist(examples[allowlistFile])
	if err != nil || len(rules) == 0 {
		t.Fatal(rules, err)
	}
	p := vmPlan{3, 1024, 20, "interactive", true}
	text, err := p.profileText("agent-x", string(base), rules)
	if err != nil {
		t.Fatal(err)
	}
	doc := map[string]any{}
	if err := yaml.Unmarshal([]byte(text), &doc); err != nil {
		t.Fatal(err)
	}
	network, _ := doc["network"].(map[string]any)
	if doc["name"] != "agent-x" || network["mode"] != "allowlist" || !strings.Contains(text, `"cores": 3`) || !strings.Contains(text, `"secrets_bundle": "default"`) {
		t.Error(text)
	}
	if !written(text) || written(text+"# mine\n") || written(string(base)) || written("") {
		t.Error("the profile's own text is not recognized, or another one is")
	}
	if _, err := p.profileText("agent-x", "network: {mode: \"off\"}", rules); err == nil {
		t.Error("an allow list opens the network of a profile that has none")
	}
	if _, err := parseAllowlist("# nothing\n"); err == nil {
		t.Error("an empty allow list is accepted")
	}
}

func TestSessionizerPlan(t *testing.T) {
	t.Parallel()
	lines := menu([]Entry{{Repo: "o/new"}, {Repo: "o/up", Running: true, Worktrees: []string{"fix/12"}}})
	if want := []string{"[RUNNING] o/up", "[RUNNING] o/up/fix/12", menuSeparator, "o/new"}; !slices.Equal(lines, want) {
		t.Errorf("got %q", lines)
	}
	for line, want := range map[string]string{"[RUNNING] o/up\n": "o/up", "[RUNNING] o/up/fix/12\n": "o/up/fix/12", menuSeparator + "\n": "", "o/new\n": "o/new"} {
		if got := chosenLine(line); got != want {
			t.Errorf("%q: got %q", line, got)
		}
	}
	windows := tmuxWindows([]string{"agentlab"}, "agent-x", "")
	cmds := tmuxCommands("agent-x", "/d", false, nil, windows)
	if len(cmds) != 5 || cmds[0][0] != "new-session" || cmds[1][0] != "new-window" {
		t.Errorf("got %q", cmds)
	}
	if odd := tmuxCommands("agent-x", "/d#(touch x)", false, nil, windows); !slices.Contains(odd[0], "/d##(touch x)") {
		t.Errorf("tmux would run a part of the directory's name: %q", odd[0])
	}
	cmds = tmuxCommands("agent-x", "/d", true, []string{"vim", "server", "git", "scratch"}, windows)
	if len(cmds) != 1 || !slices.Contains(cmds[0], "agent") || !slices.Contains(cmds[0], "attach") {
		t.Errorf("got %q", cmds)
	}
	cmds = tmuxCommands("agent-x", "/d", true, []string{"vim", "server", "agent", "git", "scratch"}, tmuxWindows([]string{"agentlab"}, "agent-x", "fix/12"))
	if len(cmds) != 1 || !slices.Contains(cmds[0], "worktree/fix/12") || !slices.Contains(cmds[0], "agent-x/fix/12") {
		t.Errorf("got %q", cmds)
	}
	for name, want := range map[string][2]string{"o/r": {"o/r", ""}, "o/r/fix/12": {"o/r", "fix/12"}, "o": {"o", ""}} {
		if repo, branch := splitWorktree(name); repo != want[0] || branch != want[1] {
			t.Errorf("%s: got %q, %q", name, repo, branch)
		}
	}
	// tmux expands the names of windows.
	seen := map[string]bool{}
	for _, branch := range []string{"#(id)", "#{pane_id}", "_(id)", "a.b", "a_b", "a:b", "x;"} {
		name := worktreeWindow(branch)
		if strings.ContainsAny(name, "#(){}.:;") || seen[name] {
			t.Errorf("%s: the window %q", branch, name)
		}
		seen[name] = true
	}
}

// The sessionizer shows running sessions that it has not started.
func TestSessionizerOtherSessions(t *testing.T) {
	e := otherSession(api.Session{Name: "app", Sandbox: "app", State: "READY"})
	if !e.Running || e.Repo != "app" || e.tmux() != "agent-session-app" {
		t.Errorf("%+v", e)
	}
}

// More VMs than max_concurrent are started only after a confirmation or with --yes.
func TestSessionizerConcurrent(t *testing.T) {
	running := 2
	c := worktest.HandlerClient(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		list := api.List[api.Sandbox]{Items: []api.Sandbox{{State: "STOPPED"}, {State: "DESTROYED"}}}
		for range running {
			list.Items = append(list.Items, api.Sandbox{State: "RUNNING"})
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(list)
	}))
	s := &Sessionizer{UI: worktest.UI{Out: io.Discard}, C: c, cfg: settings{MaxConcurrent: 3}}
	if err := s.checkConcurrent(t.Context()); err != nil {
		t.Errorf("fewer: %v", err)
	}
	running = 3
	if err := s.checkConcurrent(t.Context()); agentlab.CodeOf(err) != agentlab.CodeLimit || agentlab.HintOf(err) == "" {
		t.Errorf("one more, not confirmed: %v", err)
	}
	s.Options.Yes = true
	if err := s.checkConcurrent(t.Context()); err != nil {
		t.Errorf("one more, with --yes: %v", err)
	}
}

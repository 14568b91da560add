package devenv

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
)

func TestForwardPorts(t *testing.T) {
	var list []any
	if err := json.Unmarshal([]byte(`[3000, "db:5432", 0, 65536, 80.5, -1, 3000, null, 65535, {"a": "\u001b[2J"}, 1e300]`), &list); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if got := forwardPorts(list, &out); !slices.Equal(got, []uint16{3000, 65535}) {
		t.Errorf("%v", got)
	}
	if n := strings.Count(out.String(), "is not forwarded"); n != 8 || strings.Contains(out.String(), "\x1b") {
		t.Errorf("%d: %q", n, out.String())
	}
	list = nil
	for i := range 2 * maxPorts {
		list = append(list, float64(i+1))
	}
	if got := forwardPorts(list, &out); len(got) != maxPorts {
		t.Errorf("%d ports", len(got))
	}
}

func TestResult(t *testing.T) {
	const id = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
	good := `{"outcome":"success","containerId":"` + id + `","remoteUser":"dev","remoteWorkspaceFolder":"/workspaces/repo","mergedConfiguration":{"forwardPorts":[80]}}`
	res, ok := lastDocument("noise\n" + good + "\n")
	if !ok || !res.valid() || res.ID != id || len(res.Merged.ForwardPorts) != 1 {
		t.Errorf("%+v %v", res, ok)
	}
	for name, text := range map[string]string{
		"nothing":       "",
		"no JSON":       "error",
		"failure":       strings.Replace(good, "success", "error", 1),
		"no container":  strings.Replace(good, id, "", 1),
		"option":        strings.Replace(good, id, "--privileged", 1),
		"user option":   strings.Replace(good, `"dev"`, `"-u0"`, 1),
		"no user":       strings.Replace(good, `"dev"`, `""`, 1),
		"control":       strings.Replace(good, `"dev"`, `"d\u0000v"`, 1),
		"relative path": strings.Replace(good, "/workspaces", "workspaces", 1),
		"long path":     strings.Replace(good, "/workspaces", "/"+strings.Repeat("a", maxWord), 1),
	} {
		if res, ok := lastDocument(text); ok && res.valid() {
			t.Errorf("%s: %+v", name, res)
		}
	}
}

func TestReadConfig(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		at := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(at), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(at, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if got := ConfigHash(dir); got != "" {
		t.Error(got)
	}
	write("elsewhere", "x")
	if err := os.Symlink("/etc/passwd", filepath.Join(dir, ".devcontainer.json")); err != nil {
		t.Fatal(err)
	}
	if name, text := readConfig(dir); name != "" {
		t.Errorf("a link out of the repository: %q %q", name, text)
	}
	write(".devcontainer/devcontainer.json", "{}")
	if name, text := readConfig(dir); name != configFiles[0] || string(text) != "{}" {
		t.Errorf("%q %q", name, text)
	}
	before := ConfigHash(dir)
	write(".devcontainer/devcontainer.json", "{ }")
	if ConfigHash(dir) == before {
		t.Error("another configuration has the same hash")
	}
	write(".devcontainer/devcontainer.json", strings.Repeat(" ", maxConfig+1))
	if name, _ := readConfig(dir); name != "" {
		t.Error("a large file is read")
	}
}

// What a request that needs no container does.
func TestUnusedContainer(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("PATH", t.TempDir()) // without Docker
	for mode, code := range map[string]agentlab.Code{"auto": "", "off": "", "on": agentlab.CodeNotFound} {
		c, notice, err := StartContainer(t.Context(), Request{Dir: dir, Mode: mode}, os.Stderr)
		if c != nil || notice != "" || agentlab.CodeOf(err) != code {
			t.Errorf("%s: %v %q %v", mode, c, notice, err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, ".devcontainer.json"), []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	if c, notice, err := StartContainer(t.Context(), Request{Dir: dir, Mode: "auto"}, os.Stderr); c != nil || err != nil || !strings.Contains(notice, "image dev") {
		t.Errorf("%v %q %v", c, notice, err)
	}
	if _, _, err := StartContainer(t.Context(), Request{Dir: dir, Mode: "on"}, os.Stderr); agentlab.CodeOf(err) != agentlab.CodeUnsupported || agentlab.HintOf(err) == "" {
		t.Error(err)
	}
	if _, notice, err := StartContainer(t.Context(), Request{Dir: dir, Mode: "auto", Refuse: "it has an inner sandbox"}, os.Stderr); err != nil || !strings.Contains(notice, "it has an inner sandbox") {
		t.Errorf("%q %v", notice, err)
	}
}

func TestEnviron(t *testing.T) {
	c := &Container{Env: []string{"PATH=/opt/venv/bin:/usr/bin", "HOME=/home/dev", "LANG=C", "FROM_CONFIG=yes"}}
	got := c.Environ([]string{"PATH=/usr/bin:/run/agentlab/bin:/run/agentlab/secrets/messages", "HOME=/home/agent", "API_KEY=k", "LANG=C.UTF-8", "TMUX=x", "PWD=/work"})
	slices.Sort(got)
	want := []string{
		"API_KEY=k", "FROM_CONFIG=yes", "HOME=/home/dev", "LANG=C.UTF-8",
		"PATH=/opt/venv/bin:/usr/bin:/run/agentlab/programs/bin:/run/agentlab/bin:/run/agentlab/secrets/messages",
	}
	if !slices.Equal(got, want) {
		t.Errorf("%q", got)
	}
}

func TestPath(t *testing.T) {
	c := &Container{Root: "/work/repo", Dir: "/workspaces/app"}
	for dir, want := range map[string]string{
		"/work/repo": "/workspaces/app", "/work/repo/.worktrees/x": "/workspaces/app/.worktrees/x", "/work": "/work", "/work/repository": "/work/repository", "/tmp": "/tmp",
	} {
		if got := c.Path(dir); got != want {
			t.Errorf("%s: %s", dir, got)
		}
	}
}

func TestLastLines(t *testing.T) {
	for text, want := range map[string]string{
		"":                                  "",
		"one\n\x1b[31mtwo\x1b[0m\n\n":       "one | [31mtwo [0m",
		strings.Repeat("x", 700) + "\nlast": "last",
		strings.Repeat("x", 700):            strings.Repeat("x", maxReason),
		"first\r\nsecond\r\n\xff\xfe":       "first | second | ?",
	} {
		if got := lastLines(text); got != want {
			t.Errorf("%.20q: %.80q, not %.80q", text, got, want)
		}
	}
}

package projectfile

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
)

func TestCheckOutputs(t *testing.T) {
	if err := CheckOutputs([]string{"dist/**", "*.log", "a..b/{c,d}", ".hidden", "./x"}); err != nil {
		t.Error(err)
	}
	for _, p := range []string{"", "/etc/passwd", "..", "a/../../b", "a\x00b", "[", "{a", strings.Repeat("a", maxPattern+1)} {
		if err := CheckOutputs([]string{"ok", p}); agentlab.CodeOf(err) != agentlab.CodeInvalid || agentlab.HintOf(err) == "" {
			t.Errorf("%.20q: %v", p, err)
		}
	}
	if err := CheckOutputs(slices.Repeat([]string{"a"}, MaxOutputs+1)); agentlab.CodeOf(err) != agentlab.CodeLimit {
		t.Error(err)
	}
}

func TestParse(t *testing.T) {
	for text, want := range map[string]File{
		"":                      {},
		"setup: [npm ci, make]": {Setup: Setup{Run: []string{"npm ci", "make"}}},
		"setup:\n  run: [npm ci]\n  inputs: ['tools/**']\n": {Setup: Setup{Run: []string{"npm ci"}, Inputs: []string{"tools/**"}}},
		"image: agents\noutputs: [a]\nnetwork: {deny: [x.example]}": {
			Image: "agents", Outputs: []string{"a"}, Network: &Network{Deny: []string{"x.example"}},
		},
	} {
		if got, err := Parse([]byte(text)); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%q: %+v %v", text, got, err)
		}
	}
	for text, want := range map[string]string{
		"image: ../x":                        `image: line 1: "../x" is not the name of an image`,
		"image: /var/lib/recipe.yaml":        "is not the name of an image",
		"image: [a]":                         "line 1",
		"\noutputs: [/etc]":                  `outputs: line 2: "/etc"`,
		"setup:\n  run: [x]\n  input: [y]\n": "line 3",
		"setup:\n  inputs: [../y]\n":         `setup.inputs: line 2: "../y"`,
		"setup: {run: x}":                    "line 1",
		"setup: x":                           "line 1",
		"setupp: [x]":                        "line 1",
		"setup: [' ']":                       "setup: line 1: command 1: ",
		"services: /x":                       `services: line 1: "/x" is not a file`,
		"setup: [\"a\\0\"]":                  "command 1",
		"setup: [" + strings.Repeat("x, ", MaxSetup+1) + "]":               "setup: line 1: 51 commands are more than 50",
		strings.Repeat("#", MaxBytes+1):                                    "bytes exceed the limit",
		fmt.Sprintf("setup: [%s]", strings.Repeat("x", MaxSetupCommand+1)): "command 1",
	} {
		if _, err := Parse([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.40q: %v", text, err)
		}
	}
}

func TestIsInput(t *testing.T) {
	s := Setup{Inputs: []string{"tools/**", "./x.conf"}, Run: []string{"cd scripts && ./boot.sh --with=db/seed.sql", "psql <'data.sql'"}}
	for name, want := range map[string]bool{
		".agentlab.yaml": true, "go.mod": true, "web/package-lock.json": true, "requirements-dev.txt": true, ".devcontainer/a/b": true,
		".devcontainer.json": true, "scripts/boot.sh": true, "db/seed.sql": true, "x/data.sql": true, "sh": false, "boot.sh.txt": false,
		"tools/a/b.sh": true, "x.conf": true,
		"main.go": false, "docs/README.md": false, "x/.agentlab.yaml": false, "y/x.conf": false,
	} {
		if got := s.IsInput(name); got != want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

func TestCheckServices(t *testing.T) {
	for _, name := range []string{"", "compose.yaml", "deploy/dev compose.yml", "./x.yaml", ".hidden/..x"} {
		if err := CheckServices(name); err != nil {
			t.Errorf("%q: %v", name, err)
		}
	}
	for _, name := range []string{"/etc/x.yaml", "../x.yaml", "a/../../x", "-f", "a\x00b", "a\nb", "\xff", strings.Repeat("a", maxServices+1)} {
		if err := CheckServices(name); agentlab.CodeOf(err) != agentlab.CodeInvalid || agentlab.HintOf(err) == "" {
			t.Errorf("%.20q: %v", name, err)
		}
	}
}

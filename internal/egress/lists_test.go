package egress_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
)

// seedList is the list of seed 003 §2, as far as it goes.
const seedList = "\ufeff# GitHub\ngithub.com\napi.github.com\nraw.githubusercontent.com\nobjects.githubusercontent.com\r\n\n# npm\n" +
	"  registry.npmjs.org\n\t\n# Docker Hub\nhub.docker.com # the site\nregistry-1.docker.io\t# the registry\n"

func TestParseList(t *testing.T) {
	t.Parallel()
	got, err := egress.ParseList([]byte(seedList))
	want := []string{
		"github.com", "api.github.com", "raw.githubusercontent.com", "objects.githubusercontent.com", "registry.npmjs.org",
		"hub.docker.com", "registry-1.docker.io",
	}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%q, %v; want %q", got, err, want)
	}
	for text, line := range map[string]string{
		"github.com\nhttps://x.example\n": "line 2: ", "a.example#b": "line 1: ", "preset:github": "line 1: ", "a.example b.example": "line 1: ",
	} {
		_, err := egress.ParseList([]byte(text))
		if agentlab.CodeOf(err) != agentlab.CodeInvalid || !strings.HasPrefix(err.Error(), line) || agentlab.HintOf(err) == "" {
			t.Errorf("%q: %v", text, err)
		}
	}
	if _, err := egress.ParseList(make([]byte, egress.MaxListBytes+1)); agentlab.CodeOf(err) != agentlab.CodeInvalid {
		t.Errorf("a list that is too large: %v", err)
	}
}

func TestPresets(t *testing.T) {
	t.Parallel()
	all, err := egress.Presets()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, p := range all {
		names = append(names, p.Name)
		if !strings.HasSuffix(p.About, ".") || len(p.Rules) == 0 {
			t.Errorf("preset %s: about %q, %d rules", p.Name, p.About, len(p.Rules))
		}
		sorted := slices.Clone(p.Rules)
		slices.Sort(sorted)
		if len(slices.Compact(sorted)) != len(p.Rules) {
			t.Errorf("preset %s holds a rule twice", p.Name)
		}
		if _, err := egress.New(agentlab.Network{Mode: agentlab.NetworkAllowlist, Allow: rulesOf(p.Rules...)}); err != nil {
			t.Errorf("preset %s: %v", p.Name, err)
		}
	}
	for _, want := range []string{"github", "npm", "pypi", "debian", "ubuntu", "anthropic", "openai", "google", "docker", "golang", "crates", "nodejs"} {
		if !slices.Contains(names, want) {
			t.Errorf("there is no preset %s", want)
		}
	}
	for _, name := range []string{"", "gitbub", "../embed", "github.txt"} {
		if _, err := egress.PresetByName(name); agentlab.CodeOf(err) != agentlab.CodeInvalid {
			t.Errorf("preset %q: %v", name, err)
		}
	}
}

func FuzzParseList(f *testing.F) {
	f.Add([]byte(seedList))
	f.Add([]byte("*.a.example:443/udp # x\n1.2.3.0/24\n#\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		rules, err := egress.ParseList(data)
		if err != nil {
			return
		}
		again, err := egress.ParseList([]byte(strings.Join(rules, "\n")))
		if err != nil || !slices.Equal(again, rules) {
			t.Fatalf("%q reads back as %q, %v", rules, again, err)
		}
	})
}

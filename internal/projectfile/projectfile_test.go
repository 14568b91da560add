package projectfile

import (
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

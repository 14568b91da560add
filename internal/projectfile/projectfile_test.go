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

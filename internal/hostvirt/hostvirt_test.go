package hostvirt

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
)

func TestNested(t *testing.T) {
	for _, c := range []struct {
		module, value string
		permitted     bool
	}{
		{"kvm_intel", "Y\n", true}, {"kvm_intel", "1\n", true}, {"kvm_amd", "1\n", true}, {"kvm", "N\n", true},
		{"kvm_intel", "N\n", false}, {"kvm_amd", "0\n", false}, {"", "", true},
	} {
		dir := t.TempDir()
		if c.module != "" {
			p := filepath.Join(dir, c.module, "parameters")
			if err := os.MkdirAll(p, 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(p, "nested"), []byte(c.value), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		err := Nested(dir)
		if (err == nil) != c.permitted {
			t.Errorf("%s nested=%q: %v", c.module, c.value, err)
		}
		if err != nil && (agentlab.CodeOf(err) != agentlab.CodeUnsupported || !strings.Contains(agentlab.HintOf(err), "options "+c.module+" nested=1")) {
			t.Errorf("%s: %v → %s", c.module, err, agentlab.HintOf(err))
		}
	}
}

package daemon

import (
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/image"
)

// On a machine that cannot build images the error, with the remedy, comes
// before anything is started.
func TestImagesThatCannotBeBuilt(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	s := builtImages{image.NewStore(t.TempDir(), image.Options{})}
	err := s.Check("base")
	if agentlab.CodeOf(err) != agentlab.CodeUnavailable || !strings.Contains(agentlab.HintOf(err), "apt-get install mmdebstrap") {
		t.Errorf("Check: %v, hint %q", err, agentlab.HintOf(err))
	}
	if err := s.Check("mine"); agentlab.CodeOf(err) != agentlab.CodeNotFound {
		t.Errorf("Check of an unknown image: %v", err)
	}
	found := s.findings(t.Context(), "base", "agents")
	if len(found) != 2 {
		t.Fatalf("%+v", found)
	}
	for i, want := range []backend.Finding{{Name: "image base", Level: backend.LevelError}, {Name: "image agents", Level: backend.LevelWarn}} {
		f := found[i]
		if f.Name != want.Name || f.Level != want.Level || !strings.Contains(f.Detail, "mmdebstrap") || !strings.Contains(f.Remedy, "apt-get install mmdebstrap") {
			t.Errorf("%+v", f)
		}
	}
	if all := s.findings(t.Context(), "base", "base"); len(all) != 1 {
		t.Errorf("one image is looked at twice: %+v", all)
	}
}

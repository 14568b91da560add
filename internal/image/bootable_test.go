package image

import (
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
)

// On a machine that cannot build images the error, with the remedy, comes
// before anything is started.
func TestImagesThatCannotBeBuilt(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	s := Bootable{NewStore(t.TempDir(), Options{})}
	err := s.Check("base")
	if agentlab.CodeOf(err) != agentlab.CodeUnavailable || !strings.Contains(agentlab.HintOf(err), "apt-get install mmdebstrap") {
		t.Errorf("Check: %v, hint %q", err, agentlab.HintOf(err))
	}
	if err := s.Check("mine"); agentlab.CodeOf(err) != agentlab.CodeNotFound {
		t.Errorf("Check of an unknown image: %v", err)
	}
}

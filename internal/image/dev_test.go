package image

import (
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/test/sample"
)

// The commands of the image dev have the versions of its recipe. A test of test/e2e with
// the same name boots it.
func TestDevImage(t *testing.T) {
	sample.Choose(t, 1, sample.ImageTests, t.Name())
	img := builtImage(t, "dev")
	for command, version := range map[string]string{"devcontainer": "0.89.0", "n": "10.2.0", "lazygit": "0.50.0", "docker-compose": "2.40.3", "claude": "2.1.197"} {
		if got := img.Versions[command]; !strings.Contains(got, version) {
			t.Errorf("%s has version %q, want %s", command, got, version)
		}
	}
}

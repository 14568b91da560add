package cli

import (
	"testing"

	"github.com/agentlab-vm/agentlab/api"
)

// With warnings sandboxes can be started, with one error they cannot.
func TestFindingsError(t *testing.T) {
	for want, levels := range map[int][]string{
		exitOK:      {levelWarn, levelOK, levelWarn},
		exitFailure: {levelWarn, levelError, levelOK},
	} {
		var all []api.Finding
		for _, l := range levels {
			all = append(all, api.Finding{Level: l})
		}
		if got := exitCode(findingsError(all)); got != want {
			t.Errorf("%q: exit code %d, want %d", levels, got, want)
		}
	}
}

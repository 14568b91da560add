package hostcmd

import (
	"testing"

	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/cli"
)

// With warnings sandboxes can be started, with one error they cannot.
func TestFindingsError(t *testing.T) {
	for want, levels := range map[int][]string{
		cli.ExitOK:      {levelWarn, levelOK, levelWarn},
		cli.ExitFailure: {levelWarn, levelError, levelOK},
	} {
		var all []api.Finding
		for _, l := range levels {
			all = append(all, api.Finding{Level: l})
		}
		if got := cli.ExitCode(findingsError(all)); got != want {
			t.Errorf("%q: exit code %d, want %d", levels, got, want)
		}
	}
}

package cli

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
)

// A command does not wait for a request that another one has replaced.
func TestReplacedRequest(t *testing.T) {
	const running, stopped, paused, onDisk, gone = "running", "stopped", "suspended", "suspended_to_disk", "destroyed"
	for _, c := range []struct {
		asked, now string
		replaced   bool
	}{
		{running, running, false}, {onDisk, running, true}, {paused, running, true}, {running, stopped, true},
		{paused, onDisk, false}, {onDisk, paused, false}, {running, gone, false},
	} {
		err := replaced(api.Sandbox{Desired: c.asked}, api.Sandbox{Name: "play", VMID: 7, State: "READY", Desired: c.now})
		if (err != nil) != c.replaced || err != nil && (agentlab.CodeOf(err) != agentlab.CodeConflict || agentlab.HintOf(err) == "") {
			t.Errorf("%s, then %s: %v", c.asked, c.now, err)
		}
	}
}

// The hint for a sandbox that has ended names only commands that can succeed.
func TestSandboxFailedHint(t *testing.T) {
	for state, logs := range map[agentlab.SandboxState]bool{agentlab.SandboxFailed: true, agentlab.SandboxTimeout: true, agentlab.SandboxDestroyed: false} {
		err := sandboxFailed(api.Sandbox{Name: "play", VMID: 7, State: string(state)})
		if strings.HasSuffix(err.Error(), ": ") || strings.Contains(agentlab.HintOf(err), "logs") != logs {
			t.Errorf("%s: %q, hint %q", state, err, agentlab.HintOf(err))
		}
	}
}

// A wait without events prints that it continues.
func TestWhenQuiet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		source := func(yield func(int, error) bool) {
			for i := range 3 {
				time.Sleep(time.Duration(i) * 25 * time.Second)
				if !yield(i, nil) {
					return
				}
			}
		}
		var got []string
		for i, err := range whenQuiet(source, 20*time.Second, func() { got = append(got, "quiet") }) {
			got = append(got, fmt.Sprint(i, err))
		}
		if want := []string{"0 <nil>", "quiet", "1 <nil>", "quiet", "quiet", "2 <nil>"}; !slices.Equal(got, want) {
			t.Errorf("%q, want %q", got, want)
		}
		for range whenQuiet(source, time.Hour, func() {}) {
			break
		}
		time.Sleep(time.Minute) // the source ends, too: synctest checks it
	})
}

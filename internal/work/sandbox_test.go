package work_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/worktest"
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
		err := work.Replaced(api.Sandbox{Desired: c.asked}, api.Sandbox{Name: "play", VMID: 7, State: "READY", Desired: c.now})
		if (err != nil) != c.replaced || err != nil && (agentlab.CodeOf(err) != agentlab.CodeConflict || agentlab.HintOf(err) == "") {
			t.Errorf("%s, then %s: %v", c.asked, c.now, err)
		}
	}
}

// The hint for a sandbox that has ended names only commands that can succeed.
func TestSandboxFailedHint(t *testing.T) {
	for state, logs := range map[agentlab.SandboxState]bool{agentlab.SandboxFailed: true, agentlab.SandboxTimeout: true, agentlab.SandboxDestroyed: false} {
		err := work.SandboxFailed(api.Sandbox{Name: "play", VMID: 7, State: string(state)})
		if strings.HasSuffix(err.Error(), ": ") || strings.Contains(agentlab.HintOf(err), "logs") != logs {
			t.Errorf("%s: %q, hint %q", state, err, agentlab.HintOf(err))
		}
	}
}

// A wait names what it waits for.
func TestStillWaiting(t *testing.T) {
	for _, c := range []struct {
		event   api.Event
		want    string
		routine bool
	}{
		{api.Event{Kind: agentlab.EventImageBuild, Message: "extracting archives...", Data: map[string]any{"image": "agents"}}, "image agents is built, once: extracting archives...", false},
		{api.Event{Kind: agentlab.EventSandboxState, Message: "sandbox app is BOOTING", Data: map[string]any{"to": "BOOTING"}}, "sandbox app is BOOTING", true},
		{api.Event{Kind: agentlab.EventSandboxState, Message: "no room\x1b[2J", Data: map[string]any{"refused": true}}, "no room [2J", false},
		{api.Event{Kind: agentlab.EventSandboxNested, Message: "virtual machines can run in sandbox app"}, "virtual machines can run in sandbox app", true},
		{api.Event{Kind: agentlab.EventSandboxCreated, Message: "sandbox app requested with profile interactive"}, "sandbox app requested with profile interactive", false},
	} {
		if got := work.LastOf(c.event); got != c.want {
			t.Errorf("%q, want %q", got, c.want)
		}
		var out strings.Builder
		work.Brief(worktest.UI{Out: &out}).ShowEvent(c.event)
		if (out.Len() == 0) != c.routine {
			t.Errorf("printed %q", out.String())
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
		for i, err := range work.WhenQuiet(source, 20*time.Second, func() { got = append(got, "quiet") }) {
			got = append(got, fmt.Sprint(i, err))
		}
		if want := []string{"0 <nil>", "quiet", "1 <nil>", "quiet", "quiet", "2 <nil>"}; !slices.Equal(got, want) {
			t.Errorf("%q, want %q", got, want)
		}
		for range work.WhenQuiet(source, time.Hour, func() {}) {
			break
		}
		time.Sleep(time.Minute) // the source ends, too: synctest checks it
	})
}

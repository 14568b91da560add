//go:build linux

package hostnet

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/test/netlab"
)

// The way to another node breaks: what its sandboxes may do they still may,
// and when the way is there again everything is as it was.
func TestConnectionBreaks(t *testing.T) {
	if !netlab.Inside(t) {
		return
	}
	w := newWorld(t)
	w.bridge()
	ctx := t.Context()
	r := w.remote()
	if err := r.Put(ctx, Guest{}); agentlab.CodeOf(err) != agentlab.CodeUnavailable {
		t.Errorf("before Restore: %v", err)
	}
	a, gone := w.box(2, all).static(), w.box(3, all).static()
	must(t, r.Restore(ctx, []Guest{gone.Guest}))
	must(t, r.Put(ctx, a.Guest))
	w.greeter(r, a, "alpha")
	must(t, r.Ready(ctx))
	if got := a.greeting(8844); got != "alpha\n" {
		t.Fatalf("the guest hears %q", got)
	}
	must(t, r.Drop(ctx, gone.ID))
	conn, err := a.dial(site)
	must(t, err)
	defer conn.Close()

	out, err := exec.Command("pgrep", "-P", fmt.Sprint(os.Getpid())).Output()
	must(t, err)
	killed := 0
	for pid := range strings.FieldsSeq(string(out)) {
		env, _ := exec.Command("cat", "/proc/"+pid+"/environ").Output()
		if strings.Contains(string(env), envAgent+"=") {
			must(t, exec.Command("kill", "-9", pid).Run())
			killed++
		}
	}
	if killed != 1 {
		t.Fatalf("%d agents were killed", killed)
	}
	if !a.reaches(site) {
		t.Error("without an agent an address is not reached any more")
	}
	for r.Ready(ctx) != nil { // each call makes the way again if there is none
	}
	if !answers(conn) || !gone.shut(site) {
		t.Error("the agent that came after let in others than before")
	}
	if got := a.greeting(8844); got != "alpha\n" {
		t.Errorf("with another agent the guest hears %q", got)
	}
	bad := a.Guest
	bad.IPv4 = gone.IPv4.Next().Next()
	bad.Port = "no port at all!"
	if err := r.Put(ctx, bad); agentlab.CodeOf(err) != agentlab.CodeInvalid || !a.shut(site) {
		t.Errorf("a guest that is none: %v", err)
	}
}

// An agent that cannot be run is unavailable, with what to try.
func TestNoAgent(t *testing.T) {
	r := NewRemote(RemoteConfig{Network: testNetwork, Command: []string{"/nowhere/ssh", "root@pve2"}})
	defer r.Close()
	if err := r.Ready(t.Context()); agentlab.CodeOf(err) != agentlab.CodeUnavailable || !strings.Contains(agentlab.HintOf(err), "root@pve2") {
		t.Errorf("%v, hint %q", err, agentlab.HintOf(err))
	}
	r = NewRemote(RemoteConfig{Network: testNetwork, Command: []string{"false"}})
	defer r.Close()
	if err := r.Ready(t.Context()); err == nil {
		t.Error("an agent that ends at once is ready")
	}
}

// An agent that leaves a program behind which holds its streams, as ssh does
// for those who share one connection, does not hold up the end.
func TestAgentLeavesProcessBehind(t *testing.T) {
	r := NewRemote(RemoteConfig{Network: testNetwork, Command: []string{"sh", "-c", "setsid sleep 3600 <&- >&- & exit 1"}})
	if err := r.Ready(t.Context()); agentlab.CodeOf(err) == "" {
		t.Error("an agent that ends at once is ready")
	}
	must(t, r.Close())
}

package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/test/netlab"
	"github.com/agentlab-vm/agentlab/test/pvenode"
	"github.com/agentlab-vm/agentlab/test/sample"
)

// A daemon that is killed at any call that it makes to Proxmox VE, for a
// sandbox that is made or destroyed, with the call lost or executed, completes
// its work after a restart: nothing foreign is touched, and none of our VMs
// and disks is left. (What is killed between calls, package proxmox tests.)
func TestProxmoxKilledDaemonShell(t *testing.T) {
	t.Parallel()
	testKilledDaemon(t, "shell")
}

// The same over REST.
func TestProxmoxKilledDaemonREST(t *testing.T) {
	t.Parallel()
	testKilledDaemon(t, "rest")
}

// killedCalls is how many calls of the node a run that is not full kills the
// daemon at.
const killedCalls = 2

func testKilledDaemon(t *testing.T, transport string) {
	if !insideLightPVE(t) {
		return
	}
	p := newLightPVELab(t, transport, pvenode.Config{})
	p.plainProfile()
	p.ok("host", "network", "apply")
	p.node.AddForeignVM(t, 1003, "theirs", true, nil)
	foreign := p.config(t, 1003)

	making := p.callsOf(func() { p.ok("sandbox", "new", "--profile", "plain", "--name", "first") })
	ending := p.callsOf(func() { p.ok("sandbox", "destroy", "first") })
	t.Logf("%d calls to make a sandbox, %d to destroy it", making, ending)
	calls := make([]int, max(making, ending))
	for k := range calls {
		calls[k] = k
	}
	for _, k := range sample.Of(t, killedCalls, calls) {
		name := fmt.Sprintf("k%d", k+1)
		p.killAtCall(t, k+1, k%2 == 0, "sandbox", "new", "--profile", "plain", "--name", name, "--no-wait")
		if p.state(name) == "" { // it was killed before it had written down what was asked
			p.ok("sandbox", "new", "--profile", "plain", "--name", name, "--no-wait")
		}
		var state string
		eventually(commandLimit, func() bool { state = p.state(name); return state == "READY" || state == "FAILED" })
		if state != "READY" {
			t.Fatalf("killed at call %d of making: %s", k+1, p.ok("sandbox", "show", name))
		}
		if k < ending {
			p.killAtCall(t, k+1, k%2 == 0, "sandbox", "destroy", name, "--no-wait")
		} else {
			p.ok("sandbox", "destroy", name, "--no-wait")
		}
		if !eventually(commandLimit, func() bool { return p.state(name) == "" }) {
			t.Fatalf("killed at call %d of the end: %s", k+1, p.ok("sandbox", "list", "--all"))
		}
		if now := p.config(t, 1003); now != foreign {
			t.Fatalf("killed at call %d: VM 1003 was %s and is %s", k+1, foreign, now)
		}
	}
	p.leave(1003)
	p.clean()
}

// insideLightPVE is insidePVE for tests without machines.
func insideLightPVE(t *testing.T) bool {
	t.Helper()
	sample.Long(t, "it runs a real daemon")
	for _, p := range []string{"nft", "ip"} {
		if _, err := exec.LookPath(p); err != nil {
			t.Skipf("%v: scripts/deps.sh installs it", err)
		}
	}
	if _, err := programs(); err != nil {
		t.Fatal(err)
	}
	return netlab.Inside(t)
}

// plainProfile writes a profile without secrets, with more lines.
func (p *pveLab) plainProfile(more ...string) {
	p.Helper()
	dir := filepath.Join(p.home, "config", "profiles")
	err := os.MkdirAll(dir, 0o700)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "plain.yaml"), []byte("name: plain\nresources: {cores: 1, memory_mb: 512}\n"+strings.Join(more, "")), 0o600)
	}
	if err != nil {
		p.Fatal(err)
	}
}

// config is the configuration of a VM as the node has it, and whether it runs.
func (p *pveLab) config(t testing.TB, vmid int) string {
	t.Helper()
	path := fmt.Sprintf("/nodes/%s/qemu/%d/", p.name, vmid)
	status, _ := p.call(t, "GET", path+"status/current").(map[string]any)
	text, err := json.Marshal([]any{p.call(t, "GET", path+"config"), status["status"]})
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// callsOf counts the calls that the node gets while do runs.
func (p *pveLab) callsOf(do func()) int {
	p.node.ResetCalls()
	do()
	return p.node.TotalCalls()
}

// killAtCall kills the daemon when the node gets its kth call after a command;
// the call is lost, or executed without a reader of the result. With fewer
// calls it is not killed.
func (p *pveLab) killAtCall(t *testing.T, k int, lost bool, args ...string) {
	t.Helper()
	reached := make(chan struct{})
	skip := func() {}
	if k > 1 {
		skip = p.node.Fail("*", pvenode.Fault{Times: k - 1})
	}
	kill := p.node.Fail("*", pvenode.Fault{Lost: lost, Reached: func() {
		for _, pid := range p.processes("agentlabd", "run") {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
		close(reached)
	}})
	p.run("", args...) // its daemon may be gone before it has answered
	select {
	case <-reached:
	case <-time.After(time.Minute): // a daemon that is slower is not killed
		t.Logf("%v: there was no call %d", args, k)
	}
	skip()
	kill()
	if !eventually(settleLimit, func() bool { return p.run("", "sandbox", "list").code == 0 }) {
		t.Fatal("no daemon runs again")
	}
}

// state returns the state of a sandbox that is not destroyed; "" if there is
// none or the daemon does not answer.
func (p *pveLab) state(name string) string {
	p.Helper()
	r := p.run("", "--json", "sandbox", "show", name)
	var sb api.Sandbox
	if r.code != 0 || json.Unmarshal([]byte(r.stdout), &sb) != nil || sb.State == "DESTROYED" {
		if r.code != 0 && !strings.Contains(r.stderr, "no sandbox") {
			return "unknown"
		}
		return ""
	}
	return sb.State
}

// leave takes a foreign VM away, so that clean finds nothing.
func (p *pveLab) leave(vmid int) {
	p.Helper()
	path := fmt.Sprintf("/nodes/%s/qemu/%d", p.name, vmid)
	p.call(p, "POST", path+"/status/stop")
	p.call(p, "DELETE", path)
}

package e2e

import (
	"context"
	"encoding/json"
	"strconv"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
)

// waiting returns the sandboxes of the warm pool, when as many wait as are
// configured.
func (l *lab) waiting() (out []api.Sandbox) {
	l.Helper()
	var s api.Status
	if !eventually(commandLimit, func() bool {
		s = api.Status{}
		return json.Unmarshal([]byte(l.status()), &s) == nil && len(s.WarmPool) == 1 && s.WarmPool[0].Ready == s.WarmPool[0].Count
	}) {
		l.Fatalf("the warm pool is not filled: %+v", s)
	}
	list, err := l.client().Sandboxes(context.Background(), client.SandboxQuery{State: "POOLED"})
	if err != nil {
		l.Fatal(err)
	}
	return list.Items
}

// A sandbox of the warm pool is handed out with the policy and the identity of its
// request, and replaced. Nothing of the pool survives its daemon.
func TestWarmPool(t *testing.T) {
	t.Parallel()
	l, n := newNetLab(t)
	n.Web("web.example.com")
	n.Web("other.example.com")
	l.networkProfile("mine", allowOnly("web.example.com"))
	l.config("warm_pool: {base/mine: 1}\n")
	show := func(name string) (sb api.Sandbox) {
		t.Helper()
		if err := json.Unmarshal([]byte(l.ok("--json", "sandbox", "show", name)), &sb); err != nil {
			t.Fatal(err)
		}
		return sb
	}
	const identity = "hostname; cat /etc/machine-id /proc/sys/kernel/random/boot_id; head -c 16 /dev/urandom | od -An -tx1; date -u +%Y"
	var ids []string
	for i, name := range []string{"box", "second"} {
		p := l.waiting()[0]
		if out := l.ok("sandbox", "list"); strings.Contains(out, p.Name) {
			t.Errorf("the list has a sandbox of the pool: %s", out)
		}
		if r := l.run("", "exec", strconv.Itoa(p.VMID), "true"); r.code == 0 || !strings.Contains(r.stderr, "warm pool") {
			t.Errorf("exec in the pool: %v", r)
		}
		l.ok("sandbox", "new", "--name", name, "--profile", "mine")
		if sb := show(name); sb.VMID != p.VMID || sb.UID != p.UID || sb.Start != "pool" || sb.Profile != "mine" || sb.State != "READY" {
			t.Errorf("%d is not from the pool (%d): %+v", i, p.VMID, sb)
		}
		id := strings.Fields(l.ok("exec", name, "--", "sh", "-c", identity))
		if id[0] != name {
			t.Errorf("its host name is %s", id[0])
		}
		ids = append(ids, strings.Join(id[:3], " "), strings.Join(id[3:19], " "))
	}
	seen := map[string]bool{}
	for _, part := range strings.Fields(strings.ReplaceAll(ids[0]+" "+ids[2], "box", "")) {
		if seen[part] {
			t.Errorf("both have %s", part)
		}
		seen[part] = true
	}
	if ids[1] == ids[3] {
		t.Errorf("both have the random bytes %s", ids[1])
	}
	wantWeb(l, "http://web.example.com/hello", true)
	wantWeb(l, "http://other.example.com/hello", false)

	l.ok("sandbox", "stop", "second") // its VM was created with another name
	l.ok("sandbox", "start", "second")
	if got := strings.TrimSpace(l.ok("exec", "second", "hostname")); got != "second" {
		t.Errorf("after another start its host name is %s", got)
	}
	p := l.waiting()[0]
	l.killDaemon()
	if after := l.waiting()[0]; after.UID == p.UID { // the command has started a daemon
		t.Error("a sandbox of an earlier daemon waits")
	}
	if l.ok("exec", "box", "hostname"); show("box").Start != "pool" {
		t.Error("a sandbox that was handed out is lost")
	}
	l.ok("daemon", "stop")
	l.config("")
	l.ok("sandbox", "destroy", "box", "second")
	l.noSandboxes()
	if !eventually(settleLimit, func() bool { return len(l.processes("qemu-system")) == 0 }) {
		t.Error("a VM of the pool is left")
	}
}

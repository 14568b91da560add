package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/test/sample"
)

// snapshotKill is a command during which the daemon is killed, and when.
type snapshotKill struct {
	command string
	after   time.Duration // the command takes about a second
}

// The daemon is killed while a sandbox is saved, restored or forked. The next one
// completes what was requested, or nothing of it is left; the source runs.
func TestKillDuringSnapshots(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	l.ok("sandbox", "new", "--name", "original", "--ttl", "2h")
	l.ok("exec", "original", "--", "sh", "-c", "echo memory >/dev/shm/kept; echo disk >~/kept; sync")
	l.ok("sandbox", "snapshot", "save", "original", "--name", "clean")
	var cases []snapshotKill
	for _, command := range []string{"snapshot save original --name new", "snapshot restore original --name clean --yes", "fork original --count 2 --name-prefix fork"} {
		for _, ms := range []int{60, 120, 200, 320, 500, 800} {
			cases = append(cases, snapshotKill{command, time.Duration(ms) * time.Millisecond})
		}
	}
	for _, c := range sample.Cover(t, cases, func(c snapshotKill) []string { return []string{c.command} }) {
		t.Run(fmt.Sprintf("%s after %s", c.command, c.after), func(t *testing.T) {
			ended := make(chan result, 1)
			go func() { ended <- l.run("", append([]string{"sandbox"}, strings.Fields(c.command)...)...) }()
			time.Sleep(c.after)
			if err := l.kill9("agentlabd", "run"); err != nil {
				t.Fatal(err)
			}
			l.ok("daemon", "start")
			t.Log(<-ended)
			l.settledSnapshots(t)
		})
	}
}

// settledSnapshots waits until nothing is in progress, checks every sandbox, and
// removes all but the original and its snapshot.
func (l *lab) settledSnapshots(t *testing.T) {
	t.Helper()
	var boxes api.List[api.Sandbox]
	var saved api.List[api.Snapshot]
	list := func(v any, args ...string) bool {
		return json.Unmarshal([]byte(l.ok(append([]string{"--json", "sandbox"}, args...)...)), v) == nil
	}
	files := func(dir string) int {
		entries, _ := os.ReadDir(filepath.Join(l.home, "state", dir))
		return len(entries)
	}
	if !eventually(settleLimit, func() bool {
		ready := list(&boxes, "list") && list(&saved, "snapshot", "list") && files("snapshots") == len(saved.Items)
		for _, sb := range boxes.Items {
			ready = ready && sb.State == string(agentlab.SandboxReady)
		}
		for _, n := range saved.Items {
			ready = ready && n.State == string(agentlab.SnapshotReady)
		}
		return ready
	}) {
		t.Fatalf("sandboxes %+v, snapshots %+v, %d of them on disk", boxes.Items, saved.Items, files("snapshots"))
	}
	if n := len(boxes.Items); n != 1 && n != 3 {
		t.Errorf("a part of a fork exists: %+v", boxes.Items)
	}
	for _, sb := range boxes.Items {
		var out result
		if !eventually(settleLimit, func() bool { // it may not have begun to be restored
			out = l.run("", "exec", sb.Name, "--", "sh", "-c", "cat /dev/shm/kept ~/kept; hostname")
			return out.stdout == "memory\ndisk\n"+sb.Name+"\n"
		}) {
			t.Errorf("%s: %v", sb.Name, out)
		}
		if sb.Name != "original" {
			l.ok("sandbox", "destroy", "--force", sb.Name)
		}
	}
	for _, n := range saved.Items {
		if n.Name != "clean" {
			l.ok("sandbox", "snapshot", "delete", "original", "--name", n.Name, "--yes")
		}
	}
	if !eventually(settleLimit, func() bool {
		return files("snapshots") == 1 && files("sandboxes") == 1 && len(l.processes("qemu-system")) == 1 && len(l.processes("agentlabd", "vmm")) == 1
	}) {
		t.Errorf("left: %d snapshots, %d sandboxes, QEMU %v, supervisors %v",
			files("snapshots"), files("sandboxes"), l.processes("qemu-system"), l.processes("agentlabd", "vmm"))
	}
}

package pvenode

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"
)

func begin(t *testing.T, cfg Config) (*Node, *rest) {
	t.Helper()
	n := New(t, cfg)
	n.AddTemplate(t, Template{})
	return n, newRest(t, n)
}

const cloneCall = "/nodes/pve/qemu/9000/clone"

// A clone that fails leaves nothing; one whose worker is killed leaves what
// it had made, and a lock that REST cannot take away.
func TestCloneFailsOrIsKilled(t *testing.T) {
	for _, point := range []string{"qmclone", "clone.stub", "clone.volume", "clone.config", "clone.volumes", "alloc"} {
		t.Run(point, func(t *testing.T) {
			n, r := begin(t, Config{})
			n.Fail(point, Fault{Error: "boom"})
			want := "clone failed: boom"
			if point == "qmclone" {
				want = "boom"
			}
			if got := r.task("POST", cloneCall, "newid", "101"); got != want {
				t.Fatalf("status %q", got)
			}
			if n.Config(101) != nil || len(n.Volumes(101)) != 0 {
				t.Fatalf("left: %v %v", n.Config(101), n.Volumes(101))
			}
			n.Fail(point, Fault{Kill: true})
			if got := r.task("POST", cloneCall, "newid", "101", "description", "ours"); got != "unexpected status" {
				t.Fatalf("status %q", got)
			}
			conf := n.Config(101)
			switch point {
			case "qmclone":
				if conf != nil {
					t.Fatalf("config %v", conf)
				}
			case "clone.stub", "clone.volume", "alloc":
				if fmt.Sprint(conf) != "map[description: qmclone temporary file lock:clone]" {
					t.Fatalf("stub %v", conf)
				}
			default:
				if conf["lock"] != "clone" || conf["description"] != "ours" || conf["ide2"] == "" {
					t.Fatalf("config %v", conf)
				}
			}
			if conf != nil {
				if got := r.task("DELETE", "/nodes/pve/qemu/101"); got != "VM is locked (clone)" {
					t.Fatalf("destroy: %q", got)
				}
			}
			if got := r.task("POST", cloneCall, "newid", "102"); got != "OK" {
				t.Fatalf("the locks are held: %q", got)
			}
		})
	}
}

func TestRestartOfTheNode(t *testing.T) {
	n, r := begin(t, Config{})
	if got := r.task("POST", cloneCall, "newid", "101"); got != "OK" {
		t.Fatal(got)
	}
	if got := r.task("POST", "/nodes/pve/qemu/101/status/start"); got != "OK" {
		t.Fatal(got)
	}
	reached := make(chan struct{})
	n.Fail("clone.volumes", Fault{Hold: make(chan struct{}), Reached: func() { close(reached) }})
	_, out := r.call("POST", cloneCall, "newid", "102")
	<-reached
	n.Restart()
	if got := r.wait(out["data"].(string)); got != "unexpected status" {
		t.Fatal(got)
	}
	if n.Running(101) || n.Config(102)["lock"] != "clone" || len(n.Volumes(102)) != 2 {
		t.Fatalf("%v %v %v", n.Running(101), n.Config(102), n.Volumes(102))
	}
	if got := r.task("POST", "/nodes/pve/qemu/101/status/start"); got != "OK" {
		t.Fatal(got)
	}
}

func TestFullStorage(t *testing.T) {
	n, r := begin(t, Config{})
	n.Fill("local-zfs", true)
	if got := r.task("POST", cloneCall, "newid", "101"); !strings.Contains(got, "out of space") || !strings.HasPrefix(got, "clone failed: ") {
		t.Fatal(got)
	}
	if len(n.VMs()) != 1 {
		t.Fatal(n.VMs())
	}
}

// What cannot be freed does not fail a destroy: version 8 says OK.
func TestDestroyLeavesABusyVolume(t *testing.T) {
	for version, want := range map[string]string{"8.4": "OK", "9.2": "WARNINGS: 1"} {
		n, r := begin(t, Config{Version: version, Waits: Waits{Second: time.Millisecond}})
		if got := r.task("POST", cloneCall, "newid", "101"); got != "OK" {
			t.Fatal(got)
		}
		disk := "local-zfs:base-9000-disk-0/vm-101-disk-0"
		n.Busy(disk, true)
		if got := r.task("DELETE", "/nodes/pve/qemu/101"); got != want {
			t.Fatal(got)
		}
		if left := n.Volumes(101); len(left) != 1 || left[0] != disk || n.Config(101) != nil {
			t.Fatalf("%v", left)
		}
	}
}

// Two clones to one number: one wins, the other's task fails and harms
// nothing.
func TestCloneRace(t *testing.T) {
	n, r := begin(t, Config{})
	both := make(chan struct{})
	var mu sync.Mutex
	arrived := 0
	n.Fail("qmclone", Fault{Hold: both, Times: 2, Reached: func() {
		mu.Lock()
		defer mu.Unlock()
		if arrived++; arrived == 2 {
			close(both)
		}
	}})
	_, a := r.call("POST", cloneCall, "newid", "300", "name", "a")
	_, b := r.call("POST", cloneCall, "newid", "300", "name", "b")
	got := []string{r.wait(a["data"].(string)), r.wait(b["data"].(string))}
	const lost = "unable to create VM 300: config file already exists"
	if got[0] != "OK" {
		got[0], got[1] = got[1], got[0]
	}
	if got[0] != "OK" || got[1] != lost {
		t.Fatal(got)
	}
	if len(n.Volumes(300)) != 2 {
		t.Fatal(n.Volumes(300))
	}
}

// Many clones of one stopped template wait for each other on the storage only;
// while another client holds the template's lock, they fail after a second.
func TestClonesInParallel(t *testing.T) {
	// The other locks are waited for much longer.
	n, r := begin(t, Config{Waits: Waits{ConfigLock: time.Hour, CreateLock: time.Hour, StorageLock: time.Hour}})
	var wg sync.WaitGroup
	for id := 201; id <= 220; id++ {
		wg.Add(1)
		go func() {
			defer wg.Done()
			_, out := r.call("POST", cloneCall, "newid", itoa(id))
			upid, _ := out["data"].(string)
			if got := r.wait(upid); got != "OK" {
				t.Errorf("%d: %v %s", id, out, got)
			}
		}()
	}
	wg.Wait()
	unlock := n.Lock(9000)
	defer unlock()
	began := time.Now()
	if got := r.task("POST", cloneCall, "newid", "221"); got != "can't lock file '/var/lock/qemu-server/lock-9000.conf' - got timeout" {
		t.Fatal(got)
	}
	if d := time.Since(began); d < time.Second {
		t.Fatalf("after %v", d)
	}
}

// A shutdown holds the config's lock as long as it waits; a stop meanwhile
// fails, unless it overrules.
func TestStopDuringShutdown(t *testing.T) {
	deaf := func(b Boot) Guest { return (&ScriptedGuest{Deaf: true, NoAgent: true}).Start(b) }
	n, r := begin(t, Config{Boot: BootWith(deaf), Waits: Waits{ConfigLock: 100 * time.Millisecond, Agent: time.Millisecond}})
	for _, call := range []string{cloneCall, "/nodes/pve/qemu/101/status/start"} {
		var p []string
		if call == cloneCall {
			p = []string{"newid", "101"}
		}
		if got := r.task("POST", call, p...); got != "OK" {
			t.Fatal(got)
		}
	}
	waits := make(chan struct{})
	n.Fail("shutdown.wait", Fault{Reached: func() { close(waits) }})
	_, out := r.call("POST", "/nodes/pve/qemu/101/status/shutdown", "timeout", "600")
	<-waits
	if got := r.task("POST", "/nodes/pve/qemu/101/status/stop"); !strings.HasSuffix(got, "lock-101.conf' - got timeout") {
		t.Fatal(got)
	}
	if got := r.task("POST", "/nodes/pve/qemu/101/status/stop", "overrule-shutdown", "1"); got != "OK" {
		t.Fatal(got)
	}
	if got := r.wait(out["data"].(string)); got != "received interrupt" || n.Running(101) {
		t.Fatal(got)
	}
}

func TestSuspendToDisk(t *testing.T) {
	n, r := begin(t, Config{})
	vm := "/nodes/pve/qemu/101/status/"
	if got := r.task("POST", cloneCall, "newid", "101") + r.task("POST", vm+"start"); got != "OKOK" {
		t.Fatal(got)
	}
	if got := r.task("POST", vm+"suspend", "todisk", "1"); got != "OK" || n.Running(101) || n.Config(101)["lock"] != "suspended" {
		t.Fatalf("%s %v", got, n.Config(101))
	}
	if got := r.task("POST", vm+"resume"); got != "OK" || !n.Running(101) || n.Config(101)["lock"] != "" {
		t.Fatalf("%s %v", got, n.Config(101))
	}
	n.Fail("suspend.state", Fault{Error: "no"})
	if got := r.task("POST", vm+"suspend", "todisk", "1"); got != "no" || n.Config(101)["lock"] != "suspending" {
		t.Fatalf("%s %v", got, n.Config(101))
	}
	if got := r.task("POST", vm+"stop"); got != "VM is locked (suspending)" {
		t.Fatal(got)
	}
}

func TestSeveralNodes(t *testing.T) {
	n := New(t, Config{Nodes: []string{"pve", "pve2"}, MemoryOf: map[string]int64{"pve2": 1 << 30}})
	n.AddTemplate(t, Template{})
	n.AddTemplate(t, Template{VMID: 9001, Node: "pve2"})
	r := newRest(t, n)
	if got := r.task("POST", "/nodes/pve2/qemu/9001/clone", "newid", "101"); got != "OK" {
		t.Fatal(got)
	}
	if status, _ := r.call("GET", "/nodes/pve/qemu/101/config"); !strings.HasPrefix(status, "500 Configuration file 'nodes/pve/qemu-server/101.conf' does not exist") {
		t.Fatal(status)
	}
	if status, _ := r.call("POST", cloneCall, "newid", "102", "target", "pve2"); !strings.Contains(status, "can't clone VM to node 'pve2' (VM uses local storage)") {
		t.Fatal(status)
	}
	n.SetOnline("pve2", false)
	if status, _ := r.call("GET", "/nodes/pve2/qemu/101/config"); !strings.HasPrefix(status, "595") {
		t.Fatal(status)
	}
}

// Version 9 checks before the fork without the lock file: only waiting for
// that file in vain is a task's error.
func TestConfigTaskOfBothVersions(t *testing.T) {
	for _, version := range []string{"8.4", "9.2"} {
		n, r := begin(t, Config{Version: version, Waits: Waits{ConfigLock: 50 * time.Millisecond}})
		const set = "/nodes/pve/qemu/9000/config"
		n.Edit(9000, map[string]string{"lock": "backup"})
		if status, _ := r.call("POST", set, "name", "x"); status != "500 VM is locked (backup)" {
			t.Fatal(status)
		}
		n.Edit(9000, map[string]string{"lock": ""})
		unlock := n.Lock(9000)
		const late = "can't lock file '/var/lock/qemu-server/lock-9000.conf' - got timeout"
		if version == "9.2" {
			if got := r.task("POST", set, "name", "x"); got != late {
				t.Fatal(got)
			}
		} else if status, _ := r.call("POST", set, "name", "x"); status != "500 "+late {
			t.Fatal(status)
		}
		unlock()
		if got := r.task("POST", set, "name", "x"); got != "OK" {
			t.Fatal(got)
		}
	}
}

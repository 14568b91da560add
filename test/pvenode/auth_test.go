package pvenode

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// as is a client with another token.
func (r *rest) as(header string) *rest {
	other := *r
	other.token = strings.TrimPrefix(header, "PVEAPIToken=")
	return &other
}

// A privilege-separated token that has nothing at first: each call names its
// next missing privilege, in the order of the real node.
func TestSmallestRole(t *testing.T) {
	for _, version := range []string{"8.4", "9.2"} {
		t.Run(version, func(t *testing.T) { growingToken(t, version) })
	}
}

func growingToken(t *testing.T, version string) {
	const who = "agentlab@pve"
	n, root := begin(t, Config{Version: version})
	n.AddPool("agentlab")
	r := root.as(n.AddUser(User{ID: who, Tokens: []Token{{ID: "ctl", Privsep: true}}})[0])
	grant := func(path, role string, privs ...string) func() {
		return func() {
			if err := n.AddRole(role, privs...); err != nil {
				t.Fatal(err)
			}
			n.Grant(path, who, role)
			n.Grant(path, who+"!ctl", role)
		}
	}
	agent := "VM.Monitor"
	if version == "9.2" {
		agent = "VM.GuestAgent.Audit"
	}
	clone := []string{"POST", cloneCall, "newid", "101", "pool", "agentlab"}
	vm := "/nodes/pve/qemu/101"
	for i, step := range []struct {
		call  []string
		want  string
		allow func()
	}{
		{[]string{"GET", "/version"}, "200", nil},
		{[]string{"GET", "/nodes/pve/qemu/9000/config"}, "403 Permission check failed (/vms/9000, VM.Audit)", nil},
		{clone, "403 Permission check failed (/vms/9000, VM.Clone)", func() {
			if err := n.AddRole("Tpl", "VM.Clone", "VM.Audit"); err != nil {
				t.Fatal(err)
			}
			n.Grant("/vms/9000", who, "Tpl")
		}},
		{clone, "403 Permission check failed (/vms/9000, VM.Clone)", func() { n.Grant("/vms/9000", who+"!ctl", "Tpl") }},
		{clone, "403 Permission check failed", grant("/pool/agentlab", "Lab", "VM.Allocate", "VM.Audit", "VM.PowerMgmt", "VM.Config.Options", "VM.Config.Network", agent)},
		{clone, "403 Permission check failed (/storage/local-zfs, Datastore.AllocateSpace)", grant("/storage/local-zfs", "Sto", "Datastore.AllocateSpace", "Datastore.Audit")},
		{clone, "403 Permission check failed (/sdn/zones/localnetwork/vmbr1, SDN.Use)", grant("/sdn/zones/localnetwork/vmbr1", "Net", "SDN.Use")},
		{clone, "task OK", nil},
		{[]string{"PUT", vm + "/config", "onboot", "0"}, "200", nil},
		{[]string{"PUT", vm + "/config", "cores", "2"}, "403 Permission check failed (/vms/101, VM.Config.CPU)", nil},
		{[]string{"PUT", vm + "/config", "affinity", "0"}, "500 only root can set 'affinity' config", nil},
		{[]string{"PUT", vm + "/config", "net0", "virtio,bridge=vmbr0"}, "403 Permission check failed (/sdn/zones/localnetwork/vmbr0, SDN.Use)", nil},
		{[]string{"PUT", vm + "/config", "skiplock", "1"}, "400", nil},
		{[]string{"POST", vm + "/status/start"}, "task OK", nil},
		{[]string{"POST", vm + "/agent/ping"}, "200", nil},
		{[]string{"GET", "/nodes/pve/status"}, "403 Permission check failed (/nodes/pve, Sys.Audit)", nil},
		{[]string{"POST", vm + "/status/stop"}, "task OK", nil},
		{[]string{"DELETE", vm, "purge", "1"}, "task OK", nil},
	} {
		got := ""
		if strings.HasPrefix(step.want, "task ") {
			got = "task " + r.task(step.call[0], step.call[1], step.call[2:]...)
		} else {
			got, _ = r.call(step.call[0], step.call[1], step.call[2:]...)
		}
		if got != step.want && (len(step.want) != 3 || !strings.HasPrefix(got, step.want)) {
			t.Fatalf("step %d, %v: %s, not %s", i, step.call, got, step.want)
		}
		if step.allow != nil {
			step.allow()
		}
	}
	if _, out := r.call("GET", "/nodes/pve/tasks", "limit", "2"); len(out["data"].([]any)) != 2 || out["total"] != 4.0 {
		t.Fatalf("own tasks: %v", out)
	}
}

// A privilege that the version does not have cannot be in a role.
func TestPrivilegesOfVersions(t *testing.T) {
	if err := New(t, Config{Version: "9.2"}).AddRole("x", "VM.Monitor"); err == nil {
		t.Fatal("VM.Monitor on 9")
	}
	if err := New(t, Config{}).AddRole("x", "VM.GuestAgent.Audit"); err == nil {
		t.Fatal("VM.GuestAgent.Audit on 8")
	}
}

func TestAgentCalls(t *testing.T) {
	n, r := begin(t, Config{Waits: Waits{Agent: time.Millisecond}})
	const agent = "/nodes/pve/qemu/101/agent"
	if got := r.task("POST", cloneCall, "newid", "101"); got != "OK" {
		t.Fatal(got)
	}
	for _, step := range []struct {
		do   func()
		call []string
		want string
	}{
		{nil, []string{"POST", agent + "/ping"}, "500 VM 101 is not running"},
		{func() { r.task("POST", "/nodes/pve/qemu/101/status/start") }, []string{"POST", agent + "/ping"}, "200 OK map[data:map[result:map[]]]"},
		{nil, []string{"POST", agent + "/file-write", "file", "/etc/x", "content", "h\u00e9"}, "200 OK map[data:<nil>]"},
		{nil, []string{"POST", agent + "/file-write", "file", "/etc/x", "content", "\u20ac"}, "500 Wide character"},
		{nil, []string{"GET", agent + "/file-read", "file", "/nosuch"}, "500 Agent error: failed to open file '/nosuch' (mode: 'r'): No such file or directory"},
		{nil, []string{"POST", agent + "/exec", "command", "/bin/echo hello"}, "596 Broken pipe"},
		{nil, []string{"POST", agent + "/exec", "command", "/bin/sh", "command", "-c", "command", "echo out; echo err >&2; exit 3"}, "200 OK map[data:map[pid:177]]"},
		{nil, []string{"GET", agent + "/exec-status", "pid", "177"}, "200 OK map[data:map[err-data:err\n err-truncated:0 exitcode:3 exited:1 out-data:out\n out-truncated:0]]"},
		{nil, []string{"GET", agent + "/exec-status", "pid", "177"}, "500 Agent error: Invalid parameter 'pid'"},
		{func() { n.Guest(101).(*ScriptedGuest).SetAgent(false) }, []string{"POST", agent + "/ping"}, "500 QEMU guest agent is not running"},
		{func() { n.Edit(101, map[string]string{"agent": ""}) }, []string{"POST", agent + "/ping"}, "500 No QEMU guest agent configured"},
	} {
		if step.do != nil {
			step.do()
		}
		status, out := r.call(step.call[0], step.call[1], step.call[2:]...)
		if got := fmt.Sprint(status, " ", out); !strings.HasPrefix(got, step.want) {
			t.Fatalf("%v: %s", step.call, got)
		}
	}
	g, _ := n.Guest(101).(*ScriptedGuest)
	if s, _ := g.File("/etc/x"); s != "h\xe9" {
		t.Fatalf("written %q", s)
	}
}

// /cluster/resources is as old as the last broadcast.
func TestResourcesAreStale(t *testing.T) {
	told := func(r *rest) string {
		_, out := r.call("GET", "/cluster/resources", "type", "vm")
		list, _ := out["data"].([]any)
		m, _ := list[0].(map[string]any)
		return fmt.Sprint(m["status"])
	}
	_, r := begin(t, Config{Waits: Waits{Second: time.Hour}})
	if got := told(r); got != "unknown" {
		t.Fatal(got)
	}
	_, r = begin(t, Config{Waits: Waits{Second: time.Millisecond}})
	r.until("a broadcast", func() bool { return told(r) == "stopped" })
}

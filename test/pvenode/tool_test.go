package pvenode_test

import (
	"bytes"
	"encoding/json"
	"net/http"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/agentlab-vm/agentlab/test/pvenode"
)

// cloneHeld starts pvesh clone and returns once the clone has its config and
// no volume yet.
func cloneHeld(r *replay) (cmd *exec.Cmd, release func()) {
	r.t.Helper()
	hold, reached := make(chan struct{}), make(chan struct{})
	r.n.Fail("clone.volume", pvenode.Fault{VMID: 103, Hold: hold, Reached: func() { close(reached) }})
	cmd = exec.Command(filepath.Join(r.n.Bin(), "pvesh"), "create", "/nodes/pve/qemu/9000/clone", "--newid", "103")
	if err := cmd.Start(); err != nil {
		r.t.Fatal(err)
	}
	<-reached
	return cmd, func() { close(hold) }
}

// lastTask waits for the end of the newest task of a type and returns its
// exit status.
func (r *replay) lastTask(typ string) string {
	r.t.Helper()
	a := r.call(http.MethodGet, "/nodes/pve/tasks", [][2]string{{"source", "all"}, {"typefilter", typ}, {"limit", "1"}})
	var l struct{ Data []struct{ UPID string } }
	if err := json.Unmarshal([]byte(a.body), &l); err != nil || len(l.Data) != 1 {
		r.t.Fatalf("tasks: %s %v", a.body, err)
	}
	var s struct{ Data struct{ ExitStatus string } }
	if err := json.Unmarshal([]byte(r.waitTask(l.Data[0].UPID)), &s); err != nil {
		r.t.Fatal(err)
	}
	return s.Data.ExitStatus
}

// A pvesh that is killed does not take its worker along; the worker dies of
// its closed standard output at its next line, and cleans up nothing: what it
// had made stays, under lock: clone.
func TestKilledCommandLeavesPartialClone(t *testing.T) {
	t.Parallel()
	onBoth(t, func(r *replay) {
		cmd, release := cloneHeld(r)
		if err := cmd.Process.Kill(); err != nil {
			r.t.Fatal(err)
		}
		_ = cmd.Wait()
		r.waitFor("the end of pvesh", func() bool { return r.n.ToolsRunning() == 0 })
		release()
		if s := r.lastTask("qmclone"); s != "unexpected status" {
			r.t.Errorf("status %q", s)
		}
		r.wantConfig(103, "lock: clone", true)
		r.fails("VM is locked (clone)", "qm start 103")
		r.sh("qm unlock 103")
		r.sh("qm destroy 103")
	})
}

// SIGTERM is passed on to the worker, which cleans up as its code does.
func TestTerminatedCommandCleansUp(t *testing.T) {
	t.Parallel()
	onBoth(t, func(r *replay) {
		cmd, release := cloneHeld(r)
		var errs bytes.Buffer
		if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
			r.t.Fatal(err)
		}
		r.waitFor("the signal", func() bool { return r.n.ToolsTerminated() == 1 })
		release()
		_ = cmd.Wait()
		if s := r.lastTask("qmclone"); !strings.Contains(s, "received interrupt") {
			r.t.Errorf("status %q, stderr %q", s, errs.String())
		}
		r.fails("does not exist", "qm config 103")
		r.wantVolume("vm-103-", false)
	})
}

// What is no command, option, path or parameter of Proxmox VE fails.
func TestCommandsRefuseWhatTheyDoNotKnow(t *testing.T) {
	t.Parallel()
	onBoth(t, func(r *replay) {
		for line, text := range map[string]string{
			"qm frobnicate 101":                         "ERROR: unknown command 'qm frobnicate'",
			"qm disk":                                   "ERROR: incomplete command 'qm disk'",
			"qm set 101 --nosuch 1":                     "Unknown option: nosuch\n400 unable to parse option\nqm set <vmid> [OPTIONS]",
			"qm set":                                    "400 not enough arguments",
			"qm start 101 102":                          "400 too many arguments",
			"qm start abc":                              "vmid: type check ('integer') failed - got 'abc'",
			"qm set 101 --onboot perhaps":               "400 unable to parse boolean option",
			"pvesh get /nosuch":                         "No 'get' handler defined for '/nosuch'",
			"pvesh create /nodes/pve/qemu/101":          "No 'create' handler defined for '/nodes/pve/qemu/101'",
			"pvesh get /version --nosuch 1":             "Unknown option: nosuch",
			"pvesh create /nodes/pve/qemu/101/snapshot": "snapname: property is missing and it is not optional",
			"pvesm path local:snippets/../x":            "unable to parse",
			"pveum role add R --privs No.Such":          "invalid privilege",
			"pveum user frob":                           "ERROR: unknown command",
		} {
			r.fails(text, strings.Split(line, " ")...)
		}
	})
}

// On another node pvesh runs itself there and joins what it hears: the UPID
// stands behind the log lines in one string.
func TestPveshOfAnotherNode(t *testing.T) {
	t.Parallel()
	n := pvenode.New(t, pvenode.Config{Waits: pvenode.ShortWaits(), Nodes: []string{"pve", "pve2"}})
	n.AddTemplate(t, pvenode.Template{VMID: 9000, Node: "pve2"})
	var out, errs bytes.Buffer
	code := n.Run(t.Context(), "pvesh", []string{"create", "/nodes/pve2/qemu/9000/clone", "--newid", "103", "--output-format", "json"},
		pvenode.Stdio{Out: &out, Err: &errs})
	var s string
	if err := json.Unmarshal(out.Bytes(), &s); code != 0 || err != nil || !strings.HasPrefix(s, "create ") || !strings.Contains(s, `"UPID:pve2:`) {
		t.Errorf("exit %d, stdout %q, stderr %q", code, out.String(), errs.String())
	}
}

package e2e

import (
	"encoding/json"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/test/sample"
	"github.com/agentlab-vm/agentlab/test/wsmodel"
)

// Random operations on workspaces of real VMs, with a daemon that is killed in them,
// lose no content and no snapshot, leave no volume behind, and attach none twice.
func TestRandomOperationsOnRealWorkspaces(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	random := sample.Rand(t)
	limits := wsmodel.Limits{Steps: 25, Starts: 3, Reads: 2}
	if sample.Full() {
		limits = wsmodel.Limits{Steps: 100}
	}
	wsmodel.Run(t, modelled{l, t, random}, random, limits)
}

// modelled is a lab for package wsmodel.
type modelled struct {
	*lab
	t    *testing.T
	rand *rand.Rand
}

// call runs a command with JSON output.
func (l modelled) call(out any, args ...string) error {
	l.Helper()
	r := l.run("", append([]string{"--json"}, args...)...)
	if r.code == 0 && out != nil {
		if err := json.Unmarshal([]byte(r.stdout), out); err != nil {
			l.Fatalf("agentlab %v: %v: %v", args, err, r)
		}
	}
	if r.code == 0 {
		return nil
	}
	var failed struct {
		Error struct {
			Code    agentlab.Code
			Message string
		}
	}
	for line := range strings.Lines(r.stderr) {
		if json.Unmarshal([]byte(line), &failed) == nil && failed.Error.Code != "" {
			return agentlab.Errorf(failed.Error.Code, "%s", failed.Error.Message)
		}
	}
	l.Fatalf("agentlab %v: %v", args, r)
	return nil
}

func (l modelled) must(out any, args ...string) {
	l.Helper()
	if err := l.call(out, args...); err != nil {
		l.Fatalf("agentlab %v: %v", args, err)
	}
}

func (l modelled) Request(kill bool, fn func() error) error {
	l.Helper()
	err := fn()
	if kill {
		time.Sleep(time.Duration(l.rand.IntN(400)) * time.Millisecond) // the point of the kill
		if err := l.kill9("agentlabd", "run"); err != nil {
			l.Fatal(err)
		}
		l.Log("the daemon was killed")
	}
	if !eventually(commandLimit, l.settled) {
		l.Fatalf("it is not complete: %s", l.ok("workspace", "list"))
	}
	return err
}

// settled reports whether no operation on a workspace or a snapshot is left.
func (l modelled) settled() bool {
	l.Helper()
	for _, v := range l.list() {
		if v.State != string(agentlab.WorkspaceReady) && v.State != string(agentlab.WorkspaceTrashed) {
			return false
		}
		for _, n := range l.snapshots(v.ID) {
			if n.State != string(agentlab.WorkspaceSnapshotReady) {
				return false
			}
		}
	}
	return true
}

// list returns all workspaces, also those in the trash and those that are deleted.
func (l modelled) list() []api.Workspace {
	l.Helper()
	var live, trash api.List[api.Workspace]
	l.must(&live, "workspace", "list")
	l.must(&trash, "workspace", "list", "--trash")
	return append(live.Items, trash.Items...)
}

func (l modelled) snapshots(id string) []api.WorkspaceSnapshot {
	l.Helper()
	var out api.List[api.WorkspaceSnapshot]
	l.must(&out, "workspace", "snapshot", "list", id)
	return out.Items
}

func (l modelled) Create(name string, sizeGB int) (string, error) {
	var v api.Workspace
	err := l.call(&v, "workspace", "create", name, "--size", strconv.Itoa(sizeGB), "--no-wait")
	return v.ID, err
}

func (l modelled) Fork(id, name, snapshot string) (string, error) {
	var v api.Workspace
	args := []string{"workspace", "fork", id, "--name", name, "--no-wait"}
	if snapshot != "" {
		args = append(args, "--from-snapshot", snapshot)
	}
	err := l.call(&v, args...)
	return v.ID, err
}

func (l modelled) Save(id, name string, attached bool) error {
	args := []string{"workspace", "snapshot", "create", id, "--name", name, "--no-wait"}
	if attached {
		args = append(args, "--attached", string(agentlab.ConsistencyCrash))
	}
	return l.call(nil, args...)
}

func (l modelled) Restore(id, snapshot string) error {
	return l.call(nil, "workspace", "snapshot", "restore", id, "--name", snapshot, "--yes", "--no-wait")
}

func (l modelled) Resize(id string, sizeGB int) error {
	return l.call(nil, "workspace", "resize", id, "--size", strconv.Itoa(sizeGB), "--no-wait")
}

func (l modelled) Delete(id string, purge bool) error {
	return l.call(nil, "workspace", "delete", id, "--yes", "--no-wait", "--purge="+strconv.FormatBool(purge))
}

func (l modelled) Undelete(id string) error { return l.call(nil, "workspace", "undelete", id) }

func (l modelled) Start(id string) (int, error) {
	var sb api.Sandbox
	err := l.call(&sb, "sandbox", "new", "--workspace", id, "--no-wait")
	return sb.VMID, err
}

func (l modelled) Destroy(vmid int) error {
	return l.call(nil, "sandbox", "destroy", strconv.Itoa(vmid), "--no-wait")
}

func (l modelled) Await(vmid int, s agentlab.SandboxState) {
	l.Helper()
	name := strconv.Itoa(vmid)
	if !eventually(commandLimit, func() bool { return l.sandbox(l.t, name).State == string(s) }) {
		l.Fatalf("it is not %s: %+v", s, l.sandbox(l.t, name))
	}
}

func (l modelled) Exchange(vmid int, text string) string {
	l.Helper()
	return strings.TrimSpace(l.ok("exec", strconv.Itoa(vmid), "sh", "-c", "cat /work/note; echo "+text+" > /work/note; sync"))
}

// Observe compares the workspaces with the volumes of the backend.
func (l modelled) Observe(map[string]wsmodel.Known) map[string]wsmodel.Seen {
	l.Helper()
	l.ok("workspace", "check")
	out := map[string]wsmodel.Seen{}
	for _, v := range l.list() {
		var now api.Workspace
		l.must(&now, "workspace", "show", v.ID)
		s := wsmodel.Seen{SizeGB: now.SizeGB, Trashed: now.State == string(agentlab.WorkspaceTrashed)}
		for _, n := range l.snapshots(v.ID) {
			s.Snapshots = append(s.Snapshots, n.Name)
		}
		if len(now.Leases) > 1 {
			l.Fatalf("%+v", now)
		}
		for _, lease := range now.Leases {
			s.Owner = lease.SandboxVMID
		}
		out[v.ID] = s
	}
	return out
}

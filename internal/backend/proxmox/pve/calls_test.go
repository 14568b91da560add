package pve

import (
	"context"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"
)

// apiCalls is every call of Proxmox VE's API that this package makes, with
// every parameter that it may send. A call that is not here is not made; each
// was looked up in the API of 8.4 and of 9.2.
var apiCalls = []string{
	"DELETE /nodes/NODE/qemu/VMID destroy-unreferenced-disks purge",
	"DELETE /nodes/NODE/qemu/VMID/snapshot/SNAP force",
	"DELETE /nodes/NODE/storage/STORAGE/content/VOLUME",
	"DELETE /nodes/NODE/tasks/UPID",
	"GET /access/permissions",
	"GET /cluster/nextid vmid",
	"GET /cluster/resources type",
	"GET /nodes",
	"GET /nodes/NODE/qemu",
	"GET /nodes/NODE/qemu/VMID/agent/network-get-interfaces",
	"GET /nodes/NODE/qemu/VMID/config current",
	"GET /nodes/NODE/qemu/VMID/firewall/rules",
	"GET /nodes/NODE/qemu/VMID/pending",
	"GET /nodes/NODE/qemu/VMID/snapshot",
	"GET /nodes/NODE/qemu/VMID/snapshot/SNAP/config",
	"GET /nodes/NODE/qemu/VMID/status/current",
	"GET /nodes/NODE/storage",
	"GET /nodes/NODE/storage/STORAGE/content content vmid",
	"GET /nodes/NODE/storage/STORAGE/status",
	"GET /nodes/NODE/tasks limit source typefilter vmid",
	"GET /nodes/NODE/tasks/UPID/log limit start",
	"GET /nodes/NODE/tasks/UPID/status",
	"GET /version",
	"POST /nodes/NODE/qemu/VMID/agent/file-write content file",
	"POST /nodes/NODE/qemu/VMID/clone description full name newid pool snapname storage target",
	"POST /nodes/NODE/qemu/VMID/firewall/rules action enable type",
	"POST /nodes/NODE/qemu/VMID/snapshot description snapname vmstate",
	"POST /nodes/NODE/qemu/VMID/snapshot/SNAP/rollback",
	"POST /nodes/NODE/qemu/VMID/status/resume",
	"POST /nodes/NODE/qemu/VMID/status/shutdown timeout",
	"POST /nodes/NODE/qemu/VMID/status/start",
	"POST /nodes/NODE/qemu/VMID/status/stop overrule-shutdown",
	"POST /nodes/NODE/qemu/VMID/status/suspend",
	"PUT /nodes/NODE/qemu/VMID/config delete digest name",
	"PUT /nodes/NODE/qemu/VMID/firewall/options enable",
	"PUT /nodes/NODE/qemu/VMID/resize disk size",
}

func TestCallsMade(t *testing.T) {
	params := map[string]map[string]bool{}
	s := &scripted{answer: func(_ int, m Method, path string, p url.Values) (string, error) {
		plain := strings.NewReplacer("pve", "NODE", "101", "VMID", "STORE", "STORAGE", "vol", "VOLUME", url.PathEscape(string(cloneTask)), "UPID").Replace(path)
		call := string(m) + " " + plain
		if params[call] == nil {
			params[call] = map[string]bool{}
		}
		for k := range p {
			params[call][k] = true
		}
		return "[]", nil
	}}
	ctx, c := t.Context(), New(s)
	vm := func(f func(context.Context, string, int) (UPID, error)) { _, _ = f(ctx, "pve", 101) }
	ch := Changes{Set: map[string]string{"name": "x"}, Delete: []string{"tags"}, Digest: "d"}
	_, _ = c.Version(ctx)
	_, _ = c.Nodes(ctx)
	_, _ = c.Permissions(ctx)
	_, _ = c.Free(ctx, 101)
	_, _ = c.Guests(ctx)
	_, _ = c.VMs(ctx, "pve")
	_, _ = c.Config(ctx, "pve", 101)
	_, _ = c.CurrentConfig(ctx, "pve", 101)
	_, _, _ = c.Configs(ctx, "pve", 101)
	_, _ = c.Status(ctx, "pve", 101)
	_, _ = c.Clone(ctx, "pve", 101, CloneOptions{NewID: 102, Name: "n", Description: "d", Pool: "p", Full: true, Snapshot: "SNAP", Storage: "s", Target: "t"})
	_ = c.Set(ctx, "pve", 101, ch)
	_, _ = c.Resize(ctx, "pve", 101, "scsi0", "2G")
	vm(c.Start)
	vm(c.Stop)
	vm(c.Suspend)
	vm(c.Resume)
	_, _ = c.Shutdown(ctx, "pve", 101, time.Minute)
	_, _ = c.Destroy(ctx, "pve", 101, true)
	_, _ = c.Save(ctx, "pve", 101, "SNAP", "d", true)
	_, _ = c.Snapshots(ctx, "pve", 101)
	_, _ = c.SnapshotConfig(ctx, "pve", 101, "SNAP")
	_, _ = c.Rollback(ctx, "pve", 101, "SNAP")
	_, _ = c.DeleteSnapshot(ctx, "pve", 101, "SNAP", true)
	_ = c.DisableFirewall(ctx, "pve", 101)
	_ = c.SetFirewallGroup(ctx, "pve", 101, "g")
	_, _ = c.TaskStatus(ctx, cloneTask)
	_, _ = c.TaskLog(ctx, cloneTask, 0, 50)
	_, _ = c.Tasks(ctx, "pve", TaskFilter{VMID: 101, Running: true, Type: "qmclone", Limit: 5})
	_ = c.StopTask(ctx, cloneTask)
	_, _ = c.Wait(ctx, cloneTask)
	_, _ = c.Storages(ctx, "pve")
	_, _ = c.StorageStatus(ctx, "pve", "STORE")
	_, _ = c.Content(ctx, "pve", "STORE", "images", 101)
	_, _ = c.DeleteContent(ctx, "pve", "STORE:vol")
	_, _ = c.AgentInterfaces(ctx, "pve", 101)
	_ = c.AgentFileWrite(ctx, "pve", 101, "/x", nil)

	var got []string
	for call, ps := range params {
		names := make([]string, 0, len(ps))
		for p := range ps {
			names = append(names, p)
		}
		slices.Sort(names)
		got = append(got, strings.TrimSpace(call+" "+strings.Join(names, " ")))
	}
	slices.Sort(got)
	if !slices.Equal(got, apiCalls) {
		t.Errorf("made:\n%s\nlisted:\n%s", strings.Join(got, "\n"), strings.Join(apiCalls, "\n"))
	}
}

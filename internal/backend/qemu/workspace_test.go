package qemu

import (
	"strings"
	"syscall"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/stream"
)

// The file system of a workspace is created by the first guest, is moved to another
// one while both run, grows, and loses nothing that was synced when QEMU is killed.
func TestWorkspaceMovesBetweenGuests(t *testing.T) {
	f := warmFixture(t)
	one, two := newBox(t, f, nil), newBox(t, f, func(sp *backend.Spec) { *sp = f.spec(2) })
	v := newTestVolume(t, one.d)
	one.ok(one.d.AttachVolume(one.ctx, one.ref, v))
	one.boot()
	mount := func(b *box, req guestapi.WorkspaceRequest) guestapi.Workspace {
		t.Helper()
		ws, err := b.client().Mount(b.ctx, req)
		b.ok(err)
		return ws
	}
	if _, err := one.client().Mount(one.ctx, guestapi.WorkspaceRequest{Bytes: 1 << 30}); agentlab.CodeOf(err) != agentlab.CodeConflict {
		t.Errorf("a volume without a file system is mounted: %v", err)
	}
	if ws := mount(one, guestapi.WorkspaceRequest{Bytes: 1 << 30, Format: true}); !ws.New || ws.Bytes < 900<<20 {
		t.Errorf("the new workspace: %+v", ws)
	}
	if got := one.output("runuser -u agent -- sh -c 'echo first >/work/file && sync /work/file && stat -c %U /work'"); got != "agent" {
		t.Errorf("the agent's user: %s", got)
	}
	busy := one.sh("cd /work && echo in use && exec sleep 1000")
	if _, text, err := stream.NewReader(busy).Next(); err != nil || string(text) != "in use\n" {
		t.Fatalf("%q, %v", text, err)
	}
	if err := one.client().Unmount(one.ctx); agentlab.CodeOf(err) != agentlab.CodeBusy || !strings.Contains(err.Error(), "sleep (") {
		t.Errorf("it is unmounted while a process uses it: %v", err)
	}
	_ = busy.Close()
	eventually(t, bootTimeout, "it is unmounted", func() error { return one.client().Unmount(one.ctx) })
	one.ok(one.d.DetachVolume(one.ctx, one.ref, v))
	one.ok(one.d.GrowVolume(one.ctx, v, 2))

	two.boot()
	two.ok(two.d.AttachVolume(two.ctx, two.ref, v))
	if ws := mount(two, guestapi.WorkspaceRequest{Bytes: 2 << 30}); ws.New || ws.Bytes < 1800<<20 {
		t.Errorf("the larger workspace: %+v", ws)
	}
	if got := two.output("cat /work/file; echo second >/work/file && sync /work/file && (yes >/work/more & sleep 0.1)"); got != "first" {
		t.Errorf("the other guest reads %q", got)
	}
	pid, err := noted(two.d.dir(two.ref), qemuPID)
	two.ok(err)
	two.ok(syscall.Kill(pid, syscall.SIGKILL))
	two.awaitPower(backend.PowerCrashed)
	two.boot()
	if ws := mount(two, guestapi.WorkspaceRequest{Bytes: 2 << 30}); ws.New {
		t.Errorf("after the power cut: %+v", ws)
	}
	if got := two.output("cat /work/file"); got != "second" {
		t.Errorf("after the power cut the file has %q", got)
	}
}

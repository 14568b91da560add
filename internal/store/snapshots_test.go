package store

import (
	"testing"

	"github.com/agentlab-vm/agentlab"
)

// A sandbox is created only from a snapshot that is SAVED when its row is written:
// its row keeps the snapshot from then on.
func TestAllocateFromSnapshot(t *testing.T) {
	ctx := t.Context()
	s := newStore(t)
	room := agentlab.Allocation{First: 1000, Last: 1999}
	src := must(s.AllocateSandbox(ctx, newSandbox("play"), room))(t)
	snap := must(s.AddSnapshot(ctx, agentlab.Snapshot{
		UID: agentlab.NewUID(), Name: "clean", Kind: agentlab.SnapshotSaved, State: agentlab.SnapshotSaving,
		VMID: src.VMID, SandboxUID: src.UID, SandboxName: src.Name, Backend: "fake", Image: src.Image, Resources: src.Resources,
	}, agentlab.SnapshotQuota{}))(t)
	become := func(to agentlab.SnapshotState) {
		t.Helper()
		must(s.UpdateSnapshot(ctx, snap.UID, agentlab.SnapshotQuota{}, func(n *agentlab.Snapshot) ([]agentlab.Event, error) {
			n.State, n.SavedAt = to, epoch
			return nil, nil
		}))(t)
	}
	allocate := func(name string) (agentlab.Sandbox, error) {
		sb := newSandbox(name)
		sb.From = agentlab.Origin{Snapshot: snap.UID, Sandbox: src.UID, Name: "play/clean"}
		return s.AllocateSandbox(ctx, sb, room)
	}
	refused := func(name string) {
		t.Helper()
		if sb, err := allocate(name); agentlab.CodeOf(err) != agentlab.CodeConflict || agentlab.HintOf(err) == "" {
			t.Errorf("%+v, %v", sb, err)
		}
	}
	refused("early")
	become(agentlab.SnapshotReady)
	sb := must(allocate("copy"))(t)
	become(agentlab.SnapshotDeleting)
	if users := must(s.SandboxesFrom(ctx, snap.UID))(t); len(users) != 1 || users[0].UID != sb.UID {
		t.Errorf("%+v", users)
	}
	refused("late")
	if err := s.RemoveSnapshot(ctx, snap.UID); err != nil {
		t.Fatal(err)
	}
	refused("later")
	if all := must(s.Sandboxes(ctx, agentlab.SandboxFilter{}))(t); len(all) != 2 {
		t.Errorf("%d sandboxes", len(all))
	}
}

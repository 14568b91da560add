package store

import (
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// A sandbox of the warm pool is handed out once, keeps what its VM has, and counts
// for the maximum only then.
func TestHandOutSandbox(t *testing.T) {
	ctx := t.Context()
	s := newStore(t).Store
	one := lab
	one.MaxLive = 1
	pooled := newSandbox("pool-1")
	pooled.Profile = agentlab.ProfilePool
	p := must(s.AllocateSandbox(ctx, pooled, one))(t)
	want := newSandbox("mine")
	want.VMID, want.CreatedAt = 0, time.Now().UTC().Add(time.Hour)
	if _, err := s.HandOutSandbox(ctx, p.VMID, want, 1); agentlab.CodeOf(err) != agentlab.CodeConflict {
		t.Errorf("one that is still being made: %v", err)
	}
	for _, state := range []agentlab.SandboxState{agentlab.SandboxProvisioning, agentlab.SandboxBooting, agentlab.SandboxPooled} {
		p = must(s.UpdateSandbox(ctx, p.VMID, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
			sb.State, sb.Handle = state, "here"
			return nil, nil
		}))(t)
	}
	if list := must(s.Sandboxes(ctx, agentlab.SandboxFilter{NoPooled: true}))(t); len(list) != 0 {
		t.Errorf("%+v", list)
	}
	user := must(s.AllocateSandbox(ctx, newSandbox("user"), one))(t)
	if _, err := s.HandOutSandbox(ctx, p.VMID, want, 1); agentlab.CodeOf(err) != agentlab.CodeLimit {
		t.Errorf("above the maximum: %v", err)
	}
	taken := want
	taken.Name = user.Name
	if _, err := s.HandOutSandbox(ctx, p.VMID, taken, 2); agentlab.CodeOf(err) != agentlab.CodeExists {
		t.Errorf("a name that is taken: %v", err)
	}
	got := must(s.HandOutSandbox(ctx, p.VMID, want, 2, agentlab.NewEvent(agentlab.EventSandboxCreated, nil, "made")))(t)
	if stored := must(s.Sandbox(ctx, p.VMID))(t); !stored.Equal(got) {
		t.Errorf("stored %+v, returned %+v", stored, got)
	}
	if got.UID != p.UID || got.IPv4 != p.IPv4 || got.IPv6 != p.IPv6 || got.Handle != "here" || got.Name != "mine" || got.Profile != want.Profile ||
		got.State != agentlab.SandboxBooting || !got.NetworkPending || got.Start != agentlab.StartPool || !got.CreatedAt.Equal(want.CreatedAt) {
		t.Errorf("%+v", got)
	}
	if evs := must(s.Events(ctx, agentlab.EventFilter{SandboxVMID: p.VMID}))(t); len(evs) != 1 {
		t.Errorf("events %+v", evs)
	}
	if _, err := s.HandOutSandbox(ctx, p.VMID, want, 9); agentlab.CodeOf(err) != agentlab.CodeConflict {
		t.Errorf("a second time: %v", err)
	}
	if _, err := s.HandOutSandbox(ctx, 99, want, 9); agentlab.CodeOf(err) != agentlab.CodeNotFound {
		t.Errorf("no sandbox: %v", err)
	}
}

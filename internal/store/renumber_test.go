package store

import (
	"context"
	"net/netip"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
)

func TestRenumber(t *testing.T) {
	ctx := t.Context()
	s := newStore(t)
	room := agentlab.Allocation{First: 10, Last: 20, IPv4: netip.MustParsePrefix("10.1.0.0/16")}
	job := newJob()
	sb := newSandbox("alpha")
	sb.State, sb.JobID = agentlab.SandboxProvisioning, job.ID
	sb = must(s.AllocateSandbox(ctx, sb, room))(t)
	job.SandboxVMID = sb.VMID
	if err := s.CreateJob(ctx, job); err != nil {
		t.Fatal(err)
	}
	if err := s.PutBootstrapToken(ctx, agentlab.BootstrapToken{Hash: hashOf("a"), VMID: sb.VMID, ExpiresAt: s.now().Add(time.Minute)}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.RenumberSandbox(ctx, sb.VMID, agentlab.NewUID(), room); agentlab.CodeOf(err) != agentlab.CodeNotFound {
		t.Errorf("with another mark: %v", err)
	}
	now := must(s.RenumberSandbox(ctx, sb.VMID, sb.UID, room))(t)
	want := sb
	want.VMID, want.UpdatedAt = 11, now.UpdatedAt
	if !now.Equal(want) || !must(s.Sandbox(ctx, 11))(t).Equal(want) {
		t.Errorf("%+v, want %+v", now, want)
	}
	if j := must(s.Job(ctx, job.ID))(t); j.SandboxVMID != 11 {
		t.Errorf("its job is of %d", j.SandboxVMID)
	}
	if open := must(s.BootstrapOpen(ctx, 11))(t); open {
		t.Error("a token of the old number is open under the new one")
	}
	if got := must(s.RenumberedSandbox(ctx, 10))(t); got.VMID != 11 {
		t.Errorf("by the old number: %+v", got)
	}
	_, err := s.RenumberedSandbox(ctx, 11)
	if agentlab.CodeOf(err) != agentlab.CodeNotFound {
		t.Errorf("11 is the number: %v", err)
	}

	// Who was told the old number and writes it down late gets the new one.
	if j := must(s.UpdateJob(ctx, job.ID, func(j *agentlab.Job) ([]agentlab.Event, error) {
		j.SandboxVMID = 10
		return nil, nil
	}))(t); j.SandboxVMID != 11 {
		t.Errorf("its job says %d", j.SandboxVMID)
	}
	late := newSandbox("beta")
	lateJob := newJob()
	late.State, late.JobID = agentlab.SandboxRequested, lateJob.ID
	late = must(s.AllocateSandbox(ctx, late, room))(t)
	moved := must(s.RenumberSandbox(ctx, late.VMID, late.UID, room))(t)
	lateJob.SandboxVMID = late.VMID
	if err := s.CreateJob(ctx, lateJob); err != nil {
		t.Fatal(err)
	}
	if j := must(s.Job(ctx, lateJob.ID))(t); j.SandboxVMID != moved.VMID {
		t.Errorf("a job that was written late is of %d, want %d", j.SandboxVMID, moved.VMID)
	}
	other := newJob() // whose sandbox 10 never was
	other.SandboxVMID = 10
	if err := s.CreateJob(ctx, other); err != nil {
		t.Fatal(err)
	}
	if j := must(s.Job(ctx, other.ID))(t); j.SandboxVMID != 10 {
		t.Errorf("another's job is of %d", j.SandboxVMID)
	}

	// A VM that runs keeps its number.
	must(s.UpdateSandbox(ctx, 11, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
		sb.State = agentlab.SandboxBooting
		return nil, nil
	}))(t)
	if _, err := s.RenumberSandbox(ctx, 11, sb.UID, room); agentlab.CodeOf(err) != agentlab.CodeConflict {
		t.Errorf("of a VM that runs: %v", err)
	}
	// A row that goes takes its old numbers along.
	end(t, s.Store, 11)
	if err := s.DeleteSandbox(ctx, 11); err != nil {
		t.Fatal(err)
	}
	if _, err := s.RenumberedSandbox(context.Background(), 10); agentlab.CodeOf(err) != agentlab.CodeNotFound {
		t.Errorf("of a sandbox that is gone: %v", err)
	}
}

package server

import (
	"context"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
)

// snapshotRoutes returns the routes for snapshots and forks.
func (s *Server) snapshotRoutes() []route {
	const list = "/v1/sandboxes/{sandbox}/snapshots"
	const one = list + "/{snapshot}"
	return []route{
		{get, "/v1/snapshots", AccessRead, "sandbox.read", noTarget, anyOrigin, 200, "snapshots", "List snapshots, also of sandboxes that no longer exist", paged("snapshots", s.listSnapshots, snapshotKey)},
		{get, list, AccessRead, "sandbox.read", onSandbox, anyOrigin, 200, "sandbox-snapshots", "List the snapshots of a sandbox", paged("snapshots", s.listSandboxSnapshots, snapshotKey)},
		{post, list, AccessWrite, "sandbox.snapshot", onSandbox, anyOrigin, 202, "save-snapshot", "Save the disk of a sandbox, and its memory if it runs or is suspended", call(s.saveSnapshot)},
		{post, one + "/restore", AccessWrite, "sandbox.snapshot", onSandbox, anyOrigin, 202, "restore-snapshot", "Restore a sandbox to one of its snapshots", call(s.restoreSnapshot)},
		{del, one, AccessWrite, "sandbox.snapshot", onSandbox, anyOrigin, 202, "delete-snapshot", "Delete a snapshot", call(s.deleteSnapshot)},
		{post, "/v1/forks", AccessWrite, "sandbox.create", noTarget, anyOrigin, 201, "fork-sandbox", "Create sandboxes that continue a sandbox, which continues itself", listing(s.forkSandbox)},
	}
}

func (s *Server) listSnapshots(ctx context.Context, _ *PageInput) ([]api.Snapshot, error) {
	list, err := s.cfg.Services.Snapshots.Snapshots(ctx, "")
	return mapSlice(list, toSnapshot), err
}

type savedSandboxInput struct {
	Sandbox string `path:"sandbox" doc:"VMID or name of a sandbox, which may no longer exist"`
	PageInput
}

func snapshotKey(n api.Snapshot) []string { return []string{timeKey(n.CreatedAt), n.UID} }

func (s *Server) listSandboxSnapshots(ctx context.Context, in *savedSandboxInput) ([]api.Snapshot, error) {
	list, err := s.cfg.Services.Snapshots.Snapshots(ctx, in.Sandbox)
	return mapSlice(list, toSnapshot), err
}

type saveSnapshotInput struct {
	Sandbox string `path:"sandbox" doc:"VMID or name of a sandbox, or name or ID of a session, for its current sandbox"`
	Body    api.SnapshotCreate
}

func (s *Server) saveSnapshot(ctx context.Context, in *saveSnapshotInput) (api.Snapshot, error) {
	sb, err := s.cfg.Services.Sandboxes.Get(ctx, in.Sandbox)
	if err != nil {
		return api.Snapshot{}, err
	}
	n, err := s.cfg.Services.Snapshots.SaveSnapshot(ctx, sb.VMID, in.Body.Name, in.Body.Keep)
	return toSnapshot(n), err
}

type snapshotInput struct {
	Sandbox  string `path:"sandbox" doc:"VMID or name of a sandbox, which may no longer exist"`
	Snapshot string `path:"snapshot" doc:"Name of a snapshot of the sandbox"`
}

func (s *Server) restoreSnapshot(ctx context.Context, in *snapshotInput) (api.Sandbox, error) {
	return s.updateSandbox(ctx, in.Sandbox, func(vmid int) (agentlab.Sandbox, error) {
		return s.cfg.Services.Snapshots.RestoreSnapshot(ctx, vmid, in.Snapshot)
	})
}

func (s *Server) deleteSnapshot(ctx context.Context, in *snapshotInput) (api.Snapshot, error) {
	n, err := s.cfg.Services.Snapshots.DeleteSnapshot(ctx, in.Sandbox, in.Snapshot)
	return toSnapshot(n), err
}

type forkSandboxInput struct{ Body api.SandboxFork }

func (s *Server) forkSandbox(ctx context.Context, in *forkSandboxInput) ([]api.Sandbox, error) {
	sb, err := s.cfg.Services.Sandboxes.Get(ctx, in.Body.Sandbox)
	if err != nil {
		return nil, err
	}
	if err := s.mayUseProfile(ctx, sb.Profile); err != nil {
		return nil, err
	}
	made, err := s.cfg.Services.Snapshots.Fork(ctx, sb.VMID, agentlab.ForkRequest{
		Count: in.Body.Count, NamePrefix: in.Body.NamePrefix, TTL: minutes(in.Body.TTLMinutes),
	})
	return mapSlice(made, toSandbox), err
}

func toSnapshot(n agentlab.Snapshot) api.Snapshot {
	return api.Snapshot{
		UID: n.UID, Name: n.Name, State: string(n.State), SandboxVMID: n.VMID, SandboxName: n.SandboxName,
		Backend: n.Backend, Profile: n.Profile, Image: n.Image,
		Cores: n.Resources.Cores, MemoryMB: n.Resources.MemoryMB, RootSizeGB: n.Resources.RootSizeGB,
		Keep: n.Keep, Memory: n.Memory, Bytes: n.Bytes, CreatedAt: n.CreatedAt.UTC(),
	}
}

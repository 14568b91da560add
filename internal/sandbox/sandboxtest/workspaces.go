package sandboxtest

import (
	"context"
	"slices"
	"strings"
	"testing/synctest"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// OnWorkspace is a request for a sandbox with a workspace.
func OnWorkspace(name string, wait time.Duration) agentlab.SandboxRequest {
	return agentlab.SandboxRequest{Workspace: &agentlab.WorkspaceSelection{Workspace: name, Wait: wait, Ensure: true, SizeGB: 2}}
}

// WorkspaceOf returns the workspace with a name.
func (w *World) WorkspaceOf(name string) agentlab.Workspace {
	w.Helper()
	v, err := w.Workspaces.Get(context.Background(), name)
	if err != nil {
		w.Fatal(err)
	}
	return v
}

// Leases returns the numbers of the sandboxes that have a workspace and wait for it.
func (w *World) Leases(name string) (out []int) {
	w.Helper()
	list, err := w.Store.WorkspaceLeases(context.Background(), w.WorkspaceOf(name).ID)
	if err != nil {
		w.Fatal(err)
	}
	for i, l := range list {
		if l.Acquired() != (i == 0) {
			w.Errorf("leases %+v", list)
		}
		out = append(out, l.VMID)
	}
	return out
}

// Gone destroys a sandbox.
func (w *World) Gone(vmid int) {
	w.Helper()
	Must(w.Svc.Destroy(context.Background(), vmid))(w.T)
	w.Until(vmid, agentlab.SandboxDestroyed)
}

// SawRefusal reports whether an event says that a request for a lease was given up.
func (w *World) SawRefusal(why string) bool {
	return slices.ContainsFunc(w.Events(agentlab.EventWorkspaceLease), func(e agentlab.Event) bool {
		return strings.Contains(e.Data, "refused") && strings.Contains(e.Message, why)
	})
}

// AttachedTo returns the UID of the sandbox that the volume of a workspace is attached
// to.
func (w *World) AttachedTo(name string) string {
	w.Helper()
	vol, err := w.Driver.InspectVolume(context.Background(), backend.VolumeRef{UID: w.WorkspaceOf(name).UID})
	if err != nil {
		w.Fatal(err)
	}
	return vol.AttachedTo.UID
}

// SnapshotOf returns a snapshot of the workspace data, when it is neither being saved
// nor deleted. The zero value means that there is none.
func (w *World) SnapshotOf(name string) (n agentlab.WorkspaceSnapshot) {
	w.Helper()
	for {
		synctest.Wait()
		list, err := w.Workspaces.Snapshots(context.Background(), "data")
		if err != nil {
			w.Fatal(err)
		}
		i := slices.IndexFunc(list, func(n agentlab.WorkspaceSnapshot) bool { return n.Name == name })
		if i < 0 {
			return agentlab.WorkspaceSnapshot{}
		}
		if list[i].State == agentlab.WorkspaceSnapshotReady {
			return list[i]
		}
		time.Sleep(time.Second) // of the bubble
	}
}

// SaveAttached saves a workspace that a sandbox has.
func (w *World) SaveAttached(name string, c agentlab.WorkspaceConsistency) agentlab.WorkspaceSnapshot {
	w.Helper()
	Must(w.Workspaces.SaveSnapshot(context.Background(), "data", name, c))(w.T)
	return w.SnapshotOf(name)
}

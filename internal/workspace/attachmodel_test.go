package workspace_test

import (
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/internal/sandbox/sandboxtest"
	"github.com/agentlab-vm/agentlab/test/sample"
	"github.com/agentlab-vm/agentlab/test/wsmodel"
)

// Random operations on workspaces, with a daemon that is killed at random calls of the
// driver, lose no content and no snapshot, leave no volume behind, and attach none
// twice.
func TestRandomOperationsOnWorkspaces(t *testing.T) {
	random := sample.Rand(t)
	sandboxtest.InWorld(t, func(w *sandboxtest.World) { wsmodel.Run(t, modelled{w, random}, random, wsmodel.Limits{Steps: 200}) })
}

// modelled is a world for package wsmodel.
type modelled struct {
	*sandboxtest.World
	rand *rand.Rand
}

func (w modelled) Request(kill bool, fn func() error) error {
	w.Helper()
	free := func() {}
	if kill {
		ops := []fake.Op{fake.OpCreateVolume, fake.OpDeleteVolume, fake.OpGrowVolume, fake.OpInspectVolume, fake.OpAttachVolume, fake.OpDetachVolume,
			fake.OpSnapshotVolume, fake.OpRestoreVolume, fake.OpCloneVolume, fake.OpDeleteVolumeSnapshot, fake.OpCreate, fake.OpStart, fake.OpDestroy}
		f := fake.Fault{Op: ops[w.rand.IntN(len(ops))], At: []fake.Point{fake.Before, fake.Half, fake.After}[w.rand.IntN(3)], Times: 1, Crash: true}
		w.Logf("the daemon dies %s %s", f.At, f.Op)
		free = w.Host.Inject(f)
	}
	err := fn()
	synctest.Wait()
	if kill {
		free()
		w.Restart()
	}
	time.Sleep(time.Minute) // of the bubble: what failed is tried again
	synctest.Wait()
	return err
}

func (w modelled) Create(name string, sizeGB int) (string, error) {
	v, err := w.Workspaces.Create(w.Context(), agentlab.WorkspaceSelection{Workspace: name, SizeGB: sizeGB})
	return v.ID, err
}

func (w modelled) Fork(id, name, snapshot string) (string, error) {
	v, err := w.Workspaces.Fork(w.Context(), id, name, snapshot)
	return v.ID, err
}

func (w modelled) Save(id, name string, attached bool) error {
	consistency := agentlab.WorkspaceConsistency("")
	if attached {
		consistency = agentlab.ConsistencyCrash
	}
	_, err := w.Workspaces.SaveSnapshot(w.Context(), id, name, consistency)
	return err
}

func (w modelled) Restore(id, snapshot string) error {
	_, err := w.Workspaces.RestoreSnapshot(w.Context(), id, snapshot)
	return err
}

func (w modelled) Resize(id string, sizeGB int) error {
	_, err := w.Workspaces.Resize(w.Context(), id, sizeGB)
	return err
}

func (w modelled) Delete(id string, purge bool) error {
	_, err := w.Workspaces.Delete(w.Context(), id, purge)
	return err
}

func (w modelled) Undelete(id string) error {
	_, err := w.Workspaces.Undelete(w.Context(), id, "")
	return err
}

func (w modelled) Start(id string) (int, error) {
	sb, err := w.Svc.Create(w.Context(), agentlab.SandboxRequest{TTL: 48 * time.Hour, Workspace: &agentlab.WorkspaceSelection{Workspace: id}})
	return sb.VMID, err
}

func (w modelled) Destroy(vmid int) error {
	_, err := w.Svc.Destroy(w.Context(), vmid)
	return err
}

func (w modelled) Await(vmid int, s agentlab.SandboxState) {
	w.Helper()
	w.Until(vmid, s)
}

func (w modelled) Exchange(vmid int, text string) string {
	w.Helper()
	sb := w.Get(vmid)
	old := w.Sh(sb, "cat /work/note")
	w.Sh(sb, "echo "+text+" > /work/note")
	return old
}

// Observe compares the rows with the backend.
func (w modelled) Observe(want map[string]wsmodel.Known) map[string]wsmodel.Seen {
	w.Helper()
	rows, err := w.Store.Workspaces(w.Context())
	if err != nil {
		w.Fatal(err)
	}
	volumes, err := w.Driver.ListVolumes(w.Context())
	if err != nil || len(volumes) != len(rows) {
		w.Fatalf("%d rows and %d volumes; %v", len(rows), len(volumes), err)
	}
	for _, vol := range volumes {
		if vol.Partial {
			w.Fatalf("%+v", vol)
		}
	}
	out, saved := map[string]wsmodel.Seen{}, 0
	for _, v := range rows {
		if v.Formatted != want[v.ID].Formatted || v.State != agentlab.WorkspaceReady && v.State != agentlab.WorkspaceTrashed {
			w.Fatalf("%+v, want %+v", v, want[v.ID])
		}
		s := wsmodel.Seen{SizeGB: v.SizeGB, Trashed: v.State == agentlab.WorkspaceTrashed}
		list, err := w.Workspaces.Snapshots(w.Context(), v.ID)
		if err != nil {
			w.Fatal(err)
		}
		for _, n := range list {
			s.Snapshots = append(s.Snapshots, n.Name)
		}
		saved += len(list)
		attached, leases := w.AttachedTo(v.ID), w.Leases(v.ID)
		if (attached == "") != (len(leases) == 0) || len(leases) > 1 {
			w.Fatalf("%s is attached to %q, leases %v", v.ID, attached, leases)
		}
		if len(leases) == 1 {
			if s.Owner = leases[0]; w.Get(s.Owner).UID != attached {
				w.Fatalf("%s is attached to %s, but %d has its lease", v.ID, attached, s.Owner)
			}
		}
		out[v.ID] = s
	}
	if list, err := w.Driver.VolumeSnapshots(w.Context()); err != nil || len(list) != saved {
		w.Fatalf("the backend has %d snapshots, the database %d; %v", len(list), saved, err)
	}
	return out
}

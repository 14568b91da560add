package sandbox_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/test/sample"
)

// known is what a workspace must have.
type known struct {
	text      string // of the file note; "" if there is none
	sizeGB    int
	formatted bool
	snapshots map[string]known
	owner     agentlab.Sandbox // that has it; the zero value means none
	trashed   bool
}

// model is a world with what its workspaces must have, by ID.
type model struct {
	*world
	rand  *rand.Rand
	want  map[string]known
	count int // for names and texts that are new
}

// Random operations on workspaces, with a daemon that is killed at random calls of the
// driver, lose no content and no snapshot, leave no volume behind, and attach none
// twice.
func TestRandomOperationsOnWorkspaces(t *testing.T) {
	random := sample.Rand(t)
	inWorld(t, func(w *world) {
		m := &model{world: w, rand: random, want: map[string]known{}}
		for range 200 {
			m.operate()
			m.check()
		}
		for _, id := range slices.Sorted(maps.Keys(m.want)) {
			m.readAll(id)
		}
	})
}

func (m *model) fresh(kind string) string {
	m.count++
	return fmt.Sprintf("%s%d", kind, m.count)
}

// pick returns a random key of a map.
func pick[V any](m *model, from map[string]V) string {
	keys := slices.Sorted(maps.Keys(from))
	return keys[m.rand.IntN(len(keys))]
}

// request requests an operation, with a daemon that is often killed in it, and waits
// until it is complete.
func (m *model) request(fn func() error) error {
	m.Helper()
	free := func() {}
	killed := m.rand.IntN(3) == 0
	if killed {
		ops := []fake.Op{fake.OpCreateVolume, fake.OpDeleteVolume, fake.OpGrowVolume, fake.OpInspectVolume, fake.OpAttachVolume, fake.OpDetachVolume,
			fake.OpSnapshotVolume, fake.OpRestoreVolume, fake.OpCloneVolume, fake.OpDeleteVolumeSnapshot, fake.OpCreate, fake.OpStart, fake.OpDestroy}
		f := fake.Fault{Op: ops[m.rand.IntN(len(ops))], At: []fake.Point{fake.Before, fake.Half, fake.After}[m.rand.IntN(3)], Times: 1, Crash: true}
		m.Logf("the daemon dies %s %s", f.At, f.Op)
		free = m.host.Inject(f)
	}
	err := fn()
	synctest.Wait()
	if killed {
		free()
		m.restart()
	}
	time.Sleep(time.Minute) // of the bubble: what failed is tried again
	synctest.Wait()
	return err
}

func (m *model) operate() {
	m.Helper()
	ctx := m.Context()
	if len(m.want) < 2 || len(m.want) < 5 && m.rand.IntN(6) == 0 {
		var v agentlab.Workspace
		m.must("create", m.request(func() (err error) { v, err = m.workspaces.Create(ctx, m.fresh("ws"), 2, ""); return err }))
		m.want[v.ID] = known{sizeGB: 2, snapshots: map[string]known{}}
		return
	}
	id := pick(m, m.want)
	k := m.want[id]
	allowed := k.owner.UID == "" && !k.trashed
	snapshot := ""
	if len(k.snapshots) > 0 {
		snapshot = pick(m, k.snapshots)
	}
	switch what := m.rand.IntN(9); {
	case what < 2 && k.owner.UID != "":
		m.must("destroy", m.request(func() error { _, err := m.svc.Destroy(ctx, k.owner.VMID); return err }))
		m.until(k.owner.VMID, agentlab.SandboxDestroyed)
		k.owner = agentlab.Sandbox{}
	case what < 3:
		k = m.use(id, k)
	case what == 3 && len(k.snapshots) < 3:
		name := m.fresh("snap")
		if m.answer(allowed, "save", func() error { _, err := m.workspaces.SaveSnapshot(ctx, id, name, ""); return err }) {
			k.snapshots[name] = known{text: k.text, sizeGB: k.sizeGB, formatted: k.formatted}
		}
	case what == 4 && snapshot != "":
		if m.answer(allowed, "restore", func() error { _, err := m.workspaces.RestoreSnapshot(ctx, id, snapshot); return err }) {
			saved := k.snapshots[snapshot]
			k.text, k.sizeGB, k.formatted = saved.text, saved.sizeGB, saved.formatted
		}
	case what == 5 && len(m.want) < 6:
		m.fork(id, k, "", allowed)
	case what == 6:
		if m.answer(allowed, "resize", func() error { _, err := m.workspaces.Resize(ctx, id, k.sizeGB+1); return err }) {
			k.sizeGB++
		}
	case what == 7 && k.trashed:
		m.must("undelete", m.request(func() error { _, err := m.workspaces.Undelete(ctx, id, ""); return err }))
		k.trashed = false
	case what == 7:
		k.trashed = m.answer(allowed, "delete", func() error { _, err := m.workspaces.Delete(ctx, id, false); return err })
	case what == 8 && len(m.want) > 4:
		if m.answer(k.owner.UID == "", "purge", func() error { _, err := m.workspaces.Delete(ctx, id, true); return err }) {
			delete(m.want, id)
			return
		}
	}
	m.want[id] = k
}

func (m *model) must(what string, err error) {
	m.Helper()
	if m.Log(what); err != nil {
		m.Fatalf("%s: %v", what, err)
	}
}

// answer requests an operation, which must succeed if it is allowed and otherwise be
// refused with conflict.
func (m *model) answer(allowed bool, what string, fn func() error) bool {
	m.Helper()
	if !allowed {
		if err := fn(); agentlab.CodeOf(err) != agentlab.CodeConflict {
			m.Fatalf("%s was not refused: %v", what, err)
		}
		return false
	}
	m.must(what, m.request(fn))
	return true
}

// use creates a sandbox with a workspace, reads the note of the last one, and writes
// another one.
func (m *model) use(id string, k known) known {
	m.Helper()
	var sb agentlab.Sandbox
	r := agentlab.SandboxRequest{Workspace: &agentlab.WorkspaceSelection{Workspace: id}}
	create := func() (err error) { sb, err = m.svc.Create(m.Context(), r); return err }
	if !m.answer(k.owner.UID == "" && !k.trashed, "use", create) {
		return k
	}
	m.until(sb.VMID, agentlab.SandboxReady)
	if got := m.sh(sb, "cat /work/note"); got != k.text {
		m.Fatalf("workspace %s has the note %q, not %q", id, got, k.text)
	}
	k.text, k.owner, k.formatted = m.fresh("note"), sb, true
	m.sh(sb, "echo "+k.text+" > /work/note")
	return k
}

func (m *model) fork(id string, k known, snapshot string, allowed bool) (copied string) {
	m.Helper()
	var v agentlab.Workspace
	name := m.fresh("ws")
	if m.answer(allowed, "fork", func() (err error) { v, err = m.workspaces.Fork(m.Context(), id, name, snapshot); return err }) {
		k.snapshots = map[string]known{}
		m.want[v.ID] = k
	}
	return v.ID
}

// check compares the rows and the backend with the model.
func (m *model) check() {
	m.Helper()
	rows, err := m.store.Workspaces(m.Context())
	if err != nil {
		m.Fatal(err)
	}
	volumes, err := m.driver.ListVolumes(m.Context())
	if err != nil || len(rows) != len(m.want) || len(volumes) != len(m.want) {
		m.Fatalf("%d rows and %d volumes, want %d; %v", len(rows), len(volumes), len(m.want), err)
	}
	saved := 0
	for _, v := range rows {
		k, state := m.want[v.ID], agentlab.WorkspaceReady
		if k.trashed {
			state = agentlab.WorkspaceTrashed
		}
		if v.State != state || v.SizeGB != k.sizeGB || v.Formatted != k.formatted || m.attachedTo(v.ID) != k.owner.UID || (len(m.leases(v.ID)) == 1) != (k.owner.UID != "") {
			m.Fatalf("%+v, attached to %q, leases %v, want %+v", v, m.attachedTo(v.ID), m.leases(v.ID), k)
		}
		list, err := m.workspaces.Snapshots(m.Context(), v.ID)
		if err != nil || len(list) != len(k.snapshots) {
			m.Fatalf("%+v, want %+v; %v", list, k.snapshots, err)
		}
		saved += len(list)
	}
	if list, err := m.driver.VolumeSnapshots(m.Context()); err != nil || len(list) != saved {
		m.Fatalf("the backend has %d snapshots, the database %d; %v", len(list), saved, err)
	}
	for _, vol := range volumes {
		if vol.Partial {
			m.Fatalf("%+v", vol)
		}
	}
}

// readAll reads the note of a workspace and of its snapshots.
func (m *model) readAll(id string) {
	m.Helper()
	k := m.want[id]
	if k.owner.UID != "" {
		m.gone(k.owner.VMID)
		k.owner = agentlab.Sandbox{}
	}
	if k.trashed {
		m.must("undelete", m.request(func() error { _, err := m.workspaces.Undelete(m.Context(), id, ""); return err }))
		k.trashed = false
	}
	m.gone(m.use(id, k).owner.VMID)
	for _, name := range slices.Sorted(maps.Keys(k.snapshots)) {
		copied := m.fork(id, k.snapshots[name], name, true)
		m.gone(m.use(copied, m.want[copied]).owner.VMID)
	}
}

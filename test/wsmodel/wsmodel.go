// Package wsmodel makes random operations on workspaces, with a daemon that is killed in
// them, and compares the result with a model.
package wsmodel

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/agentlab-vm/agentlab"
)

// System is an installation. Its methods fail the test after an error that they do not
// return. Errors have the codes of the service of workspaces.
type System interface {
	// Request calls fn, which requests an operation, and returns its result when the
	// operation is complete. With kill the daemon is killed at a random point of it.
	Request(kill bool, fn func() error) error

	Create(name string, sizeGB int) (id string, err error)
	Fork(id, name, snapshot string) (copied string, err error)
	Save(id, name string, attached bool) error // attached: also while a sandbox has it
	Restore(id, snapshot string) error
	Resize(id string, sizeGB int) error
	Delete(id string, purge bool) error
	Undelete(id string) error

	Start(id string) (vmid int, err error) // a sandbox that has the workspace
	Destroy(vmid int) error
	Await(vmid int, s agentlab.SandboxState)
	Exchange(vmid int, text string) (old string) // of the file note in the workspace

	// Observe returns all workspaces by ID. It fails the test if the backend has other
	// volumes or snapshots than the database, or anything partial.
	Observe(want map[string]Known) map[string]Seen
}

// Known is what a workspace must have.
type Known struct {
	Text      string // of the file note; "" if there is none
	SizeGB    int
	Formatted bool // a guest has mounted it
	Snapshots map[string]Known
	Owner     int // VMID of the sandbox that has it; 0 if none has
	Trashed   bool
}

// Seen is what a workspace has.
type Seen struct {
	SizeGB    int
	Snapshots []string
	Owner     int // VMID of the sandbox that has its lease and, on the backend, its volume
	Trashed   bool
}

// Limits bound a run.
type Limits struct {
	Steps  int
	Starts int // sandboxes in these steps; 0 means no limit
	Reads  int // workspaces that are read at the end, with their snapshots; 0 means all
}

// Run makes random operations, and compares the workspaces with the model after each.
// At the end it reads what they and their snapshots have.
func Run(t testing.TB, s System, random *rand.Rand, l Limits) {
	t.Helper()
	m := &model{TB: t, sys: s, rand: random, left: l.Starts, want: map[string]Known{}}
	if l.Starts == 0 {
		m.left = l.Steps
	}
	for range l.Steps {
		m.operate()
		m.check()
	}
	ids := slices.Sorted(maps.Keys(m.want))
	random.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
	if l.Reads > 0 {
		ids = ids[:min(l.Reads, len(ids))]
	}
	for _, id := range ids {
		m.readAll(id)
	}
}

type model struct {
	testing.TB
	sys   System
	rand  *rand.Rand
	want  map[string]Known
	count int // for names and texts that are new
	left  int // sandboxes that may be started
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

// request requests an operation, with a daemon that is often killed in it.
func (m *model) request(fn func() error) error {
	m.Helper()
	return m.sys.Request(m.rand.IntN(3) == 0, fn)
}

func (m *model) operate() {
	m.Helper()
	if len(m.want) < 2 || len(m.want) < 5 && m.rand.IntN(6) == 0 {
		id := ""
		m.must("create", m.request(func() (err error) { id, err = m.sys.Create(m.fresh("ws"), 2); return err }))
		m.want[id] = Known{SizeGB: 2, Snapshots: map[string]Known{}}
		return
	}
	id := pick(m, m.want)
	k := m.want[id]
	allowed := k.Owner == 0 && !k.Trashed
	snapshot := ""
	if len(k.Snapshots) > 0 {
		snapshot = pick(m, k.Snapshots)
	}
	switch what := m.rand.IntN(9); {
	case what < 2 && k.Owner != 0:
		m.must("destroy", m.request(func() error { return m.sys.Destroy(k.Owner) }))
		m.sys.Await(k.Owner, agentlab.SandboxDestroyed)
		k.Owner = 0
	case what < 3 && (m.left > 0 || !allowed):
		k = m.use(id, k)
	case what == 3 && len(k.Snapshots) < 3:
		name := m.fresh("snap")
		attached := k.Owner != 0 && m.rand.IntN(2) == 0
		if m.answer(allowed || attached, "save", func() error { return m.sys.Save(id, name, attached) }) {
			k.Snapshots[name] = Known{Text: k.Text, SizeGB: k.SizeGB, Formatted: k.Formatted}
		}
	case what == 4 && snapshot != "":
		if m.answer(allowed, "restore", func() error { return m.sys.Restore(id, snapshot) }) {
			saved := k.Snapshots[snapshot]
			k.Text, k.SizeGB, k.Formatted = saved.Text, saved.SizeGB, saved.Formatted
		}
	case what == 5 && len(m.want) < 6:
		m.fork(id, k, "", allowed)
	case what == 6:
		if m.answer(allowed, "resize", func() error { return m.sys.Resize(id, k.SizeGB+1) }) {
			k.SizeGB++
		}
	case what == 7 && k.Trashed:
		m.must("undelete", m.request(func() error { return m.sys.Undelete(id) }))
		k.Trashed = false
	case what == 7:
		k.Trashed = m.answer(allowed, "delete", func() error { return m.sys.Delete(id, false) })
	case what == 8 && len(m.want) > 4:
		if m.answer(k.Owner == 0, "purge", func() error { return m.sys.Delete(id, true) }) {
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
func (m *model) use(id string, k Known) Known {
	m.Helper()
	vmid := 0
	if !m.answer(k.Owner == 0 && !k.Trashed, "use", func() (err error) { vmid, err = m.sys.Start(id); return err }) {
		return k
	}
	m.left--
	m.sys.Await(vmid, agentlab.SandboxReady)
	text := m.fresh("note")
	if got := m.sys.Exchange(vmid, text); got != k.Text {
		m.Fatalf("workspace %s has the note %q, not %q", id, got, k.Text)
	}
	k.Text, k.Owner, k.Formatted = text, vmid, true
	return k
}

func (m *model) fork(id string, k Known, snapshot string, allowed bool) (copied string) {
	m.Helper()
	name := m.fresh("ws")
	if m.answer(allowed, "fork", func() (err error) { copied, err = m.sys.Fork(id, name, snapshot); return err }) {
		k.Snapshots = map[string]Known{}
		m.want[copied] = k
	}
	return copied
}

// check compares the workspaces with the model.
func (m *model) check() {
	m.Helper()
	seen := m.sys.Observe(m.want)
	if len(seen) != len(m.want) {
		m.Fatalf("%d workspaces, want %d", len(seen), len(m.want))
	}
	for id, k := range m.want {
		s, ok := seen[id]
		slices.Sort(s.Snapshots)
		if !ok || s.Trashed != k.Trashed || s.SizeGB != k.SizeGB || s.Owner != k.Owner || !slices.Equal(s.Snapshots, slices.Sorted(maps.Keys(k.Snapshots))) {
			m.Fatalf("workspace %s is %+v, want %+v", id, s, k)
		}
	}
}

// readAll reads the note of a workspace and of its snapshots.
func (m *model) readAll(id string) {
	m.Helper()
	k := m.want[id]
	if k.Owner != 0 {
		m.end(k.Owner)
		k.Owner = 0
	}
	if k.Trashed {
		m.must("undelete", m.request(func() error { return m.sys.Undelete(id) }))
		k.Trashed = false
	}
	m.end(m.use(id, k).Owner)
	for _, name := range slices.Sorted(maps.Keys(k.Snapshots)) {
		copied := m.fork(id, k.Snapshots[name], name, true)
		m.end(m.use(copied, m.want[copied]).Owner)
	}
}

// end destroys a sandbox.
func (m *model) end(vmid int) {
	m.Helper()
	m.must("destroy", m.sys.Destroy(vmid))
	m.sys.Await(vmid, agentlab.SandboxDestroyed)
}

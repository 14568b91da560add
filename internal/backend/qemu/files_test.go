package qemu

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
	"github.com/agentlab-vm/agentlab/internal/vmdir"
)

// The uid alone names a sandbox. A foreign directory with the uid in its name
// does not hide it, and trash is found beside it.
func TestFind(t *testing.T) {
	d, f := still(t)
	sp := f.spec(1)
	if err := d.Create(t.Context(), sp); err != nil {
		t.Fatal(err)
	}
	whole := filepath.Join(d.sandboxes(), vmdir.Name(sp.VMID, sp.UID))
	copied := filepath.Join(d.sandboxes(), vmdir.Name(999, sp.UID)) // sorts before it
	if err := os.CopyFS(copied, os.DirFS(whole)); err != nil {
		t.Fatal(err)
	}
	trash := filepath.Join(d.sandboxes(), vmdir.TrashPrefix+filepath.Base(whole))
	if err := os.Mkdir(trash, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(d.sandboxes(), vmdir.Name(7, sp.UID)), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := d.find(sp.UID)
	if err != nil || got.Dir != whole || got.Trash != trash || got.VMID != sp.VMID || got.Spec.Name != sp.Name {
		t.Errorf("%+v, %v", got, err)
	}
	in, err := d.Inspect(t.Context(), backend.Ref{UID: sp.UID})
	if err != nil || in.Power != backend.PowerStopped || in.Ref.UID != sp.UID {
		t.Errorf("%+v, %v", in, err)
	}
	if list, err := d.List(t.Context()); err != nil || len(list) != 1 {
		t.Errorf("%+v, %v", list, err)
	}
	if err := d.Destroy(t.Context(), backend.Ref{UID: sp.UID}); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(copied); err != nil || fileExists(whole) || fileExists(trash) {
		t.Errorf("after Destroy: the copy: %v; the sandbox: %v, its trash: %v", err, fileExists(whole), fileExists(trash))
	}
	for _, uid := range []string{"", "../x", "a/../../b", uid(7)} {
		if _, err := d.Inspect(t.Context(), backend.Ref{UID: uid}); agentlab.CodeOf(err) != agentlab.CodeNotFound {
			t.Errorf("%q: %v", uid, err)
		}
	}
}

// The files of an older version of AgentLab can be started, and a supervisor of
// that version finds what it needs in those of this version.
func TestFilesOfAnOlderVersion(t *testing.T) {
	d, f := still(t)
	sp := f.spec(1)
	if err := d.Create(t.Context(), sp); err != nil {
		t.Fatal(err)
	}
	dir := d.dir(sp.Ref())
	const start = `{"version":1,"run_id":"old-1","pause_below":5,"reserved":[7],"upstream_proxy":{"url":"http://127.0.0.1:1"},` +
		`"qemu":"/usr/bin/qemu","accel":"tcg","tsc_khz":7,"tsc_fixed":true,"initrd":"/i"}`
	if err := os.WriteFile(filepath.Join(dir, "start.json"), []byte(start), 0o600); err != nil {
		t.Fatal(err)
	}
	vm, err := openVM(dir, supervisor.Hooks{})
	if err != nil {
		t.Fatal(err)
	}
	m := vm.(*machine)
	if m.Network().Mode != sp.Network.Mode || !slices.Equal(m.Disks(), []string{filepath.Join(dir, fileRoot)}) {
		t.Errorf("%+v, %q", m.Network(), m.Disks())
	}
	if b, err := json.Marshal(&m.cfg); err != nil || string(b) != start {
		t.Errorf("written again: %s, %v", b, err)
	}
}

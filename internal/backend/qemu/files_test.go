package qemu

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
)

func TestDirName(t *testing.T) {
	const vmid = 105
	mark := agentlab.NewUID()
	if got, uid, ok := parseDirName(dirName(vmid, mark)); !ok || got != vmid || uid != mark {
		t.Errorf("%q is read as %d, %q, %v", dirName(vmid, mark), got, uid, ok)
	}
	for _, bad := range []string{
		"", "105", "105-", "-" + mark, "0-" + mark, "0105-" + mark, "-1-" + mark, "105-../../etc/passwd/aaaaaaaaaa", "1-../x",
		"105-" + mark + "a", "105-" + strings.ToUpper(mark), "99999999999999999999-" + mark, trashPrefix + dirName(vmid, mark),
	} {
		if vmid, uid, ok := parseDirName(bad); ok {
			t.Errorf("%q is read as %d, %q", bad, vmid, uid)
		}
	}
}

// The uid alone names a sandbox. A foreign directory with the uid in its name
// does not hide it, and trash is found beside it.
func TestFind(t *testing.T) {
	d, f := still(t)
	sp := f.spec(1)
	if err := d.Create(t.Context(), sp); err != nil {
		t.Fatal(err)
	}
	whole := filepath.Join(d.sandboxes(), dirName(sp.VMID, sp.UID))
	copied := filepath.Join(d.sandboxes(), dirName(999, sp.UID)) // sorts before it
	if err := os.CopyFS(copied, os.DirFS(whole)); err != nil {
		t.Fatal(err)
	}
	trash := filepath.Join(d.sandboxes(), trashPrefix+filepath.Base(whole))
	if err := os.Mkdir(trash, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(d.sandboxes(), dirName(7, sp.UID)), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := d.find(sp.UID)
	if err != nil || got.dir != whole || got.trash != trash || got.vmid != sp.VMID || got.Spec.Name != sp.Name {
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

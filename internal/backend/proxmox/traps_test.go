package proxmox

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
	"github.com/agentlab-vm/agentlab/test/pvenode"
)

// Tests of the traps of Proxmox VE that the driver has to step around, by
// their number in the list that was made from the real one.

// Trap 13: a call that takes longer than 30 s is answered 596, and is carried
// out all the same. Without care the sandbox is taken for failed, or made
// twice.
func TestTrap13TimedOutAndDone(t *testing.T) {
	w := newWorld(t, worldConfig{})
	for i, point := range []string{
		"POST /nodes/{node}/qemu/{vmid}/clone done", "PUT /nodes/{node}/qemu/{vmid}/config done",
		"POST /nodes/{node}/qemu/{vmid}/clone", "PUT /nodes/{node}/qemu/{vmid}/config",
	} {
		spec := w.spec(1 + i)
		w.node.Fail(point, pvenode.Fault{Status: 596, Error: "Connection timed out"})
		err := w.driver.Create(t.Context(), spec)
		wantCode(t, point, err, agentlab.CodeUnknownOutcome)
		ok(t, "Create again", w.driver.Create(t.Context(), spec))
		ok(t, "Start", w.driver.Start(t.Context(), spec.Ref()))
		ok(t, "Destroy", w.driver.Destroy(t.Context(), spec.Ref()))
	}
	if left := w.left(t); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

// Trap 17: a clone waits one second for the lock of its template, so a change
// of the template during many clones makes clones fail. We do not change it,
// and retry if another client does.
func TestTrap17TemplateLocked(t *testing.T) {
	w := newWorld(t, worldConfig{})
	before := w.look(t, templateVMID)
	w.node.Fail("POST /nodes/{node}/qemu/{vmid}/clone", pvenode.Fault{Times: 2, Error: "can't lock file '/var/lock/qemu-server/lock-9000.conf' - got timeout"})
	spec := w.create(t, 1)
	ok(t, "Destroy", w.driver.Destroy(t.Context(), spec.Ref()))
	if now := w.look(t, templateVMID); now != before {
		t.Errorf("the template was\n%s\nand is\n%s", before, now)
	}
}

// Trap 18: a protected template gives sandboxes that cannot be destroyed,
// also when the process dies before it could take the protection away.
func TestTrap18ProtectedPartialClone(t *testing.T) {
	w := newWorld(t, worldConfig{})
	spec := w.spec(1)
	w.driver.crash = func(at string) {
		if at == "cloned" {
			panic(died{at})
		}
	}
	if err := (mortal{w.driver}).Create(t.Context(), spec); err == nil {
		t.Fatal("it did not die")
	}
	cfg, err := pve.New(w.root).Config(t.Context(), w.node.Name(), spec.VMID)
	ok(t, "config", err)
	if cfg["protection"] != "1" {
		t.Fatal("the clone did not inherit the protection: this test proves nothing")
	}
	ok(t, "Destroy", w.open().Destroy(t.Context(), spec.Ref()))
	if left := w.left(t); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

// Trap 19: linked clones live on the template's storage and refuse another;
// full clones take one.
func TestTrap19FullClone(t *testing.T) {
	w := newWorld(t, worldConfig{admin: true, alter: func(c *Config) { c.FullClone, c.Storage = true, "local" }})
	spec := w.create(t, 1)
	cfg, err := pve.New(w.root).Config(t.Context(), w.node.Name(), spec.VMID)
	ok(t, "config", err)
	if volid, _ := driveVolume(cfg["scsi0"]); !strings.HasPrefix(volid, "local:1001/") {
		t.Errorf("the disk is %s", cfg["scsi0"])
	}
	ok(t, "Start", w.driver.Start(t.Context(), spec.Ref()))
	ok(t, "Destroy", w.driver.Destroy(t.Context(), spec.Ref()))
	if left := w.left(t); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

// Traps 22 and 23: the snippet is read at every cold start, and a changed
// content makes the guest initialise itself again. So it is written once, is
// not changed while the VM exists, and is removed with the VM. It contains no
// secret.
func TestTrap22Trap23Snippet(t *testing.T) {
	w := newWorld(t, worldConfig{shell: true})
	dir := w.snippets
	spec := w.create(t, 1)
	read := func() string {
		t.Helper()
		names, err := filepath.Glob(filepath.Join(dir, "agentlab-*"))
		ok(t, "snippets", err)
		if len(names) != 1 {
			t.Fatalf("snippets: %q", names)
		}
		text, err := os.ReadFile(names[0])
		ok(t, "snippet", err)
		return string(text)
	}
	before := read()
	for range 2 {
		ok(t, "Start", w.driver.Start(t.Context(), spec.Ref()))
		ok(t, "Stop", w.driver.Stop(t.Context(), spec.Ref(), 0))
		ok(t, "Create again", w.open().Create(t.Context(), spec))
	}
	if now := read(); now != before {
		t.Errorf("the snippet was\n%s\nand is\n%s", before, now)
	}
	key, err := os.ReadFile(filepath.Join(w.dir, Name, "master.key"))
	ok(t, "key", err)
	if strings.Contains(before, string(key)) || !strings.Contains(before, "sb-1") {
		t.Errorf("the snippet is\n%s", before)
	}
	orphan := strings.Replace(filepath.Base(must1(t, filepath.Join(dir, "agentlab-*"))), "-1001-", "-1007-", 1)
	foreign := "agentlab-ffffffffffffffff" + orphan[len("agentlab-ffffffffffffffff"):]
	for _, name := range []string{orphan, foreign, "agentlab-notes.yaml"} {
		ok(t, "write", os.WriteFile(filepath.Join(dir, name), []byte("x"), 0o600))
	}
	ok(t, "Destroy", w.driver.Destroy(t.Context(), spec.Ref()))
	w.open()
	if _, err := w.driver.List(t.Context()); err != nil {
		t.Fatal(err)
	}
	names, err := filepath.Glob(filepath.Join(dir, "*"))
	ok(t, "snippets", err)
	for i := range names {
		names[i] = filepath.Base(names[i])
	}
	if got := strings.Join(names, " "); got != foreign+" agentlab-notes.yaml" && got != "agentlab-notes.yaml "+foreign {
		t.Errorf("left in the snippets storage: %s", got)
	}
}

func must1(t *testing.T, pattern string) string {
	t.Helper()
	names, err := filepath.Glob(pattern)
	if err != nil || len(names) != 1 {
		t.Fatalf("%s: %q, %v", pattern, names, err)
	}
	return names[0]
}

// Trap 31: a shutdown holds the VM's lock as long as it waits for the guest;
// a stop that comes meanwhile fails, unless it ends the shutdown.
func TestTrap31StopDuringShutdown(t *testing.T) {
	w := newWorld(t, worldConfig{})
	spec := w.create(t, 1)
	ok(t, "Start", w.driver.Start(t.Context(), spec.Ref()))
	w.farm.mu.Lock()
	w.farm.machines[spec.VMID].Deaf = true
	w.farm.mu.Unlock()
	asked := make(chan struct{})
	w.node.Fail("shutdown.wait", pvenode.Fault{Reached: func() { close(asked) }})
	data, err := w.root.Call(t.Context(), pve.Post, w.vmPath(spec.VMID)+"/status/shutdown", map[string][]string{"timeout": {"600"}})
	ok(t, "shutdown", err)
	<-asked
	ok(t, "Stop", w.driver.Stop(t.Context(), spec.Ref(), 0))
	if in := w.inspect(t, spec.Ref()); in.Power != backend.PowerStopped {
		t.Errorf("%+v (%s)", in, data)
	}
	ok(t, "Start", w.driver.Start(t.Context(), spec.Ref()))
	w.farm.mu.Lock()
	w.farm.machines[spec.VMID].Deaf = true
	w.farm.mu.Unlock()
	ok(t, "Stop of a deaf guest", w.driver.Stop(t.Context(), spec.Ref(), time.Second))
	if in := w.inspect(t, spec.Ref()); in.Power != backend.PowerStopped {
		t.Errorf("%+v", in)
	}
}

// Trap 32: a lock that a killed task left stays until root removes it on the
// node: over REST the error names the remedy, over the shell the lock is
// removed.
func TestTrap32StaleLock(t *testing.T) {
	both(t, func(t *testing.T, shell bool) {
		w := newWorld(t, worldConfig{shell: shell})
		for i, point := range []string{"clone.config", "clone.volume", "clone.volumes"} {
			spec := w.spec(1 + i)
			w.node.Fail(point, pvenode.Fault{Kill: true, VMID: spec.VMID})
			err := w.driver.Create(t.Context(), spec)
			if err == nil {
				t.Fatalf("%s: the clone was not killed", point)
			}
			err = w.driver.Destroy(t.Context(), spec.Ref())
			if shell {
				ok(t, point+": Destroy", err)
				continue
			}
			wantCode(t, point+": Destroy", err, agentlab.CodeDenied)
			if hint := agentlab.HintOf(err); !strings.Contains(hint, "qm unlock") {
				t.Errorf("hint %q", hint)
			}
		}
		if shell {
			if left := w.left(t); len(left) > 0 {
				t.Errorf("left: %q", left)
			}
		}
	})
}

// Trap 34: a volume that could not be freed does not fail the destruction of
// its VM. Without a check of the storage it stays, under a number that is used
// again.
func TestTrap34VolumeLeft(t *testing.T) {
	w := newWorld(t, worldConfig{admin: true})
	spec := w.create(t, 1)
	w.node.Fail("free", pvenode.Fault{Error: "zfs error: cannot destroy 'rpool/data/vm-1001-disk-0': I/O error", Times: 1, VMID: spec.VMID})
	ok(t, "Destroy", w.driver.Destroy(t.Context(), spec.Ref()))
	if left := w.left(t); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
	if n := w.node.Calls()["DELETE /nodes/{node}/storage/{storage}/content/{volume}"]; n == 0 {
		t.Error("no volume was left: this test proves nothing")
	}
}

// Trap 2: volumes may lie about under a number that no VM has. A sandbox
// with that number must not take them for its own.
func TestTrap02OrphanedVolumes(t *testing.T) {
	w := newWorld(t, worldConfig{admin: true})
	path := "/nodes/" + w.node.Name() + "/storage/local-zfs/content"
	ok(t, "alloc", w.admin(t, pve.Post, path, map[string][]string{"vmid": {"1001"}, "filename": {"vm-1001-precious"}, "size": {"1M"}}))
	spec := w.spec(1)
	w.elsewhere(t, spec)
	ok(t, "Destroy", w.driver.Destroy(t.Context(), spec.Ref()))
	w.create(t, 2)
	ok(t, "Destroy", w.driver.Destroy(t.Context(), w.spec(2).Ref()))
	if left := w.left(t); len(left) != 1 || left[0] != "local-zfs:vm-1001-precious" {
		t.Errorf("left: %q", left)
	}
}

// Trap 28: a change that cannot be made stays pending, GET config shows it as
// if it were made, and the VM starts without it. A client that checks only
// that starts a sandbox with a hidden disk.
func TestTrap28HiddenDisk(t *testing.T) {
	both(t, func(t *testing.T, shell bool) {
		w := newWorld(t, worldConfig{shell: shell})
		spec := w.create(t, 1)
		ok(t, "Start", w.driver.Start(t.Context(), spec.Ref()))
		path := w.vmPath(spec.VMID)
		ok(t, "attach", w.admin(t, pve.Put, path+"/config", map[string][]string{"scsi1": {"local-zfs:1"}}))
		ok(t, "snapshot", w.admin(t, pve.Post, path+"/snapshot", map[string][]string{"snapname": {"before"}}))
		if err := w.admin(t, pve.Put, path+"/config", map[string][]string{"delete": {"scsi1"}, "force": {"1"}}); err == nil {
			t.Fatal("the disk could be deleted: this test proves nothing")
		}
		ok(t, "Stop", w.driver.Stop(t.Context(), spec.Ref(), 0))
		cfg, err := pve.New(w.root).Config(t.Context(), w.node.Name(), spec.VMID)
		ok(t, "config", err)
		if cfg["scsi1"] != "" {
			t.Fatal("the disk is to be seen: this test proves nothing")
		}
		wantCode(t, "Start", w.open().Start(t.Context(), spec.Ref()), agentlab.CodeDenied)
		ok(t, "revert", w.admin(t, pve.Put, path+"/config", map[string][]string{"revert": {"scsi1"}}))
		wantCode(t, "Start", w.driver.Start(t.Context(), spec.Ref()), agentlab.CodeDenied)
	})
}

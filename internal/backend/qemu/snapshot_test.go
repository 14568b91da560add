package qemu

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/durable"
)

// bootID returns the boot ID of the guest, which answers.
func (b *box) bootID() string {
	b.Helper()
	h, err := b.client().Health(b.ctx)
	b.ok(err)
	return h.BootID
}

// save saves the sandbox.
func (b *box) save() backend.SnapshotRef {
	b.Helper()
	s, err := b.d.SaveSnapshot(b.ctx, b.ref, agentlab.NewUID())
	b.ok(err)
	return s.Ref
}

// A fork that this host cannot continue does not boot by itself.
func TestForkOfAnotherMachine(t *testing.T) {
	d, f := still(t)
	sp, child := f.spec(1), f.spec(2)
	refs := layered(t, d, sp, 1)
	dir := filepath.Join(d.snapshots(), refs[0].UID)
	for _, name := range []string{fileMemory, fileDevices} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	saved := savedMemory{Version: memoryVersion, Machine: "other", DiskSize: 3 << 30}
	if err := durable.ReplaceJSON(filepath.Join(dir, fileMemoryState), saved, durable.None); err != nil {
		t.Fatal(err)
	}
	child.From = &refs[0]
	if err := d.Create(t.Context(), child); err != nil {
		t.Fatal(err)
	}
	if in, err := d.Inspect(t.Context(), child.Ref()); err != nil || in.Power != backend.PowerStopped {
		t.Errorf("%+v, %v", in, err)
	}
	box, err := d.find(child.UID)
	if err != nil {
		t.Fatal(err)
	}
	if load, err := d.memoryOf(box, startConfig{Key: "this"}); load || agentlab.CodeOf(err) != agentlab.CodeUnsupported || agentlab.HintOf(err) == "" {
		t.Errorf("%v, %v", load, err)
	}
	if load, err := d.memoryOf(box, startConfig{Key: "other"}); !load || err != nil {
		t.Errorf("%v, %v", load, err)
	}
	if err := d.Stop(t.Context(), child.Ref(), 0); err != nil {
		t.Fatal(err)
	}
	if load, err := d.memoryOf(box, startConfig{Key: "this"}); load || err != nil {
		t.Errorf("after a stop: %v, %v", load, err)
	}
	if _, err := os.Lstat(filepath.Join(box.Dir, fileMemory)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the memory is left: %v", err)
	}
}

// A snapshot that cannot be read is not lost: it is listed as partial, and stays.
func TestDamagedSnapshot(t *testing.T) {
	d, f := still(t)
	refs := layered(t, d, f.spec(1), 1)
	path := filepath.Join(d.snapshots(), refs[0].UID, fileSnapshot)
	for text, code := range map[string]agentlab.Code{"{": agentlab.CodeInternal, `{"version":9}`: agentlab.CodeUnsupported} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if all, err := d.Snapshots(t.Context()); err != nil || len(all) != 1 || !all[0].Partial || all[0].Ref != refs[0] {
			t.Errorf("%s: %+v, %v", text, all, err)
		}
		if err := d.RestoreSnapshot(t.Context(), refs[0]); agentlab.CodeOf(err) != code {
			t.Errorf("%s: %v", text, err)
		}
		if _, err := d.SaveSnapshot(t.Context(), refs[0].Of, refs[0].UID); agentlab.CodeOf(err) != code {
			t.Errorf("%s: %v", text, err)
		}
	}
	if err := d.DeleteSnapshot(t.Context(), refs[0]); err != nil {
		t.Error(err)
	}
	if all, err := d.Snapshots(t.Context()); err != nil || len(all) != 0 {
		t.Errorf("%+v, %v", all, err)
	}
}

// A snapshot whose memory has disappeared is not one of a stopped sandbox: it
// gives nothing that would boot instead of continuing.
func TestSnapshotWithoutItsMemory(t *testing.T) {
	d, f := still(t)
	sp, child := f.spec(1), f.spec(2)
	refs := layered(t, d, sp, 2)
	path := filepath.Join(d.snapshots(), refs[0].UID, fileSnapshot)
	var saved savedSnapshot
	err := durable.ReadJSON(path, &saved)
	if err == nil {
		saved.Memory = true
		err = durable.ReplaceJSON(path, saved, durable.None)
	}
	if err != nil {
		t.Fatal(err)
	}
	child.From = &refs[0]
	for what, call := range map[string]func() error{
		"Create":          func() error { return d.Create(t.Context(), child) },
		"RestoreSnapshot": func() error { return d.RestoreSnapshot(t.Context(), refs[0]) },
	} {
		if err := call(); err == nil || !strings.Contains(err.Error(), "memory is missing") {
			t.Errorf("%s: %v", what, err)
		}
	}
	wantBlocks(t, d.dir(sp.Ref()), 2)
	if _, err := os.Lstat(filepath.Join(d.dir(child.Ref()), fileRoot)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the copy has a disk: %v", err)
	}
}

// Only the memory of a sandbox that was suspended to disk is its own. That of a
// template, a fork and a restored snapshot is not, nor what is saved before the guest
// has its identity.
func TestOwnMemory(t *testing.T) {
	from := t.TempDir()
	err := durable.ReplaceJSON(filepath.Join(from, fileMemoryState), savedMemory{Version: memoryVersion}, durable.None)
	for _, name := range []string{fileMemory, fileDevices} {
		err = errors.Join(err, os.WriteFile(filepath.Join(from, name), nil, 0o600))
	}
	if err != nil {
		t.Fatal(err)
	}
	if s, err := readMemory(from); err != nil || !s.own() {
		t.Errorf("suspended to disk: %+v, %v", s, err)
	}
	for _, as := range []memoryAs{memoryTemplate, memoryFork, memorySuspended} {
		to := t.TempDir()
		if err := copyMemory(from, to, copyOf{memory: as}); err != nil {
			t.Fatal(err)
		}
		if s, err := readMemory(to); err != nil || s.own() {
			t.Errorf("copy %d: %+v, %v", as, s, err)
		}
		m := &machine{dir: to}
		if m.reused() {
			t.Errorf("copy %d: it is in use before it was loaded", as)
		}
		if err := renameMemory(to, fileMemoryState, fileMemoryUsed); err != nil {
			t.Fatal(err)
		}
		if !m.reused() {
			t.Errorf("copy %d: what is saved before the identity counts as its own", as)
		}
	}
}

// A guest that is restored to an old memory has the same identity already. When it
// gets it again, its clock is right, its random values are new, its network is
// open, and the rest stays.
func TestIdentityAfterRestore(t *testing.T) {
	const (
		same   = `cat /proc/sys/kernel/random/boot_id /etc/machine-id /etc/ssh/ssh_host_ed25519_key.pub; hostname`
		random = `echo uuid $(cat /proc/sys/kernel/random/uuid); echo urandom $(od -An -tx1 -N16 /dev/urandom | tr -d ' ')
python3 -c 'import os, secrets; print("getrandom", os.getrandom(16).hex()); print("secrets", secrets.token_hex(16))'`
	)
	b := newBox(t, warmFixture(t), nil)
	b.boot()
	b.identify()
	before := b.output(same)
	b.output("date -s 2021-02-03") // as if it was saved long ago
	snap := b.save()
	r := randoms{TB: t, seen: map[string]string{}}
	for n := range 2 {
		b.ok(b.d.RestoreSnapshot(b.ctx, snap))
		b.ok(b.d.Resume(b.ctx, b.ref))
		eventually(t, bootTimeout, "the guest answers", func() error { _, err := b.client().Health(b.ctx); return err })
		if year := b.output("date +%Y"); year != "2021" {
			t.Errorf("before the identity its clock has the year %s", year)
		}
		if n == 1 { // a suspension does not renew its random values
			b.ok(b.d.SuspendToDisk(b.ctx, b.ref))
			b.ok(b.d.Resume(b.ctx, b.ref))
			eventually(t, bootTimeout, "the guest answers", func() error { _, err := b.client().Health(b.ctx); return err })
		}
		if got := b.output(reach); got != "held" {
			t.Errorf("restore %d: before the identity its network is %s", n, got)
		}
		b.identify()
		asked := time.Now()
		now, err := strconv.ParseInt(b.output("date +%s"), 10, 64)
		if at := time.Unix(now, 0); err != nil || at.Before(asked.Add(-time.Minute)) || at.After(time.Now().Add(time.Minute)) {
			t.Errorf("its clock says %s, ours %s, %v", at, asked, err)
		}
		r.add(fmt.Sprintf("restore %d", n), b.output(random), 4)
		eventually(t, bootTimeout, "an open network after the identity", func() error { // it resolves the address of the gateway again
			if got := b.output(reach); got != "open" {
				return errors.New(got)
			}
			return nil
		})
		if after := b.output(same); after != before {
			t.Errorf("before: %q, after: %q", before, after)
		}
	}
	b.ok(b.d.SuspendToDisk(b.ctx, b.ref)) // its own memory, once
	b.ok(b.d.Resume(b.ctx, b.ref))
	eventually(t, bootTimeout, "an open network without an identity", func() error {
		if got := b.output(reach); got != "open" {
			return errors.New(got)
		}
		return nil
	})
}

// A disk that was exported has what a guest has written, in all layers, and boots. The
// disk of a guest that runs is not exported.
func TestExportDisk(t *testing.T) {
	b := newBox(t, warmFixture(t), nil)
	b.boot()
	b.output("echo first >/root/first; sync")
	b.save() // what follows is in another layer
	b.output("echo second >/root/second; sync")
	path := filepath.Join(t.TempDir(), "root.img")
	if err := b.d.ExportDisk(b.ctx, b.ref, path); agentlab.CodeOf(err) != agentlab.CodeConflict {
		t.Errorf("of a running guest: %v", err)
	}
	b.ok(b.d.Stop(b.ctx, b.ref, time.Minute))
	b.ok(b.d.ExportDisk(b.ctx, b.ref, path))
	if err := b.d.ExportDisk(b.ctx, b.ref, path); agentlab.CodeOf(err) != agentlab.CodeExists {
		t.Errorf("to a file that exists: %v", err)
	}
	f := vmFixture(t)
	f.Image.Ref, f.Image.RootDisk = "exported@"+strings.Repeat("0", 20), path
	other := newBox(t, f, nil)
	other.boot()
	if out := other.output("cat /root/first /root/second"); out != "first\nsecond" {
		t.Errorf("the exported disk has %q", out)
	}
}

//go:build linux

package guestd

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
)

// loopVolume returns an empty disk.
func loopVolume(t *testing.T) volume {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: it mounts disks")
	}
	img := filepath.Join(t.TempDir(), "disk")
	v := volume{bytes: 64 << 20}
	if err := os.WriteFile(img, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(img, v.bytes); err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), "losetup", "--find", "--show", img).CombinedOutput()
	if err != nil {
		t.Fatalf("losetup: %v %s", err, out)
	}
	v.dev = strings.TrimSpace(string(out))
	t.Cleanup(func() { _ = exec.Command("losetup", "--detach", v.dev).Run() })
	return v
}

// mountDir returns a directory of another file system than the root directory, from
// which everything is unmounted at the end.
func mountDir(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "work")
	t.Cleanup(func() { unprotect(dir) })
	return dir
}

// unprotect makes it possible to delete a directory at which a volume was mounted.
func unprotect(dir string) {
	_ = unix.Unmount(dir, unix.MNT_DETACH)
	_ = exec.Command("chattr", "-i", dir).Run()
}

func damage(t *testing.T, v volume, at int64, with string) {
	t.Helper()
	f, err := os.OpenFile(v.dev, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte(with), at); err != nil {
		t.Fatal(err)
	}
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
}

// A workspace is created once and keeps what is in it.
func TestWorkspaceMount(t *testing.T) {
	v := loopVolume(t)
	dir := mountDir(t)
	ctx := t.Context()
	if _, err := v.mount(ctx, dir, false, 1000, 1000); agentlab.CodeOf(err) != agentlab.CodeConflict {
		t.Fatalf("an empty disk is mounted: %v", err)
	}
	ws, err := v.mount(ctx, dir, true, 1000, 1000)
	if err != nil || !ws.New || ws.Bytes < 32<<20 || ws.Used > ws.Bytes {
		t.Fatalf("%+v, %v", ws, err)
	}
	if fi, err := os.Stat(dir); err != nil || fi.Sys().(*syscall.Stat_t).Uid != 1000 {
		t.Errorf("its owner: %+v, %v", fi, err)
	}
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, []byte("kept"), 0o600); err != nil {
		t.Fatal(err)
	}
	if again, err := v.mount(ctx, dir, true, 1000, 1000); err != nil || again.New {
		t.Errorf("mounted again: %+v, %v", again, err)
	}
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := unmount(dir); agentlab.CodeOf(err) != agentlab.CodeBusy || !strings.Contains(err.Error(), "guestd.test") {
		t.Errorf("it is unmounted while a process uses it: %v", err)
	}
	_ = f.Close()
	for range 2 {
		if err := unmount(dir); err != nil {
			t.Fatal(err)
		}
	}

	if ws, err := v.mount(ctx, dir, true, 1000, 1000); err != nil || ws.New {
		t.Errorf("mounted again: %+v, %v", ws, err)
	}
	if text, err := os.ReadFile(file); string(text) != "kept" {
		t.Errorf("its file has %q, %v", text, err)
	}
	other := loopVolume(t)
	if _, err := other.mount(ctx, dir, true, 1000, 1000); agentlab.CodeOf(err) != agentlab.CodeConflict {
		t.Errorf("it is mounted over another one: %v", err)
	}
}

// Nothing can be written to the mount point of a workspace that is not mounted.
func TestMountPointIsProtected(t *testing.T) {
	v, dir := loopVolume(t), mountDir(t)
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(dir, 1000, 1000); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if _, err := v.mount(t.Context(), dir, true, 1000, 1000); err != nil {
			t.Fatal(err)
		}
		if err := unmount(dir); err != nil {
			t.Fatal(err)
		}
		var st unix.Stat_t
		if err := unix.Stat(dir, &st); err != nil || st.Uid != 0 || st.Mode&0o777 != 0o555 {
			t.Errorf("owner %d, mode %o, %v", st.Uid, st.Mode, err)
		}
		attrs, err := exec.CommandContext(t.Context(), "lsattr", "-d", dir).Output()
		t.Logf("%s %v", attrs, err)
		if strings.Contains(strings.SplitN(string(attrs), " ", 2)[0], "i") {
			if err := os.WriteFile(filepath.Join(dir, "file"), nil, 0o600); err == nil {
				t.Error("root can write to it")
			}
		}
	}
}

// A file system whose creation was interrupted is created again, as long as the
// controller allows it; any other disk is not changed.
func TestWorkspaceIsFormattedOnce(t *testing.T) {
	v := loopVolume(t)
	ctx := t.Context()
	if out, err := tool(ctx, "mkfs.ext4", "-q", "-F", v.dev, "63M"); err != nil { // all but the last steps
		t.Fatalf("%v %s", err, out)
	}
	if err := v.mark(true); err != nil {
		t.Fatal(err)
	}
	if ws, err := v.prepare(ctx, true); err != nil || !ws.New {
		t.Errorf("incomplete: %+v, %v", ws, err)
	}
	if ws, err := v.prepare(ctx, true); err != nil || ws.New {
		t.Errorf("complete: %+v, %v", ws, err)
	}
	const foreign = "a partition table or somebody's data"
	damage(t, v, 1024, foreign+strings.Repeat("\x00", 512))
	if _, err := v.prepare(ctx, false); agentlab.CodeOf(err) != agentlab.CodeConflict {
		t.Errorf("foreign: %v", err)
	}
	if sb, err := superblock(v.dev); err != nil || !strings.HasPrefix(string(sb), foreign) {
		t.Errorf("a foreign disk was changed: %q, %v", sb[:40], err)
	}
}

// A disk that may hold files gets no new file system, even if the controller permits it.
func TestNoFileSystemIsCreatedOverData(t *testing.T) {
	zeros := strings.Repeat("\x00", 1<<20)
	for name, destroy := range map[string]func(v volume){
		"superblock": func(v volume) { damage(t, v, sbOffset, zeros[:1024]) },
		"beginning":  func(v volume) { damage(t, v, 0, zeros) },
		"label": func(v volume) {
			if out, err := tool(t.Context(), "tune2fs", "-L", "", v.dev); err != nil {
				t.Fatalf("%v %s", err, out)
			}
		},
		"foreign": func(v volume) {
			for at := int64(0); at < v.bytes; at += 1 << 20 {
				damage(t, v, at, zeros)
			}
			damage(t, v, 446, "a partition table")
		},
	} {
		t.Run(name, func(t *testing.T) {
			v, dir := loopVolume(t), mountDir(t)
			if _, err := v.mount(t.Context(), dir, true, 1000, 1000); err != nil {
				t.Fatal(err)
			}
			if err := unmount(dir); err != nil {
				t.Fatal(err)
			}
			destroy(v)
			if ws, err := v.prepare(t.Context(), true); agentlab.CodeOf(err) != agentlab.CodeConflict || !strings.Contains(err.Error(), "not empty") {
				t.Errorf("%+v, %v", ws, err)
			}
		})
	}
}

// Damage that needs a decision is reported; the disk is not mounted.
func TestDamagedWorkspaceIsRefused(t *testing.T) {
	v := loopVolume(t)
	dir := mountDir(t)
	ctx := t.Context()
	if _, err := v.mount(ctx, dir, true, 1000, 1000); err != nil {
		t.Fatal(err)
	}
	if err := unmount(dir); err != nil {
		t.Fatal(err)
	}
	// The root directory's inode, and the state "has errors".
	if out, err := tool(ctx, "debugfs", "-w", "-R", "clri <2>", v.dev); err != nil {
		t.Fatalf("%v %s", err, out)
	}
	if out, err := tool(ctx, "debugfs", "-w", "-R", "ssv state 2", v.dev); err != nil {
		t.Fatalf("%v %s", err, out)
	}
	if _, err := v.mount(ctx, dir, true, 1000, 1000); agentlab.CodeOf(err) != agentlab.CodeConflict || !strings.Contains(err.Error(), "damaged") {
		t.Errorf("it is mounted: %v", err)
	}
}

// The disk is found by its serial number, also if another disk is larger.
func TestFindVolume(t *testing.T) {
	blocks := t.TempDir()
	for name, serial := range map[string]string{"vda": "root", "vdb": "agentlab-work\n", "loop0": ""} {
		dir := filepath.Join(blocks, name)
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if serial != "" {
			if err := os.WriteFile(filepath.Join(dir, "serial"), []byte(serial), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.WriteFile(filepath.Join(dir, "size"), []byte("4096\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if v, err := findVolume(t.Context(), blocks, 1, 0); err != nil || v != (volume{dev: "/dev/vdb", bytes: 2 << 20}) {
		t.Errorf("%+v, %v", v, err)
	}
	if _, err := findVolume(t.Context(), blocks, 3<<20, 0); agentlab.CodeOf(err) != agentlab.CodeConflict {
		t.Errorf("it is too small: %v", err)
	}
	if err := os.WriteFile(filepath.Join(blocks, "vdb", "size"), []byte("0\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := findVolume(t.Context(), blocks, 1, 0); agentlab.CodeOf(err) != agentlab.CodeNotFound {
		t.Errorf("it is empty: %v", err)
	}
	scsi := filepath.Join(blocks, "sdb", "device")
	if err := errors.Join(os.RemoveAll(filepath.Join(blocks, "vdb")), os.MkdirAll(scsi, 0o700),
		os.WriteFile(filepath.Join(scsi, "vpd_pg80"), []byte("\x00\x80\x00\x0dagentlab-work"), 0o600),
		os.WriteFile(filepath.Join(blocks, "sdb", "size"), []byte("4096\n"), 0o600)); err != nil {
		t.Fatal(err)
	}
	if v, err := findVolume(t.Context(), blocks, 1, 0); err != nil || v != (volume{dev: "/dev/sdb", bytes: 2 << 20}) {
		t.Errorf("a SCSI disk: %+v, %v", v, err)
	}
}

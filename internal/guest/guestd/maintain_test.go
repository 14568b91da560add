//go:build linux

package guestd

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/agentlab-vm/agentlab/guestapi"
)

// A file system whose superblock is lost is repaired from a copy, with the real e2fsck.
// Without any copy the exit code leads to an error with the remedy.
func TestLostSuperblock(t *testing.T) {
	t.Setenv("PATH", os.Getenv("PATH")+":/usr/sbin:/sbin")
	for _, tool := range []string{"mke2fs", "e2fsck", "debugfs"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Fatal(err) // a build of images requires it, too
		}
	}
	const block, group = 4096, 32768
	kept := filepath.Join(t.TempDir(), "kept")
	if err := os.WriteFile(kept, []byte("work of weeks"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		lost         []int64 // groups
		check, after int     // exit codes of check, and of check after a repair
	}{
		"none":                      {nil, 0, 0},
		"the first":                 {[]int64{0}, 4, 0},
		"all that e2fsck tries":     {[]int64{0, 1}, 4, 0},
		"all up to the fifth group": {[]int64{0, 1, 3}, 4, 0},
		"all":                       {[]int64{0, 1, 3, 5}, guestapi.MaintainNoFileSystem, guestapi.MaintainNoFileSystem},
	} {
		disk := filepath.Join(t.TempDir(), "disk")
		f, err := os.Create(disk)
		if err == nil {
			err = f.Truncate(6 * group * block) // the groups 0 to 5
		}
		if err != nil {
			t.Fatal(err)
		}
		run := func(program string, args ...string) (out string, code int) {
			text, err := exec.Command(program, args...).CombinedOutput()
			if exit, ok := errors.AsType[*exec.ExitError](err); ok {
				return string(text), exit.ExitCode()
			} else if err != nil {
				t.Fatal(err)
			}
			return string(text), 0
		}
		check := func(repair bool) (string, int) {
			var out strings.Builder
			code, err := checkDisk(disk, repair, &out)
			if err != nil {
				t.Error(err)
			}
			return out.String(), code
		}
		for _, args := range [][]string{{"mke2fs", "-q", "-F", "-t", "ext4", "-b", "4096", disk}, {"debugfs", "-w", "-R", "write " + kept + " kept", disk}} {
			if out, code := run(args[0], args[1:]...); code != 0 {
				t.Fatalf("%q: %s", args, out)
			}
		}
		for _, g := range c.lost {
			at := g * group * block
			if g == 0 {
				at = 1024
			}
			if _, err := f.WriteAt(bytes.Repeat([]byte{0}, 1024), at); err != nil {
				t.Fatal(err)
			}
		}
		_ = f.Close()
		if out, code := check(false); code != c.check {
			t.Errorf("%s: check %d: %s", name, code, out)
		}
		if out, code := check(true); code&^7 != c.after&^7 {
			t.Errorf("%s: repair %d: %s", name, code, out)
		}
		if out, code := check(false); code != c.after {
			t.Errorf("%s: check after the repair %d: %s", name, code, out)
		}
		if out, _ := run("debugfs", "-R", "cat kept", disk); c.after == 0 && !strings.Contains(out, "work of weeks") {
			t.Errorf("%s: the file is lost: %s", name, out)
		}
	}
}

// A workspace is imported as it was exported: with modes, times, attributes, holes and
// links, and without lost+found, sockets and devices.
func TestExportAndImport(t *testing.T) {
	from, to := t.TempDir(), t.TempDir()
	write := func(name, text string, mode os.FileMode) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(filepath.Join(from, name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(from, name), []byte(text), mode); err != nil {
			t.Fatal(err)
		}
	}
	write("repo/a\nb", "text", 0o640)
	write("repo/-rf", "x", 0o755)
	write("lost+found/x", "no", 0o644)
	write("repo/lost+found/x", "yes", 0o644)
	l, err := net.Listen("unix", filepath.Join(from, "socket"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	if err := errors.Join(
		os.Symlink("/etc/passwd", filepath.Join(from, "link")), os.Link(filepath.Join(from, "repo/-rf"), filepath.Join(from, "hard")),
		syscall.Mkfifo(filepath.Join(from, "pipe"), 0o600), os.Truncate(filepath.Join(from, "repo/-rf"), 64<<20),
	); err != nil {
		t.Fatal(err)
	}
	var archive, said bytes.Buffer
	if err := exportFiles(from, &archive, &said); err != nil {
		t.Fatalf("%v: %s", err, &said)
	}
	if archive.Len() > 1<<20 {
		t.Errorf("the archive has %d bytes: holes were filled", archive.Len())
	}
	if err := importFiles(to, &archive, &said); err != nil {
		t.Fatalf("%v: %s", err, &said)
	}
	want := []string{"hard", "link", "pipe", "repo", "repo/-rf", "repo/a\nb", "repo/lost+found", "repo/lost+found/x"}
	var got []string
	err = filepath.WalkDir(to, func(path string, d os.DirEntry, err error) error {
		name, _ := filepath.Rel(to, path)
		if name != "." {
			got = append(got, name)
		}
		return err
	})
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%v: has %q, not %q", err, got, want)
	}
	a, err1 := os.Stat(filepath.Join(to, "hard"))
	b, err2 := os.Stat(filepath.Join(to, "repo/-rf"))
	if err1 != nil || err2 != nil || !os.SameFile(a, b) || a.Mode() != 0o755 || a.Size() != 64<<20 {
		t.Errorf("%v, %v, %v", err1, err2, a)
	}
	if err := importFiles(to, strings.NewReader(strings.Repeat("no archive", 1000)), &said); err == nil || said.Len() == 0 {
		t.Errorf("no archive: %v, %s", err, &said)
	}
	if err := exportFiles(filepath.Join(from, "missing"), io.Discard, &said); err == nil {
		t.Error("a missing directory was exported")
	}
}

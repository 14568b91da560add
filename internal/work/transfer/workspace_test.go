package transfer

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// A file system whose superblock is lost is repaired from a copy, with the real e2fsck.
// Without any copy the exit code is the one that names the remedy.
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
		"all":                       {[]int64{0, 1, 3, 5}, noFileSystem, noFileSystem},
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
		check := func(option string) (string, int) {
			return run("sh", "-c", checkScript+`check "$1" "$2"`, "sh", disk, option)
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
		if out, code := check("-n"); code != c.check {
			t.Errorf("%s: check %d: %s", name, code, out)
		}
		if out, code := check("-y"); code&^7 != c.after&^7 {
			t.Errorf("%s: repair %d: %s", name, code, out)
		}
		if out, code := check("-n"); code != c.after {
			t.Errorf("%s: check after the repair %d: %s", name, code, out)
		}
		if out, _ := run("debugfs", "-R", "cat kept", disk); c.after == 0 && !strings.Contains(out, "work of weeks") {
			t.Errorf("%s: the file is lost: %s", name, out)
		}
	}
}

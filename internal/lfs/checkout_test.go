package lfs_test

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/internal/lfs"
	"github.com/agentlab-vm/agentlab/test/fakelfs"
)

// A checkout replaces only pointers with the attribute, within its limit, and nothing
// below a link, with a flag in the index, or that changes meanwhile.
func TestCheckoutIsCareful(t *testing.T) {
	dir := t.TempDir()
	run := func(args ...string) string {
		t.Helper()
		out, err := exec.Command("git", append([]string{"-C", dir, "-c", "user.name=a", "-c", "user.email=a@b", "-c", "core.hooksPath=/dev/null"}, args...)...).CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", args, out)
		}
		return string(out)
	}
	write := func(name, text string) {
		t.Helper()
		at := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(at), 0o700), os.WriteFile(at, []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("GIT_CONFIG_GLOBAL", "/dev/null")
	run("init", "-q")
	p, text := fakelfs.Pointer("the object")
	write(".gitattributes", "*.bin filter=lfs\n")
	for _, name := range []string{"a.bin", "b.bin", "script", "flagged.bin", "linked/c.bin", "edited.bin"} {
		write(name, text)
	}
	run("add", "-A")
	run("commit", "-qm", "x")
	run("update-index", "--assume-unchanged", "flagged.bin")
	if err := errors.Join(os.Rename(filepath.Join(dir, "linked"), filepath.Join(dir, "elsewhere")), os.Symlink("elsewhere", filepath.Join(dir, "linked"))); err != nil {
		t.Fatal(err)
	}
	store := lfs.Store{Dir: filepath.Join(dir, ".git", "lfs", "objects")}
	if err := store.Put(p, strings.NewReader("the object")); err != nil {
		t.Fatal(err)
	}
	git := func(in io.Reader, out io.Writer, args ...string) error {
		if args[0] == "update-index" { // after the first look
			write("edited.bin", "work of the user")
		}
		cmd := exec.Command("git", append([]string{"-C", dir}, args...)...)
		cmd.Stdin, cmd.Stdout = in, out
		return cmd.Run()
	}
	if _, err := store.Checkout(t.Context(), git, dir, nil, 2*p.Size); !errors.Is(err, lfs.ErrTooLarge) {
		t.Errorf("3 files with a limit of 2: %v", err)
	}
	done, err := store.Checkout(t.Context(), git, dir, func(f lfs.File) bool { return f.Path != "b.bin" }, 1<<20)
	if err != nil || strings.Join(done, " ") != "a.bin" {
		t.Errorf("%q, %v", done, err)
	}
	for name, want := range map[string]string{"a.bin": "the object", "b.bin": text, "script": text, "flagged.bin": text, "elsewhere/c.bin": text, "edited.bin": "work of the user"} {
		if got, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(got) != want {
			t.Errorf("%s is %q, %v", name, got, err)
		}
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if done, err := store.Checkout(ended, git, dir, nil, 1<<20); err == nil || len(done) > 0 {
		t.Errorf("after the end of the context: %q, %v", done, err)
	}
	if _, ok := lfs.Parse([]byte("version https://git-lfs.github.com/spec/v1\noid sha256:" + p.OID + "\nsize 9223372036854775802\n")); ok {
		t.Error("a size overflows sums")
	}
}

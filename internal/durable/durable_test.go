package durable_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/agentlab-vm/agentlab/internal/durable"
)

func write(t *testing.T, path, text string, mode fs.FileMode) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), mode); err != nil {
		t.Fatal(err)
	}
}

// wantOnly checks that a folder holds one file, of mode 0600 and with a text.
func wantOnly(t *testing.T, path, text string) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Dir(path))
	if err != nil {
		t.Fatal(err)
	}
	if len(entries) != 1 || entries[0].Name() != filepath.Base(path) {
		t.Errorf("the folder holds %v, want %s alone", entries, filepath.Base(path))
	}
	st, err := os.Lstat(path)
	if err != nil {
		t.Fatal(err)
	}
	if st.Mode() != 0o600 {
		t.Errorf("mode %s, want 0600", st.Mode())
	}
	if b, err := os.ReadFile(path); err != nil || string(b) != text {
		t.Errorf("holds %q, %v; want %q", b, err, text)
	}
}

func TestReplace(t *testing.T) {
	for name, how := range map[string]durable.Sync{"none": durable.None, "content": durable.Content, "name": durable.Name} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "x.json")
			if err := durable.Replace(path, []byte("first"), how); err != nil {
				t.Fatal(err)
			}
			wantOnly(t, path, "first")
			write(t, path+durable.Suffix, "the rest of a longer try that was cut short", 0o600)
			if err := durable.Replace(path, []byte("second"), how); err != nil {
				t.Fatal(err)
			}
			wantOnly(t, path, "second")
		})
	}
}

// Who has the old file open reads it to its end: it is another file.
func TestReplaceLeavesTheOldFileWhole(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x")
	write(t, path, "old", 0o644)
	old, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = old.Close() }()
	if err := durable.Replace(path, []byte("new"), durable.Name); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 8)
	if n, _ := old.Read(b); string(b[:n]) != "old" {
		t.Errorf("the old file now holds %q", b[:n])
	}
	wantOnly(t, path, "new")
}

func TestReplaceThatFailsLeavesNothing(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x")
	if err := os.MkdirAll(filepath.Join(path, "full"), 0o700); err != nil { // no file takes the place of a folder
		t.Fatal(err)
	}
	if err := durable.Replace(path, []byte("new"), durable.Name); err == nil {
		t.Fatal("a folder was replaced")
	}
	if _, err := os.Lstat(path + durable.Suffix); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("what was written is left: %v", err)
	}
	if err := durable.Replace(filepath.Join(path, "missing", "x"), nil, durable.Name); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("in a folder that is not there: %v", err)
	}
}

func TestReplaceFollowsNoLink(t *testing.T) {
	dir := t.TempDir()
	path, victim := filepath.Join(dir, "x"), filepath.Join(dir, "victim")
	write(t, victim, "precious", 0o600)
	if err := os.Symlink(victim, path+durable.Suffix); err != nil {
		t.Fatal(err)
	}
	if err := durable.Replace(path, []byte("new"), durable.None); !errors.Is(err, syscall.ELOOP) {
		t.Errorf("got %v, want ELOOP", err)
	}
	if b, _ := os.ReadFile(victim); string(b) != "precious" {
		t.Errorf("the victim now holds %q", b)
	}
	if _, err := os.Lstat(path + durable.Suffix); err != nil {
		t.Errorf("what is not ours was removed: %v", err)
	}
}

func TestReplaceJSON(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.json")
	if err := durable.ReplaceJSON(path, map[string]int{"a": 1}, durable.Content); err != nil {
		t.Fatal(err)
	}
	wantOnly(t, path, "{\n  \"a\": 1\n}\n")
	if err := durable.ReplaceJSON(path, func() {}, durable.Content); err == nil {
		t.Error("a function was written as JSON")
	}
	wantOnly(t, path, "{\n  \"a\": 1\n}\n")
}

func TestTemp(t *testing.T) {
	dir := t.TempDir()
	name, err := durable.Temp(dir, ".new-*", []byte("text"))
	if err != nil {
		t.Fatal(err)
	}
	if filepath.Dir(name) != dir || !strings.HasPrefix(filepath.Base(name), ".new-") {
		t.Errorf("the file is %s", name)
	}
	wantOnly(t, name, "text")
	if name, err := durable.Temp(filepath.Join(dir, "missing"), "*", nil); !errors.Is(err, fs.ErrNotExist) || name != "" {
		t.Errorf("in a folder that is not there: %q, %v", name, err)
	}
}

// A full file system leaves no partial file. /dev/full cannot be replaced by a
// rename, so the test uses the limit of a file's size instead.
func TestTooLargeLeavesNothing(t *testing.T) {
	var old syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_FSIZE, &old); err != nil {
		t.Fatal(err)
	}
	small := old
	small.Cur = 1 << 16
	if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &small); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = syscall.Setrlimit(syscall.RLIMIT_FSIZE, &old) }()
	dir := t.TempDir()
	path := filepath.Join(dir, "x")
	write(t, path, "old", 0o600)
	big := make([]byte, 1<<17)
	if err := durable.Replace(path, big, durable.Name); !errors.Is(err, syscall.EFBIG) {
		t.Errorf("Replace: got %v, want EFBIG", err)
	}
	if name, err := durable.Temp(dir, "*", big); !errors.Is(err, syscall.EFBIG) || name != "" {
		t.Errorf("Temp: got %q, %v, want EFBIG", name, err)
	}
	wantOnly(t, path, "old")
}

func TestSyncDir(t *testing.T) {
	dir := t.TempDir()
	if err := durable.SyncPath(dir); err != nil {
		t.Error(err)
	}
	if err := durable.SyncPath(filepath.Join(dir, "missing")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a folder that is not there: %v", err)
	}
}

func TestCreate(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x")
	if err := durable.Create(path, []byte("first")); err != nil {
		t.Fatal(err)
	}
	if err := durable.Create(path, []byte("second")); !errors.Is(err, fs.ErrExist) {
		t.Errorf("got %v, want an error that the file exists", err)
	}
	wantOnly(t, path, "first")
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("elsewhere", path); err != nil {
		t.Fatal(err)
	}
	if err := durable.Create(path, []byte("third")); !errors.Is(err, fs.ErrExist) {
		t.Errorf("over a symbolic link: %v", err)
	}
}

// Of many callers, one makes the file, whatever an earlier one left behind.
func TestConcurrentCreate(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, durable.TempPrefix+"left"), "half", 0o600)
	made := make(chan error, 8)
	for range cap(made) {
		go func() { made <- durable.Create(filepath.Join(dir, "x"), []byte("whole")) }()
	}
	winners := 0
	for range cap(made) {
		switch err := <-made; {
		case err == nil:
			winners++
		case !errors.Is(err, fs.ErrExist):
			t.Error(err)
		}
	}
	if b, err := os.ReadFile(filepath.Join(dir, "x")); winners != 1 || string(b) != "whole" || err != nil {
		t.Errorf("%d made it: %q, %v", winners, b, err)
	}
	if files, _ := os.ReadDir(dir); len(files) != 2 {
		t.Errorf("left: %v", files)
	}
}

func TestCopy(t *testing.T) {
	dir := t.TempDir()
	from, to := filepath.Join(dir, "from"), filepath.Join(dir, "to")
	if err := durable.Copy(from, to, 0o444, durable.None); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a missing file: %v", err)
	}
	for _, text := range []string{"the longer content", "short"} {
		if err := durable.Replace(from, []byte(text), durable.None); err != nil {
			t.Fatal(err)
		}
		if err := durable.Copy(from, to, 0o640, durable.Name); err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(to); err != nil || string(got) != text {
			t.Errorf("%q, %v", got, err)
		}
	}
	if fi, err := os.Stat(to); err != nil || fi.Mode() != 0o640 {
		t.Errorf("%v, %v", fi, err)
	}
	if err := os.Symlink(from, filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	if err := durable.Copy(from, filepath.Join(dir, "link"), 0o600, durable.None); err == nil {
		t.Error("a symbolic link was followed")
	}
}

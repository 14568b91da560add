package bounded

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

func TestBoundedLog(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "log")
	now := time.Unix(0, 0)
	l, err := OpenLog(path, 2000, 0, func() time.Time { return now })
	if err != nil {
		t.Fatal(err)
	}
	for i := range 1000 {
		_, _ = fmt.Fprintf(l, "line %04d\n", i)
	}
	older, _ := os.ReadFile(path + OldSuffix)
	newer, _ := os.ReadFile(path)
	all := string(older) + string(newer)
	if len(older) > 1000 || len(newer) > 1000 || len(all) < 1000 || !strings.HasSuffix(all, "line 0998\nline 0999\n") {
		t.Errorf("%d and %d bytes, ending %q", len(older), len(newer), all[max(0, len(all)-30):])
	}
	if _, err := l.Write(bytes.Repeat([]byte{'x'}, 5000)); err != nil {
		t.Error(err)
	}
	if st, err := os.Stat(path); err != nil || st.Size() != 1000 {
		t.Errorf("after a write larger than the log: %v, %v", st, err)
	}
	_ = l.Close()
	if n, err := l.Write([]byte("late")); n != 4 || err != nil {
		t.Errorf("a write after Close: %d, %v", n, err)
	}
}

// A disk that is full for a while, or a file that cannot be opened when the
// log turns over, ends no log.
func TestBoundedLogContinues(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "box")
	path := filepath.Join(dir, "log")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	l, err := OpenLog(path, 200, 0, time.Now)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	write := func(s string) { _, _ = l.Write([]byte(s)) }
	write(strings.Repeat("a", 90))
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	write(strings.Repeat("b", 20)) // turns over, to nowhere
	write(strings.Repeat("c", 20))
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	write("dd")
	_ = l.f.Close()
	if l.f, err = os.OpenFile("/dev/full", os.O_WRONLY, 0); err != nil {
		t.Fatal(err)
	}
	write("ee")
	write("ff")
	_ = l.f.Close()
	l.f = nil
	write("gg")
	b, _ := os.ReadFile(path)
	if got, want := string(b), "\n[40 bytes dropped]\ndd\n[4 bytes dropped]\ngg"; got != want {
		t.Errorf("the log holds %q, want %q", got, want)
	}
}

func TestBoundedLogRate(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	now := time.Unix(0, 0)
	l, err := OpenLog(path, 200, 10, func() time.Time { return now })
	if err != nil {
		t.Fatal(err)
	}
	write := func(s string) { _, _ = l.Write([]byte(s)) }
	write(strings.Repeat("a", 90))
	write(strings.Repeat("b", 50)) // too much at once
	now = now.Add(time.Second)
	write("cc")
	_ = l.Close()
	b, _ := os.ReadFile(path)
	old, _ := os.ReadFile(path + OldSuffix)
	if got, want := string(old)+string(b), strings.Repeat("a", 90)+"\n[50 bytes dropped]\ncc"; got != want {
		t.Errorf("the log holds %q, want %q", got, want)
	}
}

// Each write stays whole, and the next process continues the file.
func TestLogRotates(t *testing.T) {
	path := filepath.Join(t.TempDir(), "d.log")
	open := func() *Log {
		l, err := OpenLog(path, 2000, 0, time.Now)
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	l := open()
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			for i := range 100 {
				_, _ = fmt.Fprintf(l, "writer %d line %03d\n", w, i) // never fails
			}
		})
	}
	wg.Wait()
	_ = l.Close()
	_, _ = l.Write([]byte("late\n"))
	files, _ := filepath.Glob(path + "*")
	if len(files) != 2 {
		t.Errorf("files %v", files)
	}
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		st, _ := os.Stat(f)
		if len(text) == 0 || len(text) > 1000 || !bytes.HasSuffix(text, []byte("\n")) || st.Mode().Perm() != 0o600 {
			t.Errorf("%s: %d bytes, mode %v", f, len(text), st.Mode())
		}
		for line := range strings.Lines(string(text)) {
			if len(line) != len("writer 0 line 000\n") {
				t.Errorf("%s: split line %q", f, line)
			}
		}
	}
	before, _ := os.ReadFile(path)
	l = open()
	_, _ = l.Write([]byte("x\n"))
	_ = l.Close()
	after, _ := os.ReadFile(path)
	if !bytes.Equal(after, append(before, "x\n"...)) {
		t.Errorf("%q became %q", before, after)
	}
}

func TestOpenLogRefuses(t *testing.T) {
	dir := t.TempDir()
	if err := os.Symlink(filepath.Join(dir, "elsewhere"), filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"none/d.log", "link"} {
		if _, err := OpenLog(filepath.Join(dir, name), 1000, 0, time.Now); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

package boundedlog

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestBoundedLog(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "log")
	now := time.Unix(0, 0)
	l, err := Open(path, 2000, 0, func() time.Time { return now })
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
func TestBoundedLogGoesOn(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "box")
	path := filepath.Join(dir, "log")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	l, err := Open(path, 200, 0, time.Now)
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
	l, err := Open(path, 200, 10, func() time.Time { return now })
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

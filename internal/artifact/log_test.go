package artifact

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"pgregory.net/rapid"

	"github.com/agentlab-vm/agentlab"
)

func (f *fixture) log(t *testing.T, job string) string {
	t.Helper()
	r, err := f.Log(t.Context(), job, 0, false)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Close() }()
	b, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// However a sender repeats, overlaps and goes back, the log becomes what was
// sent.
func TestLogAppendIsIdempotent(t *testing.T) {
	f := setup(t, Limits{})
	const text = "0123456789abcdefghijklmnopqrstuvwxyz"
	n := 0
	rapid.Check(t, func(rt *rapid.T) {
		job := agentlab.NewJobID()
		n++
		var size int64
		for size < int64(len(text)) {
			from := rapid.Int64Range(0, int64(len(text))).Draw(rt, "from")
			to := rapid.Int64Range(from, int64(len(text))).Draw(rt, "to")
			got, full, err := f.AppendLog(t.Context(), job, from, []byte(text[from:to]))
			if from > size {
				if agentlab.CodeOf(err) != agentlab.CodeConflict || got != size {
					rt.Fatalf("gap: %d %v", got, err)
				}
				from, to = size, size+1
				got, full, err = f.AppendLog(t.Context(), job, from, []byte(text[from:to]))
			}
			size = max(size, to)
			if err != nil || full || got != size {
				rt.Fatalf("got %d %v %v, want %d", got, full, err, size)
			}
		}
		if got := f.log(t, job); got != text {
			rt.Fatalf("got %q", got)
		}
	})
}

func TestLogQuota(t *testing.T) {
	f := setup(t, Limits{LogBytes: 10})
	size, full, err := f.AppendLog(t.Context(), job1, 0, []byte("0123456"))
	if err != nil || full || size != 7 {
		t.Fatal(size, full, err)
	}
	_, full, err = f.AppendLog(t.Context(), job1, 7, []byte("789abc"))
	if err != nil || !full {
		t.Fatal(full, err)
	}
	want := "0123456789" + logFullNote
	for range 2 {
		size, full, err = f.AppendLog(t.Context(), job1, 10, []byte("more"))
		if err != nil || !full || size != int64(len(want)) {
			t.Fatal(size, full, err)
		}
	}
	if got := f.log(t, job1); got != want {
		t.Errorf("got %q", got)
	}
	_, _, err = f.AppendLog(t.Context(), job1, -1, nil)
	wantCode(t, err, agentlab.CodeInvalid)
}

func TestFollowLog(t *testing.T) {
	f := setup(t, Limits{})
	var ended atomic.Bool
	f.st.ended = func() (bool, error) { return ended.Load(), nil }
	r, err := f.Log(t.Context(), job1, 2, true)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Close() }()
	got := make(chan string)
	done := make(chan error, 1)
	go func() {
		buf := make([]byte, 100)
		for {
			n, err := r.Read(buf)
			if err != nil {
				done <- err
				return
			}
			got <- string(buf[:n])
		}
	}()
	off := int64(0)
	add := func(s string) {
		t.Helper()
		var err error
		if off, _, err = f.AppendLog(t.Context(), job1, off, []byte(s)); err != nil {
			t.Fatal(err)
		}
	}
	add("xxone")
	if s := <-got; s != "one" {
		t.Errorf("got %q", s)
	}
	add("two")
	if s := <-got; s != "two" {
		t.Errorf("got %q", s)
	}
	ended.Store(true)
	f.wakeLog(job1)
	if err := <-done; err != io.EOF {
		t.Errorf("got %v", err)
	}
	if err := r.Close(); err != nil || len(f.topics) != 0 {
		t.Errorf("close: %v, topics left: %d", err, len(f.topics))
	}
}

func TestFollowedLogEndsWithReader(t *testing.T) {
	f := setup(t, Limits{})
	f.st.ended = func() (bool, error) { return false, nil }
	r, err := f.Log(t.Context(), job1, 0, true)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		_, err := io.ReadAll(r)
		done <- err
	}()
	_ = r.Close()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	broken := errors.New("store is down")
	f.st.ended = func() (bool, error) { return false, broken }
	r, err = f.Log(t.Context(), job1, 0, true)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Close() }()
	if _, err := io.ReadAll(r); !errors.Is(err, broken) {
		t.Errorf("got %v", err)
	}
}

// The log may be no link, pipe or device.
func TestLogIsARegularFile(t *testing.T) {
	f := setup(t, Limits{})
	if err := os.Symlink("/etc/passwd", filepath.Join(f.dir, "logs", job1+".log")); err != nil {
		t.Fatal(err)
	}
	r, err := f.Log(t.Context(), job1, 0, false)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Close() }()
	if b, _ := io.ReadAll(r); strings.Contains(string(b), "root") {
		t.Error("read through a link")
	}
	if _, _, err := f.AppendLog(t.Context(), job1, 0, []byte("x")); err == nil {
		t.Error("wrote through a link")
	}
}

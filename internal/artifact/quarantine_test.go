package artifact

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

func none(context.Context, string) (bool, error) { return false, nil }

// leave makes what two jobs leave behind.
func leave(t *testing.T, f *fixture) {
	t.Helper()
	f.put(t, job1, "out/a", "one")
	f.put(t, job1, "b", "two")
	f.put(t, job2, "a", "three")
	if _, _, err := f.AppendLog(t.Context(), job1, 0, []byte("log")); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(f.dir, "bundles", job1+".bundle"), []byte("bundle"), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestSweepOfALostDatabaseDeletesNothing(t *testing.T) {
	f := setup(t, Limits{Quarantine: 10 * 24 * time.Hour})
	leave(t, f)
	before := f.names(t)
	clear(f.st.rows)
	got, err := f.sweep(t.Context(), none)
	if want := (swept{Jobs: 2}); err != nil || got != want {
		t.Fatalf("got %+v, %v; want %+v", got, err, want)
	}
	if rest := f.names(t); len(rest) != len(before) {
		t.Fatalf("files %q, before %q", rest, before)
	}
	f.now = f.now.Add(10*24*time.Hour - time.Minute)
	if got, err := f.sweep(t.Context(), none); err != nil || got != (swept{}) {
		t.Errorf("before the retention: %+v, %v", got, err)
	}

	// A database that is made again gets all of it back.
	found, err := f.Recover()
	if err != nil || len(found) != 2 || found[0].JobID != job1 || found[1].JobID != job2 || found[0].Oldest.IsZero() || found[0].Newest.Before(found[0].Oldest) {
		t.Fatalf("found %+v, %v", found, err)
	}
	if after := f.names(t); !slices.Equal(before, after) {
		t.Fatalf("files %q, before %q", after, before)
	}
	for job, want := range map[string]int{job1: 2, job2: 1} {
		if n, err := f.Describe(t.Context(), job); err != nil || n != want {
			t.Errorf("%s: %d rows, %v", job, n, err)
		}
		if n, err := f.Describe(t.Context(), job); err != nil || n != 0 {
			t.Errorf("%s again: %d rows, %v", job, n, err)
		}
	}
	if got := f.get(t, job1, "out/a"); got != "one" {
		t.Errorf("content %q", got)
	}

	// An unclaimed file is removed after its time.
	clear(f.st.rows)
	if _, err := f.sweep(t.Context(), none); err != nil {
		t.Fatal(err)
	}
	f.now = f.now.Add(10*24*time.Hour + time.Second)
	if got, err := f.sweep(t.Context(), none); err != nil || got.Expired != 4 {
		t.Errorf("after the retention: %+v, %v", got, err)
	}
	if left := f.names(t); len(left) != 0 {
		t.Errorf("left %q", left)
	}
}

func TestRecoverReplacesNothing(t *testing.T) {
	f := setup(t, Limits{})
	known := func(context.Context, string) (bool, error) { return true, nil }
	leave(t, f)
	delete(f.st.rows, job1+"\x00b")
	if got, err := f.sweep(t.Context(), known); err != nil || got != (swept{Files: 1}) {
		t.Fatalf("got %+v, %v", got, err)
	}
	f.put(t, job1, "b", "newer")
	if _, err := f.Recover(); err != nil {
		t.Fatal(err)
	}
	if got := f.get(t, job1, "b"); got != "newer" {
		t.Errorf("content %q", got)
	}
	if !slices.ContainsFunc(f.names(t), func(n string) bool { return strings.Contains(n, quarantineDir) }) {
		t.Error("what lost its place is gone")
	}
}

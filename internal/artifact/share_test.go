package artifact

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
)

var everyJob = func(context.Context, string) (bool, error) { return true, nil }

func TestShare(t *testing.T) {
	f := setup(t, Limits{FileBytes: 10, JobBytes: 10, JobFiles: 1})
	a := f.put(t, job1, "out/x", "content")
	f.now = f.now.Add(time.Hour)
	for range 2 { // again after a crash
		if err := f.Share(t.Context(), a, job2, "attempts/1/x"); err != nil {
			t.Fatal(err)
		}
	}
	got, err := f.st.Artifact(t.Context(), job2, "attempts/1/x")
	if err != nil || got.SHA256 != a.SHA256 || got.Size != a.Size || got.MIME != a.MIME || f.get(t, job2, "attempts/1/x") != "content" {
		t.Errorf("%+v %v", got, err)
	}
	if len(f.st.evs) != 2 || f.st.evs[1].JobID != job2 {
		t.Errorf("events %+v", f.st.evs)
	}
	if n, err := f.Sweep(t.Context(), everyJob); n != 0 || err != nil {
		t.Errorf("swept %d, %v", n, err)
	}
	if err := f.Delete(t.Context(), job1); err != nil {
		t.Fatal(err)
	}
	if got := f.get(t, job2, "attempts/1/x"); got != "content" {
		t.Errorf("after the other job was deleted: %q", got)
	}
	if err := f.Share(t.Context(), a, job2, "attempts/1/gone"); err != nil {
		t.Errorf("of a deleted artifact: %v", err)
	}
	if got := f.names(t); !slices.Equal(got, []string{"artifacts/" + job2 + "/attempts/1/x"}) {
		t.Errorf("files %q", got)
	}
}

// An artifact that is replaced after its row was read is shared with the content
// and the checksum of now.
func TestShareOfAReplacedArtifact(t *testing.T) {
	f := setup(t, Limits{})
	old := f.put(t, job1, "x", "old")
	a := f.put(t, job1, "x", "new content")
	if err := f.Share(t.Context(), old, job2, "x"); err != nil {
		t.Fatal(err)
	}
	got, err := f.st.Artifact(t.Context(), job2, "x")
	if err != nil || got.SHA256 != a.SHA256 || got.Size != a.Size || f.get(t, job2, "x") != "new content" {
		t.Errorf("%+v, %v", got, err)
	}
}

// While an artifact is shared, an upload does not replace it. Jobs that share with
// each other do not block each other.
func TestShareDuringUploads(t *testing.T) {
	f := setup(t, Limits{JobFiles: 1000})
	a, b := f.put(t, job1, "x", "0"), f.put(t, job2, "x", "0")
	var wg sync.WaitGroup
	defer wg.Wait()
	for i := range 100 {
		text := strings.Repeat("x", i)
		wg.Go(func() { f.put(t, job1, "x", text) })
		wg.Go(func() {
			if err := errors.Join(f.Share(t.Context(), a, job2, "a"), f.Share(t.Context(), b, job1, "b")); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if err := f.Share(t.Context(), a, job2, "a"); err != nil {
		t.Fatal(err)
	}
	row, err := f.st.Artifact(t.Context(), job2, "a")
	if got := f.get(t, job2, "a"); err != nil || int64(len(got)) != row.Size {
		t.Errorf("%q, %+v, %v", got, row, err)
	}
}

// A crash after the file was placed leaves a file without a row. The next call
// completes it.
func TestShareAfterACrash(t *testing.T) {
	f := setup(t, Limits{})
	a := f.put(t, job1, "x", "content")
	f.st.fail = errors.New("killed")
	if err := f.Share(t.Context(), a, job2, "x"); err == nil {
		t.Fatal("no error")
	}
	if _, err := os.Stat(filepath.Join(f.dir, "artifacts", job2, "x")); err != nil {
		t.Fatal(err)
	}
	f.st.fail = nil
	if err := f.Share(t.Context(), a, job2, "x"); err != nil || f.get(t, job2, "x") != "content" {
		t.Error(err)
	}
	if n, err := f.Sweep(t.Context(), everyJob); n != 0 || err != nil {
		t.Errorf("swept %d, %v", n, err)
	}
}

func TestShareRefusesHostileNames(t *testing.T) {
	f := setup(t, Limits{})
	a := f.put(t, job1, "x", "content")
	for _, p := range []string{"", "../x", "/x", "a/../../x"} {
		wrong := a
		wrong.Path = p
		if err := f.Share(t.Context(), a, job2, p); agentlab.CodeOf(err) != agentlab.CodeInvalid {
			t.Errorf("to %q: %v", p, err)
		}
		if err := f.Share(t.Context(), wrong, job2, "y"); agentlab.CodeOf(err) != agentlab.CodeInvalid {
			t.Errorf("from %q: %v", p, err)
		}
	}
}

func TestShareLog(t *testing.T) {
	f := setup(t, Limits{})
	if err := f.ShareLog(t.Context(), job1, job2, "attempts/1/agent.log"); err != nil || len(f.st.rows) != 0 {
		t.Errorf("without a log: %v, %v", f.st.rows, err)
	}
	if _, _, err := f.AppendLog(t.Context(), job1, 0, []byte("line\n")); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := f.ShareLog(t.Context(), job1, job2, "attempts/1/agent.log"); err != nil || f.get(t, job2, "attempts/1/agent.log") != "line\n" {
			t.Error(err)
		}
	}
}

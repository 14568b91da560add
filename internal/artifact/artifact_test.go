package artifact

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
	"time"

	"pgregory.net/rapid"

	"github.com/agentlab-vm/agentlab"
)

const job1, job2 = "job-aaaaaaaaaaaaa", "job-bbbbbbbbbbbbb"

// memStore keeps rows in memory; fail makes its writes fail.
type memStore struct {
	mu   sync.Mutex
	rows map[string]agentlab.Artifact
	evs  []agentlab.Event
	fail error

	ended func() (bool, error) // of all jobs; nil means that they have
}

func (m *memStore) Job(_ context.Context, id string) (agentlab.Job, error) {
	j := agentlab.Job{ID: id, Status: agentlab.JobCompleted}
	if m.ended == nil {
		return j, nil
	}
	ended, err := m.ended()
	if !ended {
		j.Status = agentlab.JobRunning
	}
	return j, err
}

func (m *memStore) Subscribe(func(agentlab.Commit)) {}

func (m *memStore) PutArtifact(_ context.Context, a agentlab.Artifact, evs ...agentlab.Event) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.fail != nil {
		return m.fail
	}
	m.rows[a.JobID+"\x00"+a.Path] = a
	m.evs = append(m.evs, evs...)
	return nil
}

func (m *memStore) Artifacts(_ context.Context, jobID string) ([]agentlab.Artifact, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []agentlab.Artifact
	for _, a := range m.rows {
		if a.JobID == jobID {
			out = append(out, a)
		}
	}
	slices.SortFunc(out, func(a, b agentlab.Artifact) int { return strings.Compare(a.Path, b.Path) })
	return out, nil
}

func (m *memStore) Artifact(_ context.Context, jobID, p string) (agentlab.Artifact, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	a, ok := m.rows[jobID+"\x00"+p]
	if !ok {
		return a, agentlab.Errorf(agentlab.CodeNotFound, "no artifact")
	}
	return a, nil
}

func (m *memStore) DeleteArtifacts(_ context.Context, jobID string, paths ...string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for k, a := range m.rows {
		if a.JobID == jobID && (len(paths) == 0 || slices.Contains(paths, a.Path)) {
			delete(m.rows, k)
		}
	}
	return nil
}

type fixture struct {
	*Service
	st  *memStore
	dir string
	now time.Time
}

func setup(t *testing.T, l Limits) *fixture {
	t.Helper()
	f := &fixture{st: &memStore{rows: map[string]agentlab.Artifact{}}, dir: t.TempDir(), now: time.Now()}
	s, err := New(Config{Dir: f.dir, Store: f.st, Limits: l, Clock: func() time.Time { return f.now }})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	f.Service = s
	return f
}

func (f *fixture) put(t *testing.T, job, p, content string) agentlab.Artifact {
	t.Helper()
	a, err := f.Put(t.Context(), job, p, strings.NewReader(content))
	if err != nil {
		t.Fatalf("put %s: %v", p, err)
	}
	return a
}

func (f *fixture) get(t *testing.T, job, p string) string {
	t.Helper()
	_, r, err := f.Open(t.Context(), job, p)
	if err != nil {
		t.Fatalf("open %s: %v", p, err)
	}
	defer func() { _ = r.Close() }()
	b, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// names lists every file below the state directory.
func (f *fixture) names(t *testing.T) []string {
	t.Helper()
	var out []string
	err := filepath.WalkDir(f.dir, func(p string, d os.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			rel, _ := filepath.Rel(f.dir, p)
			out = append(out, rel)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func wantCode(t *testing.T, err error, code agentlab.Code) {
	t.Helper()
	if agentlab.CodeOf(err) != code {
		t.Errorf("got %v, want code %s", err, code)
	}
}

func TestPutAndReplace(t *testing.T) {
	f := setup(t, Limits{})
	a := f.put(t, job1, "outputs/a/page", "<!DOCTYPE html><html></html>")
	sum := sha256.Sum256([]byte("<!DOCTYPE html><html></html>"))
	if a.Size != 28 || a.SHA256 != hex.EncodeToString(sum[:]) || !strings.HasPrefix(a.MIME, "text/html") || a.CreatedAt.IsZero() {
		t.Errorf("got %+v", a)
	}
	if len(f.st.evs) != 1 || f.st.evs[0].Kind != agentlab.EventArtifactStored || f.st.evs[0].JobID != job1 {
		t.Errorf("events %+v", f.st.evs)
	}
	f.put(t, job1, "outputs/a/page", "second")
	if got := f.get(t, job1, "outputs/a/page"); got != "second" {
		t.Errorf("got %q", got)
	}
	f.put(t, job1, "empty", "")
	if got := f.get(t, job1, "empty"); got != "" {
		t.Errorf("got %q", got)
	}
	want := []string{"artifacts/" + job1 + "/empty", "artifacts/" + job1 + "/outputs/a/page"}
	if got := f.names(t); !slices.Equal(got, want) {
		t.Errorf("files %q, want %q", got, want)
	}
	if st, err := os.Stat(filepath.Join(f.dir, want[0])); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("mode %v %v", st.Mode(), err)
	}
}

func TestPutRefusesHostileNames(t *testing.T) {
	f := setup(t, Limits{})
	for _, p := range []string{"", "../x", "/etc/passwd", "a/../../x", ".tmp/x", "a\x00", "a//b",
		"agent.log/x", "report.json/a/b", "result.bundle/x", "changes.diff/x", "console.log/x", "checkpoint.bundle/x", "outputs"} {
		_, err := f.Put(t.Context(), job1, p, strings.NewReader("x"))
		wantCode(t, err, agentlab.CodeInvalid)
	}
	for _, job := range []string{"", "..", ".tmp", "job-x", job1 + "/.."} {
		_, err := f.Put(t.Context(), job, "a", strings.NewReader("x"))
		wantCode(t, err, agentlab.CodeInvalid)
		_, err = f.LogSize(t.Context(), job)
		wantCode(t, err, agentlab.CodeInvalid)
		wantCode(t, f.Delete(t.Context(), job), agentlab.CodeInvalid)
	}
	if got := f.names(t); len(got) != 0 {
		t.Errorf("files %q", got)
	}
	f.put(t, job1, "agent.log", "the log") // nothing stands in its way
	f.put(t, job1, "outputs/agent.log/x", "x")
}

// A link that somehow got into the tree must not lead out of it.
func TestLinksAreNotFollowed(t *testing.T) {
	f := setup(t, Limits{})
	outside := t.TempDir()
	secret := filepath.Join(outside, "secret")
	if err := os.WriteFile(secret, []byte("s"), 0o600); err != nil {
		t.Fatal(err)
	}
	f.put(t, job1, "a", "x")
	if err := os.Symlink(outside, filepath.Join(f.dir, "artifacts", job1, "dir")); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Put(t.Context(), job1, "dir/new", strings.NewReader("x")); err == nil {
		t.Error("wrote through a link")
	}
	if err := os.Remove(filepath.Join(f.dir, "artifacts", job1, "a")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(secret, filepath.Join(f.dir, "artifacts", job1, "a")); err != nil {
		t.Fatal(err)
	}
	if _, _, err := f.Open(t.Context(), job1, "a"); err == nil {
		t.Error("read through a link")
	}
	if left, _ := os.ReadDir(outside); len(left) != 1 {
		t.Errorf("outside holds %v", left)
	}
}

func TestFileAndDirectoryOfOneName(t *testing.T) {
	f := setup(t, Limits{})
	f.put(t, job1, "a", "x")
	_, err := f.Put(t.Context(), job1, "a/b", strings.NewReader("x"))
	wantCode(t, err, agentlab.CodeConflict)
	f.put(t, job1, "d/e", "x")
	_, err = f.Put(t.Context(), job1, "d", strings.NewReader("x"))
	wantCode(t, err, agentlab.CodeConflict)
	if got := f.names(t); len(got) != 2 {
		t.Errorf("files %q", got)
	}
}

func TestQuotas(t *testing.T) {
	f := setup(t, Limits{FileBytes: 10, JobBytes: 25, JobFiles: 3})
	put := func(p string, n int) error {
		_, err := f.Put(t.Context(), job1, p, strings.NewReader(strings.Repeat("x", n)))
		return err
	}
	wantCode(t, put("big", 11), agentlab.CodeLimit)
	for i, err := range []error{put("a", 10), put("b", 10), put("a", 10)} {
		if err != nil {
			t.Errorf("%d: %v", i, err)
		}
	}
	wantCode(t, put("c", 6), agentlab.CodeLimit)
	if err := put("c", 5); err != nil {
		t.Error(err)
	}
	wantCode(t, put("d", 0), agentlab.CodeLimit)
	if _, err := f.Put(t.Context(), job2, "a", strings.NewReader("x")); err != nil {
		t.Errorf("another job has its own quota: %v", err)
	}
	if got := f.names(t); len(got) != 4 {
		t.Errorf("files %q", got)
	}
}

// A path that is written again and again makes one event, and an end.
func TestRewriting(t *testing.T) {
	f := setup(t, Limits{JobFiles: 3})
	for range putsPerFile * 3 {
		f.put(t, job1, "a", "x")
	}
	_, err := f.Put(t.Context(), job1, "a", strings.NewReader("x"))
	wantCode(t, err, agentlab.CodeLimit)
	if len(f.st.evs) != 1 {
		t.Errorf("%d events", len(f.st.evs))
	}
	f.put(t, job2, "a", "x")
}

// A crash between file and row is seen though both sizes are the same.
func TestSweepSameSize(t *testing.T) {
	f := setup(t, Limits{})
	f.put(t, job1, "a", "old")
	kept := f.put(t, job1, "b", "old")
	f.st.fail = errors.New("store is down")
	f.now = f.now.Add(time.Second)
	if _, err := f.Put(t.Context(), job1, "a", strings.NewReader("new")); err == nil {
		t.Fatal("the store's error is lost")
	}
	f.st.fail = nil
	known := func(context.Context, string) (bool, error) { return true, nil }
	if _, err := f.sweep(t.Context(), known); err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256([]byte("new"))
	if a, err := f.st.Artifact(t.Context(), job1, "a"); err != nil || a.SHA256 != hex.EncodeToString(sum[:]) || !a.CreatedAt.Equal(f.now) {
		t.Errorf("%+v, %v", a, err)
	}
	if b, err := f.st.Artifact(t.Context(), job1, "b"); err != nil || b != kept {
		t.Errorf("%+v, %v", b, err)
	}
}

// Uploads at the same time share one quota.
func TestQuotaUnderConcurrency(t *testing.T) {
	const size, n = 1000, 24
	f := setup(t, Limits{JobBytes: 10*size + 500, JobFiles: 100})
	var wg sync.WaitGroup
	var mu sync.Mutex
	ok := 0
	for i := range n {
		wg.Go(func() {
			_, err := f.Put(t.Context(), job1, fmt.Sprintf("d%d/f%d", i%3, i), iotest.HalfReader(bytes.NewReader(make([]byte, size))))
			mu.Lock()
			defer mu.Unlock()
			if err == nil {
				ok++
			} else if agentlab.CodeOf(err) != agentlab.CodeLimit {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if rows, _ := f.List(t.Context(), job1); len(rows) != ok || ok > 10 || ok == 0 {
		t.Errorf("%d rows, %d stored", len(rows), ok)
	}
	if got := f.names(t); len(got) != ok {
		t.Errorf("%d files, %d stored", len(got), ok)
	}
	if len(f.jobs) != 0 || len(f.active) != 0 {
		t.Errorf("left: %v %v", f.jobs, f.active)
	}
}

func TestBrokenUploadLeavesNothing(t *testing.T) {
	f := setup(t, Limits{})
	broken := errors.New("connection reset")
	_, err := f.Put(t.Context(), job1, "a", io.MultiReader(strings.NewReader("half"), iotest.ErrReader(broken)))
	if !errors.Is(err, broken) {
		t.Errorf("got %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := f.Put(ctx, job1, "a", strings.NewReader("x")); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if got := f.names(t); len(got) != 0 {
		t.Errorf("files %q", got)
	}
}

func TestTarGz(t *testing.T) {
	f := setup(t, Limits{})
	f.put(t, job1, "outputs/x", "content")
	f.put(t, job1, "report.json", "{}")
	if _, _, err := f.AppendLog(t.Context(), job1, 0, []byte("hello\n")); err != nil {
		t.Fatal(err)
	}
	read := func() map[string]string {
		var b bytes.Buffer
		r, err := f.Bundle(t.Context(), job1)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := b.ReadFrom(r); err != nil {
			t.Fatal(err)
		}
		zr, err := gzip.NewReader(&b)
		if err != nil {
			t.Fatal(err)
		}
		got := map[string]string{}
		for tr := tar.NewReader(zr); ; {
			h, err := tr.Next()
			if err == io.EOF {
				return got
			}
			if err != nil {
				t.Fatal(err)
			}
			c, err := io.ReadAll(tr)
			if err != nil {
				t.Fatal(err)
			}
			got[h.Name] = string(c)
		}
	}
	got := read()
	if len(got) != 3 || got[job1+"/outputs/x"] != "content" || got[job1+"/agent.log"] != "hello\n" {
		t.Errorf("got %q", got)
	}
	f.put(t, job1, agentlab.ArtifactLog, "the guest's")
	if got := read(); len(got) != 3 || got[job1+"/agent.log"] != "the guest's" {
		t.Errorf("got %q", got)
	}
}

func TestDelete(t *testing.T) {
	f := setup(t, Limits{})
	f.put(t, job1, "a/b", "x")
	f.put(t, job2, "a/b", "x")
	if _, _, err := f.AppendLog(t.Context(), job1, 0, []byte("x")); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := f.Delete(t.Context(), job1); err != nil {
			t.Fatal(err)
		}
	}
	if got := f.names(t); !slices.Equal(got, []string{"artifacts/" + job2 + "/a/b"}) {
		t.Errorf("files %q", got)
	}
	if rows, _ := f.List(t.Context(), job1); len(rows) != 0 {
		t.Errorf("rows %v", rows)
	}
}

// What is not in the bundle of a job can be deleted before it.
func TestDeleteOutputs(t *testing.T) {
	f := setup(t, Limits{})
	for _, name := range []string{"outputs/dist/app", "outputs/x", "attempts/1/agent.log", agentlab.ArtifactResult, "changes.diff", "report.json", "submodules/a.diff"} {
		f.put(t, job1, name, "x")
	}
	f.put(t, job2, "outputs/x", "x")
	for i := range 2 {
		got, err := f.DeleteOutputs(t.Context(), job1)
		if err != nil || len(got) != 3*(1-i) {
			t.Fatalf("%v, %v", got, err)
		}
	}
	rows, err := f.List(t.Context(), job1)
	if err != nil || len(rows) != 4 {
		t.Errorf("rows %v, %v", rows, err)
	}
	names := f.names(t)
	if slices.ContainsFunc(names, func(n string) bool {
		return strings.HasPrefix(n, "artifacts/"+job1+"/outputs/") || strings.Contains(n, "attempts")
	}) ||
		!slices.Contains(names, "artifacts/"+job1+"/result.bundle") || !slices.Contains(names, "artifacts/"+job2+"/outputs/x") {
		t.Errorf("files %q", names)
	}
	f.put(t, job1, "outputs/x", "again")
}

func TestSweep(t *testing.T) {
	f := setup(t, Limits{})
	write := func(name, content string) {
		t.Helper()
		p := filepath.Join(f.dir, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	f.put(t, job1, "kept", "x")
	f.put(t, job1, "replaced", "old")
	write("artifacts/"+job1+"/replaced", "newer, its row was not written")
	write("artifacts/"+job1+"/d/norow", "x")
	write("artifacts/.tmp/.up-x", "x")
	write("artifacts/.tmp/.del-x/a", "x")
	write("bundles/.up-y", "x")
	write("artifacts/"+job2+"/a", "x")
	write("logs/"+job2+".log", "x")
	write("logs/job-ccccccccccccc.log", "x")
	write("logs/foreign", "x")
	write("bundles/bundle-aaaaaaaaaaaaaaaaaaaaaaaaaa.bundle", "x")
	busy, err := f.newTemp(f.files, tmpDir)
	if err != nil {
		t.Fatal(err)
	}
	known := func(_ context.Context, id string) (bool, error) { return id == job1, nil }
	f.now = time.Now().Add(59 * time.Minute)
	got, err := f.sweep(t.Context(), known)
	if want := (swept{Temporary: 3, Files: 1, Jobs: 2}); err != nil || got != want {
		t.Errorf("got %+v %v, want %+v", got, err, want)
	}
	f.now = time.Now().Add(61 * time.Minute)
	if got, err := f.sweep(t.Context(), known); err != nil || got != (swept{Bundles: 1}) {
		t.Errorf("second: %+v %v", got, err)
	}
	want := []string{"artifacts/" + busy.name, "artifacts/" + job1 + "/kept", "artifacts/" + job1 + "/replaced", "logs/foreign"}
	left := slices.DeleteFunc(f.names(t), func(n string) bool { return strings.Contains(n, "/"+quarantineDir+"/") })
	if !slices.Equal(left, want) {
		t.Errorf("files %q, want %q", left, want)
	}
	if a, _, err := f.Open(t.Context(), job1, "replaced"); err != nil || a.Size != 30 {
		t.Errorf("row %+v %v", a, err)
	}
	f.st.fail = errors.New("store is down")
	if _, err := f.Put(t.Context(), job1, "x", strings.NewReader("x")); err == nil {
		t.Error("the store's error is lost")
	}
	f.st.fail = nil
	if got, err := f.sweep(t.Context(), known); err != nil || got.Files != 1 {
		t.Errorf("third: %+v %v", got, err)
	}
}

func TestPutAnyValidPath(t *testing.T) {
	f := setup(t, Limits{JobFiles: 1 << 20})
	rapid.Check(t, func(rt *rapid.T) {
		p := rapid.StringMatching(`[a-c./ \-]{1,12}`).Draw(rt, "path")
		_, err := f.Put(t.Context(), job1, p, strings.NewReader(p))
		if agentlab.ValidateArtifactPath(p) != nil {
			if agentlab.CodeOf(err) != agentlab.CodeInvalid {
				rt.Fatalf("%q: %v", p, err)
			}
			return
		}
		if agentlab.CodeOf(err) == agentlab.CodeConflict {
			return
		}
		if err != nil {
			rt.Fatalf("%q: %v", p, err)
		}
		b, err := os.ReadFile(filepath.Join(f.dir, "artifacts", job1, p))
		if err != nil || string(b) != p {
			rt.Fatalf("%q: %v %q", p, err, b)
		}
	})
}

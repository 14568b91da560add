package artifact

import (
	"bytes"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/agentlab-vm/agentlab"
)

func runGit(t *testing.T, dir string, args ...string) {
	t.Helper()
	cmd := exec.Command("git", args...)
	cmd.Dir = dir
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOME=" + dir, "GIT_CONFIG_NOSYSTEM=1",
		"GIT_AUTHOR_NAME=t", "GIT_AUTHOR_EMAIL=t@t", "GIT_COMMITTER_NAME=t", "GIT_COMMITTER_EMAIL=t@t"}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("git %v: %v\n%s", args, err, out)
	}
}

func TestBundles(t *testing.T) {
	dir := t.TempDir()
	runGit(t, dir, "init", "-q", "-b", "main")
	for _, m := range []string{"one", "two"} {
		runGit(t, dir, "commit", "-q", "--allow-empty", "-m", m)
	}
	runGit(t, dir, "bundle", "create", "-q", "whole", "HEAD", "main")
	runGit(t, dir, "bundle", "create", "-q", "part", "main~1..main")
	read := func(name string) []byte {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	whole, part := read("whole"), read("part")
	f := setup(t, Limits{BundleBytes: 64 << 10})
	b, err := f.PutBundle(t.Context(), iotest.OneByteReader(bytes.NewReader(whole)))
	if err != nil || b.Size != int64(len(whole)) || len(b.SHA256) != 64 {
		t.Fatal(b, err)
	}
	for range 2 {
		if err := f.ClaimBundle(t.Context(), b.ID, job1); err != nil {
			t.Fatal(err)
		}
	}
	wantCode(t, f.ClaimBundle(t.Context(), b.ID, job2), agentlab.CodeNotFound)
	wantCode(t, f.ClaimBundle(t.Context(), "../"+job1, job2), agentlab.CodeNotFound)
	r, size, err := f.RepoBundle(t.Context(), job1)
	if err != nil || size != b.Size {
		t.Fatal(size, err)
	}
	got, err := io.ReadAll(r)
	if err != nil || !bytes.Equal(got, whole) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	_ = r.Close()
	_, _, err = f.RepoBundle(t.Context(), job2)
	wantCode(t, err, agentlab.CodeNotFound)
	wantCode(t, f.DeleteBundle(b.ID), agentlab.CodeNotFound) // a job has it
	wantCode(t, f.DeleteBundle(job1), agentlab.CodeNotFound)
	wantCode(t, f.DeleteBundle("../"+b.ID), agentlab.CodeNotFound)
	other, err := f.PutBundle(t.Context(), bytes.NewReader(whole))
	if err = errors.Join(err, f.DeleteBundle(other.ID)); err != nil {
		t.Error(err)
	}
	wantCode(t, f.ClaimBundle(t.Context(), other.ID, job2), agentlab.CodeNotFound)
	if err := errors.Join(f.DropBundle(job1), f.DropBundle(job1)); err != nil {
		t.Error(err)
	}

	refused := map[string][]byte{
		"needs commits": part, "empty": nil, "text": []byte("hello"), "no end": whole[:30],
		"no pack":   []byte("# v2 git bundle\n" + strings.Repeat("a", 40) + " refs/heads/x\n\nPAC"),
		"no refs":   []byte("# v2 git bundle\n\nPACK"),
		"partial":   []byte("# v3 git bundle\n@filter=blob:none\n\nPACK"),
		"odd line":  []byte("# v2 git bundle\nxyz\n\nPACK"),
		"long line": []byte("# v2 git bundle\n" + strings.Repeat("a", 40<<10)),
	}
	for name, p := range refused {
		_, err := f.PutBundle(t.Context(), bytes.NewReader(p))
		if agentlab.CodeOf(err) != agentlab.CodeInvalid || agentlab.HintOf(err) == "" {
			t.Errorf("%s: %v", name, err)
		}
	}
	_, err = f.PutBundle(t.Context(), io.MultiReader(bytes.NewReader(whole), bytes.NewReader(make([]byte, 64<<10))))
	wantCode(t, err, agentlab.CodeLimit)
	broken := errors.New("connection reset")
	if _, err := f.PutBundle(t.Context(), io.MultiReader(bytes.NewReader(whole[:100]), iotest.ErrReader(broken))); !errors.Is(err, broken) {
		t.Errorf("got %v", err)
	}
	if got := f.names(t); len(got) != 0 {
		t.Errorf("files %q", got)
	}
}

func FuzzBundleHeader(f *testing.F) {
	f.Add([]byte("# v2 git bundle\n" + strings.Repeat("a", 40) + " refs/heads/x\n\nPACK"))
	f.Add([]byte("# v3 git bundle\n@object-format=sha1\n-\n\n"))
	f.Fuzz(func(t *testing.T, p []byte) {
		h := &headerCheck{}
		h.reset(bytes.NewReader(p))
		out, err := io.ReadAll(h)
		if err == nil && h.done && !bytes.Equal(out, p) {
			t.Errorf("%q became %q", p, out)
		}
		if err != nil && h.done && agentlab.CodeOf(err) == "" {
			t.Errorf("error %v", err)
		}
	})
}

package gitsafe

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/internal/work/worktest"
)

// FuzzBundleHeader reads the header of a result bundle, which a guest wrote:
// what is taken of it are object ids and names, and it is where it says.
func FuzzBundleHeader(f *testing.F) {
	id := strings.Repeat("0a", 20)
	f.Add([]byte("# v2 git bundle\n" + id + " refs/heads/agentlab/j\n\nPACK"))
	f.Add([]byte("# v2 git bundle\n-" + id + " why\n" + id + " refs/heads/x\n\nPACK"))
	f.Add([]byte("# v3 git bundle\n@object-format=sha256\n\nPACK"))
	f.Add([]byte("# v2 git bundle\n-" + strings.Repeat("--upload-pack=x", 3) + "\n\n"))
	f.Fuzz(func(t *testing.T, p []byte) {
		h, err := readBundleHeader(bytes.NewReader(p))
		if err != nil {
			return
		}
		if h.size > int64(len(p)) || h.size < 1 || p[h.size-1] != '\n' {
			t.Fatalf("the header ends at %d of %d", h.size, len(p))
		}
		ids := append([]string(nil), h.needs...)
		for _, id := range h.Refs {
			ids = append(ids, id)
		}
		for _, id := range ids {
			if len(id) != 40 || strings.Trim(id, "0123456789abcdef") != "" {
				t.Fatalf("%q is taken for an object id", id)
			}
		}
	})
}

// FuzzTakeBundle gives any bytes after a good header to git: whatever becomes
// of it, nothing but objects and the one ref changes in the user's repository.
func FuzzTakeBundle(f *testing.F) {
	work := f.TempDir()
	run := func(args ...string) []byte {
		cmd := exec.Command("git", args...)
		cmd.Dir = work
		cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_AUTHOR_NAME=t", "GIT_AUTHOR_EMAIL=t@t", "GIT_COMMITTER_NAME=t", "GIT_COMMITTER_EMAIL=t@t")
		out, err := cmd.CombinedOutput()
		if err != nil {
			f.Fatalf("git %v: %v\n%s", args, err, out)
		}
		return out
	}
	run("init", "-q", "-b", "agentlab/j", ".")
	if err := os.WriteFile(filepath.Join(work, "file"), []byte("text\n"), 0o600); err != nil {
		f.Fatal(err)
	}
	run("add", "file")
	run("commit", "-q", "-m", "one")
	run("bundle", "create", "-q", "b", "refs/heads/agentlab/j")
	good, err := os.ReadFile(filepath.Join(work, "b"))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add(good[:len(good)-1])
	f.Add(bytes.Replace(good, []byte("PACK"), []byte("PAKC"), 1))
	f.Add([]byte("# v2 git bundle\n\nPACK\x00\x00\x00\x02\x00\x00\x00\x00"))
	f.Fuzz(func(t *testing.T, p []byte) {
		repo, scratch := t.TempDir(), t.TempDir()
		cmd := exec.Command("git", "init", "-q", repo)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		file := filepath.Join(scratch, "bundle")
		if err := os.WriteFile(file, p, 0o600); err != nil {
			t.Fatal(err)
		}
		before := worktest.Files(t, repo)
		_, err := takeBundle(t.Context(), scratch, file, repo)
		for name, content := range worktest.Files(t, repo) {
			if old, had := before[name]; had && old == content {
				continue
			}
			rel := strings.TrimPrefix(name, repo+"/")
			if err != nil && !strings.HasPrefix(rel, ".git/objects/") {
				t.Fatalf("refused (%v), but %s changed", err, rel)
			}
			if !strings.HasPrefix(rel, ".git/objects/") && rel != ".git/refs/agentlab/j" {
				t.Fatalf("%s changed", rel)
			}
		}
	})
}

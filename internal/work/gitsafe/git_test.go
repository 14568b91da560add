package gitsafe

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"

	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/worktest"
)

// A bundle holds one branch with its history, for branches, tags and bare
// commits alike, and packing changes nothing in the user's repository.
func TestPackBundle(t *testing.T) {
	repo := worktest.Repo(t)
	first := worktest.Git(t, repo, "rev-parse", "HEAD")
	worktest.Git(t, repo, "tag", "v1")
	worktest.Git(t, repo, "commit", "-q", "--allow-empty", "-m", "second")
	head := worktest.Git(t, repo, "rev-parse", "HEAD")
	refsBefore := worktest.Git(t, repo, "for-each-ref")
	tests := []struct{ ref, commit, branch string }{
		{"HEAD", head, "trunk"},
		{"trunk", head, "trunk"},
		{"v1", first, "agentlab-base"},
		{first, first, "agentlab-base"},
	}
	for _, tt := range tests {
		dir := t.TempDir()
		branch := branchName(t.Context(), repo, tt.ref)
		file, err := PackBundle(t.Context(), dir, LocalCommit{Objects: filepath.Join(repo, ".git", "objects"), Commit: tt.commit, Branch: branch}, nil)
		if err != nil {
			t.Fatalf("%s: %v", tt.ref, err)
		}
		_ = file.Close()
		heads := worktest.Git(t, dir, "bundle", "list-heads", file.Name())
		if want := tt.commit + " HEAD\n" + tt.commit + " refs/heads/" + tt.branch; heads != want && heads != reverseLines(want) {
			t.Errorf("%s: bundle heads are\n%s\nwant\n%s", tt.ref, heads, want)
		}
		clone := filepath.Join(dir, "clone")
		worktest.Git(t, dir, "clone", "-q", file.Name(), clone)
		if got := worktest.Git(t, clone, "rev-parse", "HEAD"); got != tt.commit {
			t.Errorf("%s: clone is at %s", tt.ref, got)
		}
	}
	if after := worktest.Git(t, repo, "for-each-ref"); after != refsBefore {
		t.Errorf("packing changed the refs:\n%s\nbefore:\n%s", after, refsBefore)
	}
}

func reverseLines(s string) string {
	a, b, _ := strings.Cut(s, "\n")
	return b + "\n" + a
}

// Hooks, file system monitors and pagers that a repository names are not run.
func TestGitRunsNothingOfTheRepository(t *testing.T) {
	repo := worktest.Repo(t)
	marker := filepath.Join(t.TempDir(), "ran")
	script := filepath.Join(t.TempDir(), "evil.sh")
	if err := os.WriteFile(script, []byte("#!/bin/sh\ntouch "+marker+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	worktest.Git(t, repo, "config", "core.fsmonitor", script)
	worktest.Git(t, repo, "config", "core.hooksPath", filepath.Dir(script))
	worktest.Git(t, repo, "config", "core.alternateRefsCommand", script)
	for _, hook := range []string{"post-index-change", "reference-transaction"} {
		if err := os.Link(script, filepath.Join(filepath.Dir(script), hook)); err != nil {
			t.Fatal(err)
		}
	}
	_ = os.Remove(marker) // the set-up itself may have run it
	for _, args := range [][]string{
		{"status", "--porcelain"},
		{"rev-parse", "--verify", "HEAD^{commit}"},
		{"update-ref", "refs/agentlab/test", "HEAD"},
	} {
		if _, err := Git(context.Background(), repo, args...); err != nil {
			t.Fatalf("git %v: %v", args, err)
		}
		if _, err := os.Stat(marker); err == nil {
			t.Fatalf("git %v ran a program that the repository names", args)
		}
	}
}

func TestLocalRepo(t *testing.T) {
	dir := t.TempDir()
	tests := []struct {
		arg       string
		local, ok bool
	}{
		{dir, true, true},
		{".", true, true},
		{"https://example.com/x", false, true},
		{"git@example.com:org/x", false, true},
		{"./no-such-folder", false, false},
		{"no-such-folder", false, false},
		{"/no/such/folder", false, false},
	}
	for _, tt := range tests {
		_, local, err := LocalRepo(tt.arg)
		if local != tt.local || (err == nil) != tt.ok {
			t.Errorf("localRepo(%q) = %v, %v", tt.arg, local, err)
		}
	}
}

// A local repository is sent at any revision that resolves to one commit.
func TestFindSourceByRevision(t *testing.T) {
	t.Parallel()
	dir := worktest.Repo(t)
	for range 2 {
		worktest.Git(t, dir, "commit", "-q", "--allow-empty", "-m", "More")
	}
	worktest.Git(t, dir, "tag", "v1")
	head := worktest.Git(t, dir, "rev-parse", "HEAD")
	for ref, want := range map[string]string{
		"": head, "HEAD": head, "trunk": head, "v1": head, head[:10]: head, "@": head, "HEAD^0": head,
		"HEAD~2": worktest.Git(t, dir, "rev-parse", "HEAD~2"), "trunk^": worktest.Git(t, dir, "rev-parse", "HEAD~1"), "v1~1": worktest.Git(t, dir, "rev-parse", "HEAD~1"),
		"HEAD~9": "", "nope": "", "^HEAD": "", "HEAD~1..HEAD": "", "--all": "", "-n1": "", "--output=x": "", "HEAD:a.txt": "", "a\x1bb": "",
	} {
		src, err := FindCommit(t.Context(), dir, ref)
		switch {
		case want == "" && agentlab.CodeOf(err) != agentlab.CodeNotFound:
			t.Errorf("%q: %+v, %v", ref, src, err)
		case want != "" && (err != nil || src.Commit != want):
			t.Errorf("%q: %s, %v; want %s", ref, src.Commit, err, want)
		case err == nil && agentlab.ValidateRef(src.Branch) != nil:
			t.Errorf("%q travels as %q", ref, src.Branch)
		}
	}
	worktest.Git(t, dir, "checkout", "-q", "--orphan", "empty")
	if _, err := FindCommit(t.Context(), dir, ""); agentlab.CodeOf(err) != agentlab.CodeInvalid || agentlab.HintOf(err) == "" {
		t.Errorf("a branch without a commit: %v", err)
	}
}

// Packing shows what git itself says, and a short step shows nothing.
func TestMeterOfPacking(t *testing.T) {
	repo := worktest.Repo(t)
	src, err := FindCommit(t.Context(), repo, "")
	if err != nil {
		t.Fatal(err)
	}
	pack := func(now func() time.Time) string {
		t.Helper()
		var out bytes.Buffer
		m := work.NewMeter(&out, now, false)
		file, err := PackBundle(t.Context(), t.TempDir(), src, &GitProgress{M: m, What: "packing"})
		if err != nil {
			t.Fatal(err)
		}
		_ = file.Close()
		return out.String()
	}
	hour := time.Unix(0, 0)
	if got := pack(func() time.Time { hour = hour.Add(time.Hour); return hour }); !strings.Contains(got, "packing: writing objects, 100% of 3") {
		t.Errorf("progress is %q", got)
	}
	if got := pack(func() time.Time { return time.Unix(0, 0) }); got != "" {
		t.Errorf("a step that takes no time shows %q", got)
	}
}

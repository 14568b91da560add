package session

import (
	"archive/tar"
	"bytes"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/work/transfer"
	"github.com/agentlab-vm/agentlab/internal/work/worktest"
)

// artifactSession returns the session of a guest whose files are those of w.guest. If
// archive is not nil, it is what the guest sends instead of the files.
func (w *sessionWorld) artifactSession(archive []byte) *Opened {
	w.Helper()
	c := worktest.CommandClient(w.T, func(command []string, in []byte) ([]byte, string, int) {
		if archive != nil && command[2] == "pull" {
			return archive, "", 0
		}
		args := slices.Clone(command[2:])
		for i, arg := range args {
			if rest, ok := strings.CutPrefix(arg, guestapi.RepoDir); ok {
				args[i] = w.guest + rest
			}
		}
		out, code, text := worktest.GuestFiles(w.guest, bytes.NewReader(in), args...)
		return out, text, code
	})
	return &Opened{
		Repo:    Repo{C: c, Sandbox: "1", Path: w.user},
		Session: api.Session{ID: "se-1", Name: "s"},
		Link:    Link{Path: w.user, Remote: remoteName, Session: "se-1"},
		Guest:   guestapi.RepoState{Worktrees: []guestapi.RepoWorktree{{Branch: "trunk"}, {Branch: "fix", Dir: ".worktrees/fix"}}},
	}
}

// userFiles are the files of the user's work tree that git does not have, with their
// content.
func (w *sessionWorld) userFiles() map[string]string {
	w.Helper()
	files := map[string]string{}
	err := filepath.WalkDir(w.user, func(name string, d os.DirEntry, err error) error {
		if d.Name() == ".git" && d.IsDir() {
			return filepath.SkipDir
		}
		if err == nil && !d.IsDir() {
			p, _ := os.ReadFile(name)
			at, _ := filepath.Rel(w.user, name)
			files[at] = string(p)
		}
		return err
	})
	if err != nil {
		w.Fatal(err)
	}
	return files
}

func TestSyncArtifacts(t *testing.T) {
	t.Parallel()
	w := newSessionWorld(t)
	worktest.Put(t, w.user, map[string]string{"dist/tracked.js": "of the user", ".gitignore": "*.log\nbuild/\n", ".agentlabignore": "*.map\n/build/cache/\n", "vendor/lib/x": "1"})
	worktest.Git(t, w.user, "add", "-A")
	worktest.Git(t, w.user, "commit", "-q", "-m", "files")
	worktest.Git(t, w.user, "init", "-q", "nested")
	worktest.Put(t, w.guest, map[string]string{
		"dist/app.js": "new", "dist/app.js.map": "map", "dist/TRACKED.js": "evil", "build/a.out": "binary", "build/cache/x": "cache",
		"build/.envrc": "evil", "build/.gitattributes": "evil", "nested/a.out": "evil", "-n.log": "log", "other.txt": "other",
		"vendor/lib/x/evil": "evil", ".worktrees/fix/only.log": "of the work tree",
	})
	worktest.Git(t, w.guest, "init", "-q", ".worktrees/fix")
	if err := os.Symlink("/etc/passwd", filepath.Join(w.guest, "build", "link")); err != nil {
		t.Fatal(err)
	}
	before := w.userFiles()
	s := w.artifactSession(nil)
	o := transfer.ArtifactOptions{Patterns: []string{"{dist,nested,vendor}/**", "build/**", "*.log"}, Gib: 1}
	got, err := PullArtifacts(t.Context(), w.app, s, o)
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{"-n.log", "build/a.out", "dist/app.js"}; !slices.Equal(got.Files, want) || got.Bytes != int64(len("log"+"binary"+"new")) {
		t.Errorf("%+v", got)
	}
	var skipped []string
	for _, e := range got.Skipped {
		skipped = append(skipped, e.Path)
	}
	slices.Sort(skipped)
	if want := []string{"build/.envrc", "build/.gitattributes", "build/cache/x", "build/link", "dist/TRACKED.js", "dist/app.js.map", "nested/a.out", "vendor/lib/x/evil"}; !slices.Equal(skipped, want) {
		t.Errorf("skipped %q", got.Skipped)
	}
	before["-n.log"], before["build/a.out"], before["dist/app.js"] = "log", "binary", "new"
	if after := w.userFiles(); !maps.Equal(after, before) {
		t.Errorf("files: %v", after)
	}

	// Equal files need no force.
	if _, err = PullArtifacts(t.Context(), w.app, s, o); err != nil {
		t.Error(err)
	}
	// Existing files stay, all of them, unless they may be replaced.
	worktest.Put(t, w.guest, map[string]string{"dist/app.js": "newer", "dist/second.js": "2"})
	_, err = PullArtifacts(t.Context(), w.app, s, o)
	if agentlab.CodeOf(err) != agentlab.CodeExists || !maps.Equal(w.userFiles(), before) {
		t.Errorf("%v", err)
	}
	o.Force = true
	if _, err = PullArtifacts(t.Context(), w.app, s, o); err != nil {
		t.Error(err)
	}
	before["dist/app.js"], before["dist/second.js"] = "newer", "2"
	if after := w.userFiles(); !maps.Equal(after, before) {
		t.Errorf("files: %v", after)
	}

	o.Worktree, o.Patterns = "fix", []string{"*.log"}
	if got, err = PullArtifacts(t.Context(), w.app, s, o); err != nil || !slices.Equal(got.Files, []string{"only.log"}) {
		t.Errorf("%+v %v", got, err)
	}
	o.Patterns = []string{"**"}
	if got, err = PullArtifacts(t.Context(), w.app, s, o); err != nil || !slices.Contains(got.Files, "only.log") {
		t.Errorf("%+v %v", got, err)
	}
	o.Patterns = []string{"nothing/**"}
	if _, err = PullArtifacts(t.Context(), w.app, s, o); agentlab.CodeOf(err) != agentlab.CodeNotFound {
		t.Error(err)
	}
}

// TestHostileArtifacts has guests that send something else than what was asked for.
func TestHostileArtifacts(t *testing.T) {
	t.Parallel()
	dir := tar.Header{Name: "./", Typeflag: tar.TypeDir, Mode: 0o755}
	dist := tar.Header{Name: "dist/", Typeflag: tar.TypeDir, Mode: 0o755}
	for name, entries := range map[string][]tar.Header{
		"other file":        {dir, {Name: "other.txt", Typeflag: tar.TypeReg, Mode: 0o644}},
		"other directory":   {dir, {Name: "evil/", Typeflag: tar.TypeDir, Mode: 0o755}},
		"file and more":     {dir, dist, {Name: "dist/app.js", Typeflag: tar.TypeReg, Mode: 0o644}, {Name: "f.txt", Typeflag: tar.TypeReg, Mode: 0o644}},
		"name that leaves":  {dir, {Name: "../evil", Typeflag: tar.TypeReg, Mode: 0o644}},
		"absolute name":     {dir, {Name: "/tmp/evil", Typeflag: tar.TypeReg, Mode: 0o644}},
		"link in its place": {dir, dist, {Name: "dist/app.js", Typeflag: tar.TypeSymlink, Linkname: "../f.txt"}},
		"linked directory":  {dir, {Name: "dist", Typeflag: tar.TypeSymlink, Linkname: "."}, {Name: "dist/app.js", Typeflag: tar.TypeReg}},
		"hard link":         {dir, dist, {Name: "dist/app.js", Typeflag: tar.TypeLink, Linkname: "/etc/passwd"}},
		"directory instead": {dir, dist, {Name: "dist/app.js/", Typeflag: tar.TypeDir, Mode: 0o755}},
		"one file":          {{Name: "dist/app.js", Typeflag: tar.TypeReg, Mode: 0o644}},
		"nothing":           {},
	} {
		t.Run(name, func(t *testing.T) {
			w := newSessionWorld(t)
			worktest.Put(t, w.guest, map[string]string{"dist/app.js": "new"})
			var archive bytes.Buffer
			out := tar.NewWriter(&archive)
			for _, h := range entries {
				if err := out.WriteHeader(&h); err != nil {
					t.Fatal(err)
				}
			}
			if err := out.Close(); err != nil {
				t.Fatal(err)
			}
			before := w.userFiles()
			got, err := PullArtifacts(t.Context(), w.app, w.artifactSession(archive.Bytes()), transfer.ArtifactOptions{Patterns: []string{"dist/**"}, Force: true, Gib: 1})
			if err == nil {
				t.Errorf("accepted: %+v", got)
			}
			if after := w.userFiles(); !maps.Equal(after, before) {
				t.Errorf("files: %v", after)
			}
		})
	}
}

// TestArtifactsDoNotFollowLinks has links of the user, which lead the copy elsewhere.
func TestArtifactsDoNotFollowLinks(t *testing.T) {
	w := newSessionWorld(t)
	outside := t.TempDir()
	if err := os.Symlink(outside, filepath.Join(w.user, "dist")); err != nil {
		t.Fatal(err)
	}
	worktest.Put(t, w.guest, map[string]string{"dist/app.js": "new"})
	_, err := PullArtifacts(t.Context(), w.app, w.artifactSession(nil), transfer.ArtifactOptions{Patterns: []string{"dist/**"}, Force: true, Gib: 1})
	left, _ := os.ReadDir(outside)
	if err == nil || len(left) != 0 {
		t.Errorf("%v, %d files", err, len(left))
	}
}

package session

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/lfs"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/worktest"
	"github.com/agentlab-vm/agentlab/test/fakelfs"
)

// lfsWorld is a session whose repository has a commit with the file new.bin of Git LFS.
func lfsWorld(t *testing.T) (w *sessionWorld, object lfs.Pointer) {
	t.Helper()
	w = newSessionWorld(t)
	object, text := fakelfs.Pointer("object of the guest")
	worktest.Put(t, w.user, map[string]string{".gitattributes": "*.bin filter=lfs diff=lfs merge=lfs -text\n"})
	worktest.Git(t, w.user, "add", "-A")
	worktest.Git(t, w.user, "commit", "-q", "-m", "attributes")
	worktest.Git(t, w.guest, "pull", "-q")
	worktest.Git(t, w.user, "config", "filter.lfs.smudge", "touch "+filepath.Join(t.TempDir(), "ran")+"; false")
	worktest.Git(t, w.user, "config", "filter.lfs.required", "true")
	w.commit(map[string]string{"new.bin": text})
	return w, object
}

// sendsLFS is a guest that answers requests for objects of Git LFS with a text.
func (w *sessionWorld) sendsLFS(text string) guestFunc {
	return func(verb string, in []byte) ([]byte, string, int) {
		if verb == "lfs" {
			return []byte(text), "", 0
		}
		return w.honest(verb, in)
	}
}

func storeIn(repo string) lfs.Store { return lfs.Store{Dir: filepath.Join(repo, ".git/lfs/objects")} }

// A sync brings the objects of Git LFS of new commits, and the files become real, although
// no filter runs.
func TestSyncBringsLFSObjects(t *testing.T) {
	w, object := lfsWorld(t)
	s, err := w.open(w.sendsLFS(object.OID + " 19\nobject of the guest"))
	if err != nil {
		t.Fatal(err)
	}
	got, err := fetchSession(t.Context(), w.app, s)
	if err != nil || got.MissingLFS != 0 || !storeIn(w.user).Has(object) {
		t.Fatalf("%+v, %v", got, err)
	}
	if m, _, err := mergeSession(t.Context(), w.app, s, "", ""); err != nil || m == nil {
		t.Fatalf("%+v, %v", m, err)
	}
	if files := worktest.Tree(t, w.user); files["new.bin"] != "object of the guest" {
		t.Errorf("the files are %v", files)
	}
	fakelfs.Install(t)
	if got := worktest.Git(t, w.user, "-c", "filter.lfs.clean=git-lfs clean -- %f", "status", "--porcelain"); got != "" {
		t.Errorf("git takes it for a change: %s", got)
	}
}

// Without its object, a file stays a pointer, and the user learns of it.
func TestSyncNamesMissingLFSObjects(t *testing.T) {
	t.Parallel()
	w, _ := lfsWorld(t)
	s, err := w.open(w.sendsLFS(""))
	if err != nil {
		t.Fatal(err)
	}
	got, err := fetchSession(t.Context(), w.app, s)
	if err == nil {
		got.Merged, _, err = mergeSession(t.Context(), w.app, s, "", "")
	}
	if err != nil || got.MissingLFS != 1 || got.Merged == nil {
		t.Fatalf("%+v, %v", got, err)
	}
	NoteSynced(w.app, s, got)
	if !strings.Contains(w.notes.String(), "note: 1 object of Git LFS cannot be fetched") {
		t.Errorf("%s", w.notes.String())
	}
}

// What a guest sends instead of an object changes nothing.
func TestHostileLFSObjects(t *testing.T) {
	t.Parallel()
	for name, text := range map[string]string{
		"another content": "%s 19\nobject of the GUEST", "another object": strings.Repeat("ab", 32) + " 3\nabc", "too much": "%s 19\nobject of the guest%[1]s 19\nobject of the guest",
		"a path": "../../hooks/post-merge 3\nabc", "an endless line": strings.Repeat("x", 1<<20), "half": "%s 19\nobject",
	} {
		t.Run(name, func(t *testing.T) {
			w, object := lfsWorld(t)
			if strings.Contains(text, "%") {
				text = fmt.Sprintf(text, object.OID)
			}
			s, err := w.open(w.sendsLFS(text))
			if err != nil {
				t.Fatal(err)
			}
			before := w.refs()
			if _, err := fetchSession(t.Context(), w.app, s); agentlab.CodeOf(err) != agentlab.CodeDenied {
				t.Errorf("%v", err)
			}
			if w.refs() != before {
				t.Error("refs have changed")
			}
			found, _ := filepath.Glob(filepath.Join(storeIn(w.user).Dir, "*", "*", "*"))
			tmp, _ := filepath.Glob(filepath.Join(storeIn(w.user).Dir, ".agentlab-*"))
			for _, name := range append(found, tmp...) {
				if text, _ := os.ReadFile(name); filepath.Base(name) != object.OID || string(text) != "object of the guest" {
					t.Errorf("%s is there", name)
				}
			}
		})
	}
}

// A terminal with --sync fetches no more objects of Git LFS than commits.
func TestAutoSyncLimitsLFSObjects(t *testing.T) {
	w, object := lfsWorld(t)
	s, err := w.open(w.sendsLFS(object.OID + " 19\nobject of the guest"))
	if err != nil {
		t.Fatal(err)
	}
	left := int64(1000)
	s.Left = &left
	before := w.refs()
	_, big := fakelfs.Pointer("x")
	w.commit(map[string]string{"big.bin": strings.Replace(big, "size 1\n", "size 5000\n", 1)})
	if s.Guest, err = s.Repo.State(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := fetchSession(t.Context(), w.app, s); agentlab.CodeOf(err) != agentlab.CodeLimit || left != 0 || w.refs() != before {
		t.Errorf("%v, %d left", err, left)
	}
}

// The bundle of a job has the objects of Git LFS that are here; the others are named.
func TestBundleHasLFSObjects(t *testing.T) {
	repo := worktest.Repo(t)
	one, oneText := fakelfs.Pointer("one")
	_, goneText := fakelfs.Pointer("gone")
	worktest.Put(t, repo, map[string]string{".gitattributes": "*.bin filter=lfs diff=lfs merge=lfs -text\n", "a.bin": oneText, "gone.bin": goneText})
	worktest.Git(t, repo, "add", "-A")
	worktest.Git(t, repo, "commit", "-q", "-m", "LFS")
	if err := storeIn(repo).Put(one, strings.NewReader("one")); err != nil {
		t.Fatal(err)
	}
	src, err := gitsafe.FindCommit(t.Context(), repo, "")
	if err == nil {
		src.Lfs, err = gitsafe.FindLFS(t.Context(), repo, src.Commit)
	}
	if err != nil {
		t.Fatal(err)
	}
	file, err := gitsafe.PackBundle(t.Context(), t.TempDir(), src, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	clone := filepath.Join(t.TempDir(), "clone")
	worktest.Git(t, repo, "clone", "-q", "--bare", file.Name(), clone)
	heads := worktest.Git(t, repo, "bundle", "list-heads", file.Name())
	if !strings.Contains(heads, guestapi.RefLFS+one.OID) || strings.Count(heads, guestapi.RefLFS) != 1 {
		t.Errorf("the bundle has %s", heads)
	}
	id, _, _ := strings.Cut(heads[strings.Index(heads, guestapi.RefLFS)-41:], " ")
	if got := worktest.Git(t, clone, "cat-file", "blob", id); got != "one" {
		t.Errorf("the object is %q", got)
	}
	var out bytes.Buffer
	gitsafe.WarnUnsent(t.Context(), worktest.UI{Out: &out}, src)
	if !strings.Contains(out.String(), "1 Git LFS file (gone.bin)") || strings.Contains(out.String(), "a.bin") {
		t.Errorf("the note is %q", out.String())
	}
}

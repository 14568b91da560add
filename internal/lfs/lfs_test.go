package lfs

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// pointer returns the pointer of a content, and its text.
func pointer(content string) (Pointer, string) {
	p := Pointer{fmt.Sprintf("%x", sha256.Sum256([]byte(content))), int64(len(content))}
	return p, fmt.Sprintf("version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize %d\n", p.OID, p.Size)
}

func TestParse(t *testing.T) {
	want, text := pointer("content")
	for _, good := range []string{text, strings.TrimSuffix(text, "\n"), strings.Replace(text, "oid", "ext-0-x sha256:"+strings.Repeat("b", 64)+"\noid", 1)} {
		if got, ok := Parse([]byte(good)); !ok || got != want {
			t.Errorf("%q: %v, %v", good, got, ok)
		}
	}
	for _, bad := range []string{
		"", "content", text + strings.Repeat("x", MaxPointer), strings.Replace(text, "v1", "v2", 1), strings.Replace(text, "size ", "size -", 1),
		strings.Replace(text, want.OID, strings.ToUpper(want.OID), 1), strings.Replace(text, want.OID, "../../../"+want.OID[9:], 1), strings.Replace(text, "oid", "id", 1),
	} {
		if p, ok := Parse([]byte(bad)); ok {
			t.Errorf("%q: %v", bad, p)
		}
	}
}

// Objects are transferred whole and under their names, or not at all.
func TestTransfer(t *testing.T) {
	from, to := Store{t.TempDir()}, Store{filepath.Join(t.TempDir(), "objects")}
	var list []Pointer
	for _, content := range []string{"one", strings.Repeat("two", 50000), ""} {
		p, _ := pointer(content)
		list = append(list, p)
		if err := from.Put(p, strings.NewReader(content)); err != nil {
			t.Fatal(err)
		}
	}
	missing, _ := pointer("missing")
	list = append(list, missing)
	var sent bytes.Buffer
	if err := from.Send(&sent, list); err != nil {
		t.Fatal(err)
	}
	stream := sent.String()
	if n, err := to.Receive(&sent, list); n != 2 || err != nil || !to.Has(list[0]) || !to.Has(list[1]) || !to.Has(list[2]) || to.Has(missing) {
		t.Errorf("%d, %v", n, err)
	}
	for name, bad := range map[string]string{
		"not asked for": fmt.Sprintf("%s 5\nother", strings.Repeat("ab", 32)), "twice": stream + stream, "cut": stream[:len(stream)-1],
		"other content": strings.Replace(stream, "one", "eno", 1), "another size": strings.Replace(stream, " 3\n", " 4\n", 1),
		"a path": "../../../../etc/passwd 3\none", "a long line": strings.Repeat("x", 1<<20), "no size": list[0].OID + "\n",
	} {
		other := Store{filepath.Join(t.TempDir(), "objects")}
		if _, err := other.Receive(strings.NewReader(bad), list); err == nil {
			t.Errorf("%s was accepted", name)
		}
		if err := filepath.Walk(other.Dir, func(path string, st os.FileInfo, err error) error {
			if err == nil && st.Mode().IsRegular() {
				if text, _ := os.ReadFile(path); fmt.Sprintf("%x", sha256.Sum256(text)) != filepath.Base(path) {
					t.Errorf("%s left %s", name, path)
				}
			}
			return nil
		}); err != nil {
			t.Error(err)
		}
	}
	if p, _ := pointer("wrong"); to.Put(p, strings.NewReader("wrong too")) == nil || to.Has(p) {
		t.Error("an object that is too long was stored")
	}
}

// Pointers are found in trees and among new objects; other small files are none.
func TestPointersOfRepository(t *testing.T) {
	dir := t.TempDir()
	git := func(in io.Reader, out io.Writer, args ...string) error {
		cmd := exec.Command("git", append([]string{"-C", dir, "-c", "user.name=T", "-c", "user.email=t@localhost"}, args...)...)
		cmd.Stdin, cmd.Stdout = in, out
		return cmd.Run()
	}
	run := func(args ...string) string {
		t.Helper()
		var out bytes.Buffer
		if err := git(nil, &out, args...); err != nil {
			t.Fatalf("git %q: %v", args, err)
		}
		return strings.TrimSpace(out.String())
	}
	save := func(name, text string) string {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		run("add", "-A")
		run("commit", "-q", "-m", name)
		return run("rev-parse", "HEAD")
	}
	run("init", "-q")
	one, text := pointer("one")
	first := save("a.bin", text)
	if files, err := Files(git, first); err != nil || len(files) != 0 {
		t.Errorf("without attributes: %v, %v", files, err)
	}
	save("sub/.gitattributes", "*.bin filter=lfs diff=lfs merge=lfs -text\n")
	save("small", strings.Repeat("x", 200))
	two, text := pointer("two")
	last := save("sub/ä \t.bin", text)
	files, err := Files(git, last)
	if err != nil || len(files) != 2 || files[0].Path != "a.bin" || files[0].Pointer != one || files[1].Path != "sub/ä \t.bin" || files[1].Pointer != two {
		t.Errorf("%v, %v", files, err)
	}
	if same, err := Files(git, ""); err != nil || !slices.Equal(same, files) {
		t.Errorf("the index: %v, %v", same, err)
	}
	if list, err := New(git, last+"\n^"+first+"\n"); err != nil || len(list) != 1 || list[0] != two {
		t.Errorf("%v, %v", list, err)
	}
	store, err := StoreOf(git)
	if err != nil || store.Dir != filepath.Join(dir, ".git/lfs/objects") {
		t.Errorf("%v, %v", store, err)
	}
	for content, p := range map[string]Pointer{"one": one, "two": two} {
		if err := store.Put(p, strings.NewReader(content)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "a.bin"), []byte("changed"), 0o600); err != nil {
		t.Fatal(err)
	}
	done, err := store.Checkout(t.Context(), git, dir, nil, 1<<20)
	if err != nil || !slices.Equal(done, []string{"sub/ä \t.bin"}) {
		t.Errorf("%q, %v", done, err)
	}
	for name, want := range map[string]string{"a.bin": "changed", "sub/ä \t.bin": "two"} {
		if got, _ := os.ReadFile(filepath.Join(dir, name)); string(got) != want {
			t.Errorf("%s: %q", name, got)
		}
	}
	if got := run("-c", "filter.lfs.clean=git show "+files[1].Blob, "status", "--porcelain", "sub"); got != "" {
		t.Errorf("a file whose content is that of its pointer has changed: %s", got)
	}
	// A directory that has become a link leads nowhere.
	outside := t.TempDir()
	if err := os.WriteFile(filepath.Join(outside, "ä \t.bin"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.RemoveAll(filepath.Join(dir, "sub")), os.Symlink(outside, filepath.Join(dir, "sub"))); err != nil {
		t.Fatal(err)
	}
	if done, err := store.Checkout(t.Context(), git, dir, nil, 1<<20); err != nil || len(done) != 0 {
		t.Errorf("through a link: %q, %v", done, err)
	}
	run("config", "lfs.storage", "elsewhere")
	if store, err = StoreOf(git); err != nil || store.Dir != filepath.Join(dir, ".git/elsewhere/objects") {
		t.Errorf("%v, %v", store, err)
	}
}

package transfer

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"

	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/work/worktest"
)

func TestFindEnvFiles(t *testing.T) {
	top := t.TempDir()
	worktest.Fill(t, top, map[string]string{
		".env": "A=1", ".env.local": "B=2", ".envrc": "dotenv", ".env.example": "tracked", ".environment": "no", "env": "no",
		"app/.env.production": "C=3", "app/sub/.env": "D=4", "private/.env": "no", "node_modules/p/.env": "no", "build/.env": "E=5",
		"link/.env": "-> ../.env", "odd [x]*/.env": "F=6",
		".gitignore": "node_modules/\n.env\n.env.*\nbuild/*\n!.env.example\n", IgnoreFile: "private/\nlink\n",
	})
	worktest.Git(t, top, "init", "-q")
	worktest.Git(t, top, "add", "-f", ".gitignore", ".env.example")
	nested := filepath.Join(top, "nested")
	worktest.Fill(t, nested, map[string]string{".env": "no"})
	worktest.Git(t, nested, "init", "-q")

	want := []string{".env", ".env.local", ".envrc", "app/.env.production", "app/sub/.env", "build/.env", "odd [x]*/.env"}
	for _, dir := range []string{top, filepath.Join(top, "app")} {
		if _, names, err := FindEnvFiles(t.Context(), dir); err != nil || !slices.Equal(names, want) {
			t.Errorf("%s: %q, %v", dir, names, err)
		}
	}
	if err := os.Remove(filepath.Join(top, IgnoreFile)); err != nil {
		t.Fatal(err)
	}
	if _, names, err := FindEnvFiles(t.Context(), top); err != nil || len(names) != len(want)+2 {
		t.Errorf("without %s: %q, %v", IgnoreFile, names, err)
	}
	// What cannot be read must not send more.
	if err := os.Symlink("/etc/hostname", filepath.Join(top, IgnoreFile)); err != nil {
		t.Fatal(err)
	}
	if _, names, err := FindEnvFiles(t.Context(), top); err == nil {
		t.Errorf("a %s outside of the repository: %q", IgnoreFile, names)
	}
	if _, _, err := FindEnvFiles(t.Context(), t.TempDir()); agentlab.CodeOf(err) != agentlab.CodeInvalid {
		t.Error(err)
	}
}

// Only the files arrive, those in the guest are replaced, and everything else stays.
func TestPackNamedFiles(t *testing.T) {
	host, guest := t.TempDir(), t.TempDir()
	worktest.Fill(t, host, map[string]string{".env": "new", "a/b/.env": "deep", "a/secret": "no"})
	worktest.Fill(t, guest, map[string]string{"work/.env": "old", "work/a/other": "kept"})
	p, err := openPacker(host+"/.", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = p.Close() }()
	p.names = []string{".env", "a/b/.env"}
	var archive bytes.Buffer
	if err := p.pack(&archive); err != nil {
		t.Fatal(err)
	}
	packed := archive.Bytes()
	if _, code, text := worktest.GuestFiles(guest, bytes.NewReader(packed), p.pushArgs(Place{Path: "work/."}, "", true)...); code != 0 {
		t.Fatalf("%d: %s", code, text)
	}
	have := strings.Join(listing(t, filepath.Join(guest, "work")), "\n")
	for _, want := range []string{".env -rw-r--r-- new", "a/b/.env -rw-r--r-- deep", "a/other -rw-r--r-- kept"} {
		if !strings.Contains(have, want) {
			t.Errorf("%q is missing in %s", want, have)
		}
	}
	if strings.Contains(have, "secret") {
		t.Errorf("more was sent: %s", have)
	}
	if _, code, _ := worktest.GuestFiles(guest, bytes.NewReader(packed), p.pushArgs(Place{Path: "missing/."}, "", true)...); code != guestapi.FilesNoTarget {
		t.Errorf("a missing directory: exit code %d", code)
	}
}

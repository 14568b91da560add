package worktest

import (
	"archive/tar"
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/internal/guest/filescmd"
)

// GuestFiles runs 'agentlab-agent files' with home as the guest's home. It returns what the
// host gets.
func GuestFiles(home string, in io.Reader, args ...string) (out []byte, code int, text string) {
	var stdout bytes.Buffer
	c := filescmd.Command{Dir: home, Home: home, In: in, Out: &stdout}
	err := c.Run(args)
	if err != nil {
		text = "agentlab-agent: " + err.Error()
	}
	return stdout.Bytes(), filescmd.ExitCode(err), text
}

// Fill makes files below dir: a name that ends with a slash is a directory, and a
// content that begins with "-> " the target of a link.
func Fill(t testing.TB, dir string, files map[string]string) {
	t.Helper()
	for name, text := range files {
		at := filepath.Join(dir, name)
		err := os.MkdirAll(filepath.Dir(at), 0o755) //nolint:gosec // a test directory
		to, isLink := strings.CutPrefix(text, "-> ")
		switch {
		case err != nil:
		case strings.HasSuffix(name, "/"):
			err = os.MkdirAll(at, 0o755) //nolint:gosec // a test directory
		case isLink:
			err = os.Symlink(to, at)
		default:
			err = os.WriteFile(at, []byte(text), 0o644) //nolint:gosec // a test file
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// ArchiveOf returns a tar archive with the entries, each with the text "text" if it is
// a file.
func ArchiveOf(t testing.TB, entries ...tar.Header) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, h := range entries {
		if h.Typeflag == 0 {
			h.Typeflag = tar.TypeReg
		}
		if h.Typeflag == tar.TypeReg {
			h.Size = 4
		}
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if h.Size > 0 {
			if _, err := io.WriteString(w, "text"); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

// DirEntry is the entry of a directory in an archive.
func DirEntry(name string) tar.Header {
	return tar.Header{Name: name, Typeflag: tar.TypeDir, Mode: 0o755}
}

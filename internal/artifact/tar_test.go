package artifact

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
)

// FuzzTar stores two artifacts with any names, and takes the job's tar apart
// as the most trusting of programs would: every entry is a plain file below
// one directory, with the content that was stored.
func FuzzTar(f *testing.F) {
	f.Add("outputs/a.txt", "outputs/b", []byte("content"))
	f.Add("../../etc/passwd", "/etc/shadow", []byte("x"))
	f.Add("a", "a/b", []byte(""))
	f.Add("a\x00b", "c\nd", []byte("PAX"))
	f.Add(strings.Repeat("long/", 60)+"x", "\u202egpj.exe", bytes.Repeat([]byte("0"), 2000))
	f.Add(".git/hooks/post-checkout", "x/../../y", []byte("#!/bin/sh"))
	f.Fuzz(func(t *testing.T, one, two string, content []byte) {
		x := setup(t, Limits{JobBytes: 1 << 20})
		want := map[string]int{}
		for i, p := range []string{one, two} {
			if _, err := x.Put(t.Context(), job1, p, bytes.NewReader(content[:len(content)/(i+1)])); err == nil {
				want[job1+"/"+p] = len(content) / (i + 1)
			} else if code := agentlab.CodeOf(err); code != agentlab.CodeInvalid && code != agentlab.CodeConflict {
				t.Fatalf("%q: %v", p, err)
			}
		}
		var out bytes.Buffer
		if err := x.WriteTarGz(t.Context(), job1, &out); err != nil {
			t.Fatal(err)
		}
		zr, err := gzip.NewReader(&out)
		if err != nil {
			t.Fatal(err)
		}
		for tr := tar.NewReader(zr); ; {
			h, err := tr.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			size, known := want[h.Name]
			delete(want, h.Name)
			switch {
			case !known:
				t.Fatalf("%q was not stored", h.Name)
			case h.Typeflag != tar.TypeReg || h.Linkname != "" || h.Mode&^0o644 != 0:
				t.Fatalf("%q is not a regular file: %+v", h.Name, h)
			case !filepath.IsLocal(h.Name) || !strings.HasPrefix(h.Name, job1+"/"):
				t.Fatalf("%q leads out of the job's directory", h.Name)
			case h.Size != int64(size):
				t.Fatalf("%q has %d bytes, want %d", h.Name, h.Size, size)
			}
			if _, err := io.Copy(io.Discard, tr); err != nil {
				t.Fatal(err)
			}
		}
		if len(want) > 0 {
			t.Fatalf("left out: %v", want)
		}
	})
}

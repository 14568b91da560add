package transfer

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/agentlab-vm/agentlab/internal/work/worktest"
)

func TestArchiveIsCopiedUnchanged(t *testing.T) {
	whole := worktest.ArchiveOf(t, tar.Header{Name: "./", Typeflag: tar.TypeDir}, tar.Header{Name: "./a b\n"}, tar.Header{Name: "./..x/-y"},
		tar.Header{Name: "./link", Typeflag: tar.TypeSymlink, Linkname: "/etc/passwd"}, tar.Header{Name: "./hard", Typeflag: tar.TypeLink, Linkname: "./a b\n"},
		tar.Header{Name: "./" + strings.Repeat("long/", 60) + "x", PAXRecords: map[string]string{"SCHILY.xattr.user.x": "y"}}, tar.Header{Name: "./pipe", Typeflag: tar.TypeFifo})
	whole = append(whole, make([]byte, 10240)...) // as GNU tar does
	for name, from := range map[string]io.Reader{"at once": bytes.NewReader(whole), "byte by byte": iotest.OneByteReader(bytes.NewReader(whole)), "with the end": iotest.DataErrReader(bytes.NewReader(whole))} {
		var out bytes.Buffer
		if n, err := CopyArchive(&out, from, int64(len(whole)), nil); err != nil || n != 7 || !bytes.Equal(out.Bytes(), whole) {
			t.Errorf("%s: %d entries, %v", name, n, err)
		}
	}
}

func TestBadArchivesAreRefused(t *testing.T) {
	good := worktest.ArchiveOf(t, tar.Header{Name: "./a"})
	lost := errors.New("the connection was lost")
	for name, tc := range map[string]struct {
		from io.Reader
		want string
	}{
		"parent":        {bytes.NewReader(worktest.ArchiveOf(t, tar.Header{Name: "../a"})), "leaves its directory"},
		"deep parent":   {bytes.NewReader(worktest.ArchiveOf(t, tar.Header{Name: "./a/../../b"})), "leaves its directory"},
		"absolute":      {bytes.NewReader(worktest.ArchiveOf(t, tar.Header{Name: "/etc/passwd"})), "leaves its directory"},
		"hard link":     {bytes.NewReader(worktest.ArchiveOf(t, tar.Header{Name: "a", Typeflag: tar.TypeLink, Linkname: "../../etc/passwd"})), "outside"},
		"device":        {bytes.NewReader(worktest.ArchiveOf(t, tar.Header{Name: "./sda", Typeflag: tar.TypeBlock})), "no workspace has"},
		"cut off":       {bytes.NewReader(good[:1024]), "incomplete"},
		"cut in a file": {bytes.NewReader(good[:514]), "incomplete"},
		"empty":         {bytes.NewReader(nil), "incomplete"},
		"text":          {strings.NewReader(strings.Repeat("text", 200)), "damaged"},
		"more data":     {io.MultiReader(bytes.NewReader(good), strings.NewReader("more")), "after its end"},
		"endless":       {io.MultiReader(bytes.NewReader(good), zeros{}), "too long"},
		"lost":          {io.MultiReader(bytes.NewReader(good), iotest.ErrReader(lost)), lost.Error()},
		"too large":     {bytes.NewReader(worktest.ArchiveOf(t, make([]tar.Header, 0)...)), "more than"},
	} {
		limit := int64(1 << 20)
		if name == "too large" {
			limit = 100
		}
		if _, err := CopyArchive(io.Discard, tc.from, limit, nil); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v does not contain %q", name, err, tc.want)
		}
	}
}

// FuzzArchive copies what a guest could send as an archive. What is accepted is copied
// unchanged, has only names in its directory, and is within the limit.
func FuzzArchive(f *testing.F) {
	f.Add(worktest.ArchiveOf(f, tar.Header{Name: "./a"}, tar.Header{Name: "./b", Typeflag: tar.TypeLink, Linkname: "./a"}))
	f.Add(worktest.ArchiveOf(f, tar.Header{Name: "../a", PAXRecords: map[string]string{"path": "x"}}))
	f.Fuzz(func(t *testing.T, p []byte) {
		const limit = 1 << 16
		var out bytes.Buffer
		n, err := CopyArchive(&out, bytes.NewReader(p), limit, nil)
		if out.Len() > limit || !bytes.HasPrefix(p, out.Bytes()) {
			t.Fatalf("%d bytes were copied of %d", out.Len(), len(p))
		}
		if err != nil {
			return
		}
		if out.Len() != len(p) {
			t.Fatalf("%d bytes were copied of %d, without an error", out.Len(), len(p))
		}
		r := tar.NewReader(bytes.NewReader(p))
		for range n {
			h, err := r.Next()
			if err != nil || strings.HasPrefix(h.Name, "/") || strings.HasPrefix(h.Name+"/", "../") {
				t.Fatalf("%+v, %v", h, err)
			}
		}
	})
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }

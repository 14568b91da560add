package transfer

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/work/worktest"
)

// unpackTo extracts an archive to a new directory below dir.
func unpackTo(t testing.TB, dir string, archive []byte, limit int64) (got Copied, isDir bool, err error) {
	t.Helper()
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = root.Close() }()
	isDir, err = Unpack(root, bytes.NewReader(archive), limit, &got, nil)
	return got, isDir, err
}

// listing lists the files below dir.
func listing(t testing.TB, dir string) (all []string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(dir, name)
		st, err := d.Info()
		if err != nil {
			return err
		}
		line := fmt.Sprintf("%s %s", rel, st.Mode())
		switch {
		case d.Type() == fs.ModeSymlink:
			to, _ := os.Readlink(name)
			line = rel + " -> " + to
		case d.Type().IsRegular():
			text, _ := os.ReadFile(name)
			line += " " + string(text)
		}
		all = append(all, line)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func link(name, to string) tar.Header {
	return tar.Header{Name: name, Typeflag: tar.TypeSymlink, Linkname: to}
}

// A hostile guest cannot make cp write outside of the new directory, replace what it
// has extracted, or use more space than is allowed. Each archive is refused as a whole.
func TestHostileArchivesAreRefused(t *testing.T) {
	top := worktest.DirEntry("./")
	whole := worktest.ArchiveOf(t, top, tar.Header{Name: "./a"})
	for name, tc := range map[string]struct {
		archive []byte
		want    string
	}{
		"parent":              {worktest.ArchiveOf(t, top, tar.Header{Name: "../out"}), "leaves"},
		"deep parent":         {worktest.ArchiveOf(t, top, tar.Header{Name: "./a/../../out"}), "leaves"},
		"absolute":            {worktest.ArchiveOf(t, top, tar.Header{Name: "/tmp/out"}), "leaves"},
		"parent directory":    {worktest.ArchiveOf(t, top, worktest.DirEntry("../out/")), "leaves"},
		"parent link":         {worktest.ArchiveOf(t, top, link("../out", "a")), "leaves"},
		"long name":           {worktest.ArchiveOf(t, top, tar.Header{Name: "./" + strings.Repeat("a/", maxEntryName) + "x"}), "leaves"},
		"file over link":      {worktest.ArchiveOf(t, top, link("./a", "b"), tar.Header{Name: "./a"}), "twice"},
		"file through link":   {worktest.ArchiveOf(t, top, link("./a", "."), tar.Header{Name: "./a/x"}), "twice"},
		"link through link":   {worktest.ArchiveOf(t, top, worktest.DirEntry("./b/c"), link("./b/c/up", "../.."), link("./b/c/up/l", "../../..")), "twice"},
		"file twice":          {worktest.ArchiveOf(t, top, tar.Header{Name: "./a"}, tar.Header{Name: "a"}), "twice"},
		"directory over file": {worktest.ArchiveOf(t, top, tar.Header{Name: "./a"}, worktest.DirEntry("./a")), "twice"},
		"file in a file":      {worktest.ArchiveOf(t, top, tar.Header{Name: "./a"}, tar.Header{Name: "./a/b"}), "twice"},
		"file as top":         {worktest.ArchiveOf(t, top, tar.Header{Name: "."}), "something else"},
		"link as top":         {worktest.ArchiveOf(t, top, link(".", "/tmp")), "something else"},
		"hard link":           {worktest.ArchiveOf(t, top, tar.Header{Name: "./h", Typeflag: tar.TypeLink, Linkname: "/etc/passwd"}), "hard link"},
		"hard link inside":    {worktest.ArchiveOf(t, top, tar.Header{Name: "./a"}, tar.Header{Name: "./h", Typeflag: tar.TypeLink, Linkname: "./a"}), "hard link"},
		"unknown type":        {worktest.ArchiveOf(t, top, tar.Header{Name: "./x", Typeflag: '7'}), "type"},
		"only a link":         {worktest.ArchiveOf(t, link("x", "/etc/passwd")), "neither"},
		"only a device":       {worktest.ArchiveOf(t, tar.Header{Name: "x", Typeflag: tar.TypeChar}), "neither"},
		"two files":           {worktest.ArchiveOf(t, tar.Header{Name: "a"}, tar.Header{Name: "b"}), "neither"},
		"nothing":             {worktest.ArchiveOf(t), "empty"},
		"no bytes":            {nil, "incomplete"},
		"text":                {[]byte(strings.Repeat("text", 1000)), "damaged"},
		"cut in a file":       {whole[:1026], "damaged"},
		"cut after a file":    {whole[:1536], "incomplete"},
		"more data":           {append(slices.Clone(whole), "more"...), "after its end"},
		"sparse file":         {sparseArchive(t, 8<<20), "limit"},
		"large file":          {largeArchive(t, 2<<20), "limit"},
	} {
		dir := t.TempDir()
		inside := filepath.Join(dir, "in")
		if err := os.Mkdir(inside, 0o700); err != nil {
			t.Fatal(err)
		}
		_, _, err := unpackTo(t, inside, tc.archive, 1<<20)
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v does not contain %q", name, err, tc.want)
		}
		if files := listing(t, dir); slices.ContainsFunc(files[1:], func(f string) bool { return !strings.HasPrefix(f, "in") }) {
			t.Errorf("%s: wrote outside: %q", name, files)
		}
	}
}

// largeArchive has a directory with a file of a size.
func largeArchive(t testing.TB, size int64) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, h := range []*tar.Header{{Name: "./", Typeflag: tar.TypeDir}, {Name: "./large", Typeflag: tar.TypeReg, Size: size}} {
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := w.Write(make([]byte, size)); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

// sparseArchive has a file of a huge size that needs no space in the archive.
func sparseArchive(t testing.TB, size int64) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	if err := w.WriteHeader(&tar.Header{Name: "./", Typeflag: tar.TypeDir}); err != nil {
		t.Fatal(err)
	}
	sparseMap := []byte("1\n0\n0\n")
	h := &tar.Header{Name: "./sparse", Typeflag: tar.TypeReg, Size: 512, Format: tar.FormatPAX, PAXRecords: map[string]string{
		"VENDOR.x": "y",
	}}
	if err := w.WriteHeader(h); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(append(sparseMap, make([]byte, 512-len(sparseMap))...)); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	// The writer refuses the keys of sparse files. A record of the same length has the
	// place of theirs.
	records := fmt.Sprintf("%s%s%s", pax("GNU.sparse.major", "1"), pax("GNU.sparse.minor", "0"), pax("GNU.sparse.realsize", fmt.Sprint(size)))
	archive := buf.Bytes()
	at := bytes.Index(archive, []byte("VENDOR.x=y"))
	if at < 0 {
		t.Fatal("there is no record")
	}
	block := archive[at-at%512 : at-at%512+512]
	copy(block, make([]byte, 512))
	copy(block, records)
	header := archive[at-at%512-512 : at-at%512]
	copy(header[124:136], fmt.Sprintf("%011o\x00", len(records)))
	copy(header[148:156], "        ")
	sum := 0
	for _, b := range header {
		sum += int(b)
	}
	copy(header[148:156], fmt.Sprintf("%06o\x00 ", sum))
	return archive
}

// pax formats a record of an extended header.
func pax(key, value string) string {
	for n := len(key) + len(value) + 3; ; n++ {
		if r := fmt.Sprintf("%d %s=%s\n", n, key, value); len(r) == n {
			return r
		}
	}
}

// Files that could harm this machine later are left out and named; the rest is copied.
func TestUnsafeFilesAreLeftOut(t *testing.T) {
	archive := worktest.ArchiveOf(t, worktest.DirEntry("./"),
		tar.Header{Name: "./file", Mode: 0o7755}, tar.Header{Name: "./private"}, tar.Header{Name: "./d/deep/x", Mode: 0o644},
		tar.Header{Name: "./closed/", Typeflag: tar.TypeDir, Mode: 0o7000}, tar.Header{Name: "./closed/x"},
		link("./good", "d/deep/x"), link("./d/up", "../file"), link("./dangling", "nothing"),
		link("./absolute", "/etc/passwd"), link("./out", ".."), link("./d/out", "../../x"), link("./trick", "d/../file"), link("./hooks", ".git/hooks"),
		tar.Header{Name: "./pipe", Typeflag: tar.TypeFifo}, tar.Header{Name: "./null", Typeflag: tar.TypeChar}, tar.Header{Name: "./sda", Typeflag: tar.TypeBlock},
		worktest.DirEntry("./.git"), tar.Header{Name: "./.git/config"}, tar.Header{Name: "./d/.GIT/hooks/post-checkout"}, tar.Header{Name: "./d/git~1"}, tar.Header{Name: "./d/.g\u200cit"}, tar.Header{Name: "./deep/.git. /config"},
		tar.Header{Name: "./HEAD"},
	)
	dir := t.TempDir()
	got, isDir, err := unpackTo(t, dir, archive, 1<<20)
	if err != nil || !isDir {
		t.Fatal(isDir, err)
	}
	want := []string{
		"top drwxr-xr-x", "top/HEAD -rw------- text", "top/closed drwx------", "top/closed/x -rw------- text", "top/d drwxr-xr-x", "top/d/deep drwxr-xr-x", "top/d/deep/x -rw-r--r-- text", "top/d/up -> ../file",
		"top/dangling -> nothing", "top/file -rwxr-xr-x text", "top/good -> d/deep/x", "top/private -rw------- text",
	}
	if files := listing(t, dir)[1:]; !slices.Equal(files, want) {
		t.Errorf("has\n%s\nnot\n%s", strings.Join(files, "\n"), strings.Join(want, "\n"))
	}
	var skipped []string
	for _, s := range got.Skipped {
		if s.Reason == "" {
			t.Errorf("%s has no reason", s.Path)
		}
		skipped = append(skipped, s.Path)
	}
	slices.Sort(skipped)
	if want := []string{".git", "absolute", "d/.g\u200cit", "d/git~1", "d/out", "hooks", "null", "out", "pipe", "sda", "trick"}; !slices.Equal(skipped, want) {
		t.Errorf("%q were left out, not %q", skipped, want)
	}
	if got.Files != 5 || got.Links != 3 || got.Bytes != 4*5 {
		t.Errorf("%+v", got)
	}
}

func TestListOfSkippedFilesIsLimited(t *testing.T) {
	var r Copied
	for range maxSkipped + 5 {
		r.skip("x", "y")
	}
	if len(r.Skipped) != maxSkipped || r.SkippedMore != 5 {
		t.Errorf("%d and %d more", len(r.Skipped), r.SkippedMore)
	}
}

func TestLinksOfAnArchiveAreLimited(t *testing.T) {
	u := unpacker{got: &Copied{}, dirs: map[string]bool{"top": true}, linkBytes: maxLinkBytes}
	h := link("a", "b")
	if err := u.entry(&h, nil); err == nil || !strings.Contains(err.Error(), "too many links") {
		t.Error(err)
	}
}

func TestReadOneFile(t *testing.T) {
	for name, tc := range map[string]struct {
		archive []byte
		want    string
	}{
		"file":       {worktest.ArchiveOf(t, tar.Header{Name: "/any/../name"}), ""},
		"directory":  {worktest.ArchiveOf(t, worktest.DirEntry("./")), "not one file"},
		"link":       {worktest.ArchiveOf(t, link("x", "y")), "not one file"},
		"two files":  {worktest.ArchiveOf(t, tar.Header{Name: "a"}, tar.Header{Name: "b"}), "not one file"},
		"cut off":    {worktest.ArchiveOf(t, tar.Header{Name: "a"})[:1024], "incomplete"},
		"cut inside": {worktest.ArchiveOf(t, tar.Header{Name: "a"})[:514], "unexpected EOF"},
		"nothing":    {nil, "incomplete"},
		"empty":      {worktest.ArchiveOf(t), "empty"},
		"large":      {largeArchive(t, 1<<20)[512:], "limit"},
	} {
		var out strings.Builder
		err := readOneFile(bytes.NewReader(tc.archive), 1<<19, func(r io.Reader) error {
			_, err := io.Copy(&out, r)
			return err
		})
		if tc.want == "" && (err != nil || out.String() != "text") || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
			t.Errorf("%s: %q, %v", name, out.String(), err)
		}
	}
}

// FuzzUnpack extracts what a guest could send. Nothing is written outside, no link leads
// out, and no more is written than allowed.
func FuzzUnpack(f *testing.F) {
	f.Add(worktest.ArchiveOf(f, worktest.DirEntry("./"), tar.Header{Name: "./a"}, link("./b", "a"), link("./c/d", "../a")))
	f.Add(worktest.ArchiveOf(f, tar.Header{Name: "../a", PAXRecords: map[string]string{"path": "x"}}))
	f.Add(sparseArchive(f, 1<<12))
	f.Fuzz(func(t *testing.T, p []byte) {
		dir := t.TempDir()
		inside := filepath.Join(dir, "in")
		if err := os.Mkdir(inside, 0o700); err != nil {
			t.Fatal(err)
		}
		const limit = 1 << 16
		got, _, err := unpackTo(t, inside, p, limit)
		if got.Bytes > limit {
			t.Fatalf("%d bytes were written", got.Bytes)
		}
		root, rerr := os.OpenRoot(inside)
		if rerr != nil {
			t.Fatal(rerr)
		}
		defer func() { _ = root.Close() }()
		_ = filepath.WalkDir(dir, func(name string, d fs.DirEntry, werr error) error {
			if werr != nil {
				t.Fatal(werr)
			}
			rel, _ := filepath.Rel(inside, name)
			if name != dir && !filepath.IsLocal(rel) {
				t.Fatalf("%s is outside", name)
			}
			if d.Type()&^(fs.ModeDir|fs.ModeSymlink) != 0 {
				t.Fatalf("%s is %s", name, d.Type())
			}
			if d.Type() == fs.ModeSymlink {
				if _, serr := root.Stat(rel); err == nil && serr != nil && !errors.Is(serr, fs.ErrNotExist) {
					t.Logf("%s: %v", rel, serr)
					if strings.Contains(serr.Error(), "escapes") {
						t.Fatalf("the link %s leads out", rel)
					}
				}
			}
			return nil
		})
		if code := agentlab.CodeOf(err); err != nil && code != agentlab.CodeInvalid && code != agentlab.CodeLimit && code != agentlab.CodeUnavailable {
			t.Fatal(err)
		}
	})
}

// An archive without entries is read to its end: then tar can say why it is empty.
func TestEmptyArchiveIsReadToItsEnd(t *testing.T) {
	whole := append(worktest.ArchiveOf(t), make([]byte, 10240-1024)...)
	for name, read := range map[string]func(io.Reader) error{
		"file": func(r io.Reader) error { return readOneFile(r, 1, nil) },
		"tree": func(r io.Reader) error { _, err := Unpack(nil, r, 1, &Copied{}, nil); return err },
	} {
		in := bytes.NewReader(whole)
		if err := read(in); err == nil || in.Len() > 0 {
			t.Errorf("%s: %d bytes are left, %v", name, in.Len(), err)
		}
	}
}

// Package lfs reads the pointers of Git LFS, and stores and transfers the objects to
// which they point. It runs no program of Git LFS, and uses no server.
package lfs

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// Pointer is the content of a file of Git LFS in a repository.
type Pointer struct {
	OID  string // SHA-256 of the object, in hexadecimal
	Size int64  // of the object, in bytes
}

// MaxPointer limits the text of a pointer, in bytes, as Git LFS does.
const MaxPointer = 1024

// Parse reads a pointer. Text of another form is not one; see the specification,
// https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md.
func Parse(text []byte) (p Pointer, ok bool) {
	if len(text) > MaxPointer {
		return p, false
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	if len(lines) < 3 || lines[0] != "version https://git-lfs.github.com/spec/v1" {
		return p, false
	}
	p.Size = -1
	for _, line := range lines[1:] {
		key, value, _ := strings.Cut(line, " ")
		switch key {
		case "oid":
			p.OID = strings.TrimPrefix(value, "sha256:")
		case "size":
			n, err := strconv.ParseInt(value, 10, 64)
			if err != nil {
				return p, false
			}
			p.Size = n
		}
	}
	return p, IsOID(p.OID) && p.Size >= 0 && p.Size <= maxSize
}

// maxSize limits the size of an object, in bytes, so that a sum of sizes does not overflow.
const maxSize = 1 << 40

// IsOID reports whether s is the name of an object.
func IsOID(s string) bool { return len(s) == 64 && agentlab.IsHex(s, 64) && strings.ToLower(s) == s }

// Store is a directory of objects.
type Store struct{ Dir string }

// Path returns the path of an object.
func (s Store) Path(oid string) string { return filepath.Join(s.Dir, oid[:2], oid[2:4], oid) }

// Has reports whether the object of a pointer is in the store. The empty object always is.
func (s Store) Has(p Pointer) bool {
	st, err := os.Lstat(s.Path(p.OID))
	return p.Size == 0 || err == nil && st.Mode().IsRegular() && st.Size() == p.Size
}

// errContent is the error of an object whose content is not that of its name.
var errContent = errors.New("its content does not match its name")

// Put stores an object from its content, which must end after its size and have its hash.
func (s Store) Put(p Pointer, r io.Reader) error {
	dir := filepath.Dir(s.Path(p.OID))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	f, err := os.CreateTemp(s.Dir, ".agentlab-")
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(f.Name()) }()
	hash := sha256.New()
	n, err := io.Copy(io.MultiWriter(f, hash), io.LimitReader(r, p.Size+1))
	if err = errors.Join(err, f.Chmod(0o644), f.Sync(), f.Close()); err != nil {
		return err
	}
	if n != p.Size || hex.EncodeToString(hash.Sum(nil)) != p.OID {
		return fmt.Errorf("object %.12s of Git LFS is rejected: %w", p.OID, errContent)
	}
	return os.Rename(f.Name(), s.Path(p.OID))
}

// Send writes the objects of a list that the store has, for Receive.
func (s Store) Send(w io.Writer, list []Pointer) error {
	for _, p := range list {
		if !s.Has(p) || p.Size == 0 {
			continue
		}
		f, err := os.Open(s.Path(p.OID))
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(w, "%s %d\n", p.OID, p.Size)
		if err == nil {
			_, err = io.CopyN(w, f, p.Size)
		}
		if err = errors.Join(err, f.Close()); err != nil {
			return err
		}
	}
	return nil
}

// Receive stores the objects that Send has written. It accepts only objects of a list,
// each once, and returns how many it has stored.
func (s Store) Receive(r io.Reader, list []Pointer) (n int, err error) {
	want := map[Pointer]bool{}
	for _, p := range list {
		want[p] = true
	}
	s.sweep()
	for in := bufio.NewReader(r); ; n++ {
		line, err := readLine(in)
		if errors.Is(err, io.EOF) && line == "" {
			return n, nil
		}
		if err != nil {
			return n, err
		}
		oid, size, _ := strings.Cut(line, " ")
		var p Pointer
		if p.OID = oid; IsOID(oid) {
			p.Size, err = strconv.ParseInt(size, 10, 64)
		}
		if err != nil || !want[p] {
			return n, fmt.Errorf("object %.80q of Git LFS was not asked for", line)
		}
		delete(want, p)
		if err := s.Put(p, io.LimitReader(in, p.Size)); err != nil {
			return n, err
		}
	}
}

// unfinished is the age of a temporary file of Put that a killed process has left.
const unfinished = 24 * time.Hour

// sweep removes the files that killed processes have left.
func (s Store) sweep() {
	left, _ := filepath.Glob(filepath.Join(s.Dir, ".agentlab-*")) // the pattern is right
	for _, name := range left {
		if st, err := os.Lstat(name); err == nil && time.Since(st.ModTime()) > unfinished {
			_ = os.Remove(name)
		}
	}
}

// readLine reads a line of limited length.
func readLine(r *bufio.Reader) (string, error) {
	line, err := r.ReadSlice('\n')
	if err == nil && len(line) > 128 {
		err = bufio.ErrBufferFull
	}
	return strings.TrimSuffix(string(line), "\n"), err
}

// Git runs git in a repository.
type Git func(in io.Reader, out io.Writer, args ...string) error

// File is a file of Git LFS in a tree or an index.
type File struct {
	Path, Mode, Blob string
	Pointer
}

// Files returns the files of a commit, or with "" of the index, whose content is a
// pointer. There are none in a repository whose .gitattributes do not name Git LFS.
func Files(git Git, commit string) ([]File, error) {
	list := []string{"ls-files", "-s", "-v", "-z", "--full-name", ":/"}
	if commit != "" {
		list = []string{"ls-tree", "-r", "-z", "--full-tree", commit}
	}
	var out bytes.Buffer
	if err := git(nil, &out, list...); err != nil {
		return nil, err
	}
	var attributes, blobs []string
	files := map[string][]File{} // by blob
	for line := range strings.SplitSeq(out.String(), "\x00") {
		info, name, _ := strings.Cut(line, "\t")
		if commit == "" {
			var plain bool // without a flag such as assume-unchanged
			if info, plain = strings.CutPrefix(info, "H "); !plain {
				continue
			}
		}
		f := strings.Fields(info) // mode, type and blob, or mode, blob and stage
		if len(f) != 3 || !strings.HasPrefix(f[0], "100") || commit == "" && f[2] != "0" {
			continue
		}
		blob := f[2]
		if commit == "" {
			blob = f[1]
		}
		if path.Base(name) == ".gitattributes" && files[blob] == nil {
			attributes = append(attributes, blob)
		}
		if files[blob] == nil {
			blobs = append(blobs, blob)
		}
		files[blob] = append(files[blob], File{Path: name, Mode: f[0], Blob: blob})
	}
	used := false
	attributes, err := sized(git, attributes, 0, maxAttributes)
	if err == nil {
		err = contents(git, attributes, func(_ string, text []byte) {
			used = used || bytes.Contains(text, []byte("filter=lfs"))
		})
	}
	if err != nil || !used {
		return nil, err
	}
	var found []File
	err = pointers(git, blobs, func(blob string, p Pointer) {
		for _, f := range files[blob] {
			f.Pointer = p
			found = append(found, f)
		}
	})
	return found, err
}

// maxAttributes limits the .gitattributes files that are read, in bytes.
const maxAttributes = 1 << 20

// New returns the pointers among the objects that revisions select, which are the input
// of git rev-list.
func New(git Git, revs string) (list []Pointer, err error) {
	var objects bytes.Buffer
	if err := git(strings.NewReader(revs), &objects, "rev-list", "--objects", "--no-object-names", "--stdin"); err != nil {
		return nil, err
	}
	seen := map[Pointer]bool{}
	err = pointers(git, strings.Fields(objects.String()), func(_ string, p Pointer) {
		if !seen[p] {
			seen[p] = true
			list = append(list, p)
		}
	})
	return list, err
}

// pointers calls fn with the objects that are pointers.
func pointers(git Git, objects []string, fn func(blob string, p Pointer)) error {
	blobs, err := sized(git, objects, 101, MaxPointer)
	if err != nil {
		return err
	}
	return contents(git, blobs, func(blob string, text []byte) {
		if p, ok := Parse(text); ok {
			fn(blob, p)
		}
	})
}

// sized returns the objects that are blobs with sizes from least to most.
func sized(git Git, objects []string, least, most int) (blobs []string, err error) {
	if len(objects) == 0 {
		return nil, nil
	}
	var sizes bytes.Buffer
	if err := git(strings.NewReader(strings.Join(objects, "\n")+"\n"), &sizes, "cat-file", "--batch-check=%(objecttype) %(objectsize) %(objectname)"); err != nil {
		return nil, err
	}
	for line := range strings.Lines(sizes.String()) {
		f := strings.Fields(line)
		if len(f) != 3 || f[0] != "blob" {
			continue
		}
		if size, err := strconv.Atoi(f[1]); err == nil && size <= most && size >= least {
			blobs = append(blobs, f[2])
		}
	}
	return blobs, nil
}

// contents calls fn with the content of blobs. It holds some of them in memory.
func contents(git Git, blobs []string, fn func(blob string, text []byte)) error {
	for some := range slices.Chunk(blobs, 5000) {
		var out bytes.Buffer
		if err := git(strings.NewReader(strings.Join(some, "\n")+"\n"), &out, "cat-file", "--batch"); err != nil {
			return err
		}
		for out.Len() > 0 {
			head, err := out.ReadString('\n')
			if err != nil {
				return err
			}
			f := strings.Fields(head) // object, type and size
			if len(f) != 3 {
				continue // missing
			}
			size, err := strconv.Atoi(f[2])
			if err != nil || size < 0 || size >= out.Len() {
				return errors.New("git cat-file printed something else than objects")
			}
			fn(f[0], out.Next(size))
			out.Next(1)
		}
	}
	return nil
}

// StoreOf returns the store of a repository.
func StoreOf(git Git) (Store, error) {
	var dir, storage bytes.Buffer
	if err := git(nil, &dir, "rev-parse", "--path-format=absolute", "--git-common-dir"); err != nil {
		return Store{}, err
	}
	at := "lfs"
	if git(nil, &storage, "config", "--get", "lfs.storage") == nil && storage.Len() > 1 {
		at = strings.TrimSpace(storage.String())
	}
	if !filepath.IsAbs(at) {
		at = filepath.Join(strings.TrimSpace(dir.String()), at)
	}
	return Store{filepath.Join(at, "objects")}, nil
}

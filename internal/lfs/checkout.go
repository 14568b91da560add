package lfs

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"
)

// Checkout writes the objects of files that have the attribute filter=lfs into the work
// tree in dir, in place of their pointers, and returns the files. want selects some of
// them; nil means all. Other files with these names, such as ones with changes, stay, and
// so do files below links and those with a flag in the index. With more than limit bytes,
// nothing is written: the error is ErrTooLarge. The index forgets the sizes of the
// pointers: with them, git would take the files for changed ones without a look at their
// content.
func (s Store) Checkout(ctx context.Context, git Git, dir string, want func(File) bool, limit int64) (done []string, err error) {
	files, err := Files(git, "")
	if err != nil {
		return nil, err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	defer func() { _ = root.Close() }()
	files = slices.DeleteFunc(files, func(f File) bool {
		return want != nil && !want(f) || f.Size == 0 || !s.Has(f.Pointer) || !isPointer(root, f)
	})
	if files, err = filtered(git, files); err != nil || len(files) == 0 {
		return nil, err
	}
	var index strings.Builder
	for _, f := range files {
		if limit -= f.Size; limit < 0 {
			return nil, ErrTooLarge
		}
		fmt.Fprintf(&index, "%s %s\t%s\x00", f.Mode, f.Blob, f.Path)
	}
	// First, because it fails while another git runs.
	if err := git(strings.NewReader(index.String()), io.Discard, "update-index", "-z", "--index-info"); err != nil {
		return nil, err
	}
	for _, f := range files {
		replaced, err := s.replace(ctx, root, f)
		if err != nil {
			return done, err
		}
		if replaced {
			done = append(done, f.Path)
		}
	}
	return done, nil
}

// ErrTooLarge is the error of a Checkout of more bytes than its limit.
var ErrTooLarge = errors.New("the objects of Git LFS are too large to write them")

// filtered returns the files with the attribute filter=lfs.
func filtered(git Git, files []File) ([]File, error) {
	if len(files) == 0 {
		return nil, nil
	}
	var names strings.Builder
	for _, f := range files {
		names.WriteString(f.Path + "\x00")
	}
	var out bytes.Buffer
	if err := git(strings.NewReader(names.String()), &out, "check-attr", "-z", "--stdin", "filter"); err != nil {
		return nil, err
	}
	is := map[string]bool{}
	for f := range slices.Chunk(strings.Split(out.String(), "\x00"), 3) { // path, attribute and value
		is[f[0]] = len(f) == 3 && f[2] == "lfs"
	}
	return slices.DeleteFunc(files, func(f File) bool { return !is[f.Path] }), nil
}

// isPointer reports whether a file of a work tree is its pointer, and below no link.
func isPointer(root *os.Root, f File) bool {
	for at := path.Dir(f.Path); at != "."; at = path.Dir(at) {
		if st, err := root.Lstat(at); err != nil || !st.IsDir() {
			return false
		}
	}
	st, err := root.Lstat(f.Path)
	if err != nil || !st.Mode().IsRegular() || st.Size() > MaxPointer {
		return false
	}
	text, err := root.ReadFile(f.Path)
	p, ok := Parse(text)
	return err == nil && ok && p == f.Pointer
}

// Uncheckout is the reverse of Checkout: it writes the pointers of the index into a work
// tree in place of their objects, if the store has these.
func (s Store) Uncheckout(git Git, dir string) error {
	files, err := Files(git, "")
	if err != nil {
		return err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	texts, blobs := map[string][]byte{}, []string{}
	found := unchanged(root, slices.DeleteFunc(files, func(f File) bool { return !s.Has(f.Pointer) }))
	for _, f := range found {
		blobs = append(blobs, f.Blob)
	}
	if err := contents(git, blobs, func(blob string, text []byte) { texts[blob] = bytes.Clone(text) }); err != nil {
		return err
	}
	for _, f := range found {
		st, err := root.Lstat(f.Path)
		if err == nil {
			_, err = writeFile(root, f.Path, bytes.NewReader(texts[f.Blob]), st.Mode().Perm(), nil)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// WithoutObjects returns the names without files of the work tree in dir whose content is
// the object of the pointer in the index: without the filter, git takes them for changed
// ones if it reads them.
func WithoutObjects(git Git, dir string, names []string) ([]string, error) {
	files, err := Files(git, "")
	if err != nil || len(files) == 0 {
		return names, err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	defer func() { _ = root.Close() }()
	asked, same := map[string]bool{}, map[string]bool{}
	for _, name := range names {
		asked[name] = true
	}
	files = slices.DeleteFunc(files, func(f File) bool { return !asked[f.Path] })
	for _, f := range unchanged(root, files) {
		same[f.Path] = true
	}
	return slices.DeleteFunc(names, func(name string) bool { return same[name] }), nil
}

// unchanged returns the files whose content is the object of their pointer.
func unchanged(root *os.Root, files []File) (found []File) {
	for _, f := range files {
		st, err := root.Lstat(f.Path)
		if err != nil || !st.Mode().IsRegular() || st.Size() != f.Size || f.Size == 0 {
			continue
		}
		from, err := root.Open(f.Path)
		if err != nil {
			continue
		}
		hash := sha256.New()
		_, err = io.Copy(hash, io.LimitReader(from, f.Size+1))
		if err = errors.Join(err, from.Close()); err == nil && hex.EncodeToString(hash.Sum(nil)) == f.OID {
			found = append(found, f)
		}
	}
	return found
}

// replace writes an object to a file that is its pointer.
func (s Store) replace(ctx context.Context, root *os.Root, f File) (bool, error) {
	st, err := root.Lstat(f.Path)
	if err != nil || !st.Mode().IsRegular() {
		return false, nil
	}
	from, err := os.Open(s.Path(f.OID))
	if err != nil {
		return false, err
	}
	defer func() { _ = from.Close() }()
	return writeFile(root, f.Path, ctxReader{ctx, from}, st.Mode().Perm(), func() bool { return isPointer(root, f) })
}

// ctxReader is a reader that ends with its context.
type ctxReader struct {
	ctx context.Context
	r   io.Reader
}

func (r ctxReader) Read(p []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	return r.r.Read(p)
}

// writeFile replaces a file in one step, if that is still right when its new content is
// written; nil means that it is.
func writeFile(root *os.Root, name string, from io.Reader, mode os.FileMode, still func() bool) (bool, error) {
	tmp := path.Join(path.Dir(name), ".agentlab-"+rand.Text())
	to, err := root.OpenFile(tmp, os.O_CREATE|os.O_EXCL|os.O_WRONLY, mode)
	if err != nil {
		return false, err
	}
	defer func() { _ = root.Remove(tmp) }()
	_, err = io.Copy(to, from)
	if err = errors.Join(err, to.Close()); err != nil || still != nil && !still() {
		return false, err
	}
	return true, root.Rename(tmp, name)
}

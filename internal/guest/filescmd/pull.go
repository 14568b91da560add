package filescmd

import (
	"archive/tar"
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab/guestapi"
)

// maxName limits the length of a name on standard input, in bytes.
const maxName = 4096

// puller writes an archive.
type puller struct {
	w       *tar.Writer
	top     string // "" for a single file
	changed bool   // a file changed while it was read
}

// pull writes an archive of a file, or of a directory if kind is tree. A link that the
// path leads to is followed.
func (c *Command) pull(kind, path string, names bool) error {
	p := puller{w: tar.NewWriter(c.Out)}
	st, err := os.Stat(path)
	switch {
	case kind != guestapi.FilesFile && kind != guestapi.FilesTree:
		return errUsage
	case errors.Is(err, fs.ErrNotExist):
		return fail(guestapi.FilesMissing, "%s does not exist", shown(path))
	case err != nil:
		return err
	case st.IsDir() && kind != guestapi.FilesTree:
		return fail(guestapi.FilesIsDir, "%s is a directory", shown(path))
	case st.IsDir():
		if p.top, err = filepath.EvalSymlinks(path); err != nil {
			return err
		}
		if names {
			err = p.list(c.In)
		} else {
			err = p.tree()
		}
	case !st.Mode().IsRegular():
		return fail(guestapi.FilesSpecial, "%s is neither a file nor a directory", shown(path))
	default:
		err = p.single(path)
	}
	if err == nil {
		err = p.w.Close()
	}
	if err == nil && p.changed {
		err = fail(guestapi.FilesChanged, "files changed while they were read")
	}
	return err
}

// tree writes the directory without the content of directories of git.
func (p *puller) tree() error {
	return filepath.WalkDir(p.top, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) && path != p.top {
			p.changed = true
			return nil
		}
		if err != nil {
			return err
		}
		name, err := filepath.Rel(p.top, path)
		if err == nil {
			err = p.add(name)
		}
		if err == nil && d.IsDir() && d.Name() == ".git" && name != "." {
			return fs.SkipDir
		}
		return err
	})
}

// list writes the files with the names of the input.
func (p *puller) list(in io.Reader) error {
	names := bufio.NewScanner(in)
	names.Buffer(nil, maxName+1)
	names.Split(splitNUL)
	for names.Scan() {
		if err := p.add(names.Text()); err != nil {
			return err
		}
	}
	return names.Err()
}

// splitNUL is a bufio.SplitFunc for names that end with a NUL byte.
func splitNUL(data []byte, atEOF bool) (advance int, token []byte, err error) {
	for i, b := range data {
		if b == 0 {
			return i + 1, data[:i], nil
		}
	}
	if atEOF && len(data) > 0 {
		return 0, nil, errors.New("the last name is incomplete")
	}
	return 0, nil, nil
}

// add writes an entry of the directory. A file that was deleted is left out.
func (p *puller) add(name string) error {
	path := filepath.Join(p.top, name)
	st, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		p.changed = true
		return nil
	}
	if err != nil {
		return err
	}
	h := tar.Header{Name: "./" + name, Mode: int64(st.Mode().Perm()), ModTime: st.ModTime(), Format: tar.FormatPAX}
	switch {
	case st.IsDir():
		if h.Typeflag, h.Name = tar.TypeDir, h.Name+"/"; name == "." {
			h.Name = "./"
		}
	case st.Mode()&fs.ModeSymlink != 0:
		if h.Linkname, err = os.Readlink(path); errors.Is(err, fs.ErrNotExist) {
			p.changed = true
			return nil
		} else if err != nil {
			return err
		}
		h.Typeflag = tar.TypeSymlink
	case st.Mode().IsRegular():
		return p.file(path, h)
	case st.Mode()&fs.ModeSocket != 0:
		return nil // as tar does
	case st.Mode()&fs.ModeNamedPipe != 0:
		h.Typeflag = tar.TypeFifo
	default: // the host leaves it out with a note
		h.Typeflag = tar.TypeChar
	}
	return p.w.WriteHeader(&h)
}

// file writes a regular file with a header.
func (p *puller) file(path string, h tar.Header) error {
	f, err := openRegular(path, unix.O_NOFOLLOW)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ELOOP) || errors.Is(err, errNotRegular) {
		p.changed = true
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	return p.content(f, h)
}

// single writes an archive that has only one file.
func (p *puller) single(path string) error {
	f, err := openRegular(path, 0)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	st, err := f.Stat()
	if err != nil {
		return err
	}
	if st.Size() == 0 {
		if n, _ := f.Read(make([]byte, 1)); n > 0 {
			return fail(guestapi.FilesUnsized, "%s has content but no size", shown(path))
		}
	}
	return p.content(f, tar.Header{Name: filepath.Base(path), Mode: int64(st.Mode().Perm()), ModTime: st.ModTime(), Format: tar.FormatPAX})
}

// content writes a file with the size that it has at the beginning.
func (p *puller) content(f *os.File, h tar.Header) error {
	before, err := f.Stat()
	if err != nil {
		return err
	}
	h.Typeflag, h.Size = tar.TypeReg, before.Size()
	if err := p.w.WriteHeader(&h); err != nil {
		return err
	}
	n, err := io.Copy(p.w, io.LimitReader(f, h.Size))
	if err == nil && n < h.Size { // it became shorter
		_, err = io.CopyN(p.w, zeros{}, h.Size-n)
	}
	if err != nil {
		return err
	}
	after, err := f.Stat()
	if err != nil {
		return err
	}
	p.changed = p.changed || n < h.Size || after.Size() != h.Size || !after.ModTime().Equal(before.ModTime())
	return nil
}

// zeros is a reader without an end.
type zeros struct{}

// Read implements io.Reader.
func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

var errNotRegular = errors.New("it is no longer a file")

// openRegular opens a regular file, without waiting for what replaced it.
func openRegular(path string, flags int) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK|flags, 0)
	if err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = fmt.Errorf("%s: %w", shown(path), errNotRegular)
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

package filescmd

import (
	"archive/tar"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab/guestapi"
)

// stages are the directories beside destinations in which archives are extracted. A signal
// removes them.
type stages struct {
	mu   sync.Mutex
	open map[string]bool
	gone bool
}

var staged = stages{open: map[string]bool{}}

// create makes a directory in dir.
func (s *stages) create(dir string) (path string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.gone {
		return "", errors.New("the copy was interrupted")
	}
	if path, err = os.MkdirTemp(dir, guestapi.FilesStage); err == nil {
		s.open[path] = true
	}
	return path, err
}

// remove removes a directory.
func (s *stages) remove(path string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.open, path)
	_ = os.RemoveAll(path)
}

// RemoveOnSignal removes what copies have not finished when the host goes, which ends this
// process. It must be called before the first copy.
func RemoveOnSignal() {
	end := make(chan os.Signal, 1)
	signal.Notify(end, syscall.SIGHUP, syscall.SIGINT, syscall.SIGTERM)
	go func() {
		<-end
		staged.mu.Lock()
		staged.gone = true
		for path := range staged.open {
			_ = os.RemoveAll(path)
		}
		os.Exit(128 + int(syscall.SIGHUP))
	}()
}

// push extracts an archive.
type push struct {
	kind    string
	path    string // that the user named
	name    string // of the source
	mode    fs.FileMode
	replace bool
}

// run extracts an archive beside its destination, and then moves what it has there. An
// archive that is incomplete changes nothing.
func (p push) run(in io.Reader) error {
	to, dir, err := p.destination()
	if err != nil {
		return err
	}
	stage, err := staged.create(dir)
	if err != nil {
		return err
	}
	defer staged.remove(stage)
	root, err := os.OpenRoot(stage)
	if err != nil {
		return err
	}
	defer func() { _ = root.Close() }()
	fresh := filepath.Join(stage, guestapi.FilesNew)
	if p.kind == guestapi.FilesFile {
		if err := receiveFile(root, in, p.mode); err != nil {
			return err
		}
		return os.Rename(fresh, to)
	}
	dirs, err := receiveTree(root, in)
	if err != nil {
		return err
	}
	if exists(to) {
		if err := p.check(fresh, to); err != nil {
			return err
		}
		dirs = slices.DeleteFunc(dirs, func(d received) bool { return exists(filepath.Join(to, d.name)) })
		err = merge(fresh, to)
	} else {
		err = os.Rename(fresh, to)
	}
	for _, d := range slices.Backward(dirs) { // a mode may forbid changes below
		if err == nil {
			err = finish(filepath.Join(to, d.name), &d.h, true)
		}
	}
	return err
}

// received is a directory that was extracted. Its mode and time are set when it has its
// place, because a directory that may not be written cannot be moved.
type received struct {
	name string // relative to FilesNew
	h    tar.Header
}

// destination returns the path that a copy gets, and the directory for the stage. As cp
// does, it copies into a directory that exists.
func (p push) destination() (to, dir string, err error) {
	if isDir(p.path) {
		if to, err = filepath.EvalSymlinks(p.path); err != nil {
			return "", "", err
		}
		if dir = to; p.kind != guestapi.FilesContent {
			if p.name == "" {
				return "", "", errUsage
			}
			to = filepath.Join(to, p.name)
		}
	} else {
		if p.kind == guestapi.FilesFile && strings.HasSuffix(p.path, "/") {
			return "", "", fail(guestapi.FilesNoTarget, "%s is not a directory", shown(p.path))
		}
		above, name := filepath.Split(strings.TrimRight(p.path, "/"))
		if dir, err = filepath.EvalSymlinks(cmp.Or(above, ".")); err != nil || !isDir(dir) || name == "" || name == "." || name == ".." {
			return "", "", fail(guestapi.FilesNoTarget, "%s is not a directory", shown(above))
		}
		to = filepath.Join(dir, name)
	}
	switch {
	case p.kind == guestapi.FilesFile:
		if isDir(to) {
			return "", "", fail(guestapi.FilesIsDir, "%s is a directory", shown(to))
		}
		if !p.replace && exists(to) {
			return "", "", taken(to)
		}
	case p.kind != guestapi.FilesTree && p.kind != guestapi.FilesContent:
		return "", "", errUsage
	case isDir(to):
		dir = to
	case exists(to):
		return "", "", notADir(to)
	}
	return to, dir, nil
}

func taken(path string) error {
	return fail(guestapi.FilesExists, "would be replaced:\n%s", shown(path))
}

func notADir(path string) error {
	return fail(guestapi.FilesNotADir, "%s exists and is not a directory", shown(path))
}

var errCut = fail(guestapi.FilesCut, "the archive is incomplete")

// receiveFile extracts the parts of a file, and checks its size at their end.
func receiveFile(root *os.Root, in io.Reader, mode fs.FileMode) (err error) {
	f, err := root.OpenFile(guestapi.FilesNew, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if cerr := f.Close(); err == nil {
			err = cerr
		}
	}()
	for r := tar.NewReader(in); ; {
		_, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return cut(err)
		}
		if _, err := io.Copy(f, r); err != nil { //nolint:gosec // a tar archive is not compressed
			return cut(err)
		}
	}
	if err := drain(in); err != nil {
		return err
	}
	size, err := f.Seek(-guestapi.FilesSizeDigits, io.SeekEnd)
	if err != nil {
		return errCut
	}
	digits := make([]byte, guestapi.FilesSizeDigits)
	if _, err := io.ReadFull(f, digits); err != nil {
		return err
	}
	if n, err := strconv.ParseInt(string(digits), 10, 64); err != nil || n != size {
		return errCut
	}
	if err := f.Truncate(size); err != nil {
		return err
	}
	return f.Chmod(mode)
}

// receiveTree extracts the files below FilesNew. It returns the directories.
func receiveTree(root *os.Root, in io.Reader) (dirs []received, err error) {
	ended := false
	for r := tar.NewReader(in); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, cut(err)
		}
		name := filepath.Clean(h.Name)
		switch {
		case ended:
			return nil, fail(1, "the archive has %s after its end", shown(h.Name))
		case name == guestapi.FilesEnd:
			ended = true
		case h.Typeflag == tar.TypeDir:
			if err := root.MkdirAll(name, 0o700); err != nil {
				return nil, err
			}
			rel, err := filepath.Rel(guestapi.FilesNew, name)
			if err != nil || !filepath.IsLocal(rel) {
				return nil, fail(1, "the archive has %s", shown(h.Name))
			}
			dirs = append(dirs, received{rel, *h})
		default:
			if err := receiveEntry(root, name, h, r); err != nil {
				return nil, err
			}
		}
	}
	if err := drain(in); err != nil {
		return nil, err
	}
	if !ended {
		return nil, errCut
	}
	return dirs, nil
}

// receiveEntry extracts a file or a link.
func receiveEntry(root *os.Root, name string, h *tar.Header, r io.Reader) error {
	if err := root.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return err
	}
	switch h.Typeflag {
	case tar.TypeSymlink:
		if err := root.Symlink(h.Linkname, name); err != nil {
			return err
		}
		return finish(filepath.Join(root.Name(), name), h, false)
	case tar.TypeReg:
	default:
		return fmt.Errorf("the archive has %s of type %q", shown(h.Name), h.Typeflag)
	}
	f, err := root.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, fs.FileMode(h.Mode)&0o777|0o200)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, r)
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return cut(err)
	}
	return finish(filepath.Join(root.Name(), name), h, h.Mode&0o200 == 0)
}

// finish sets the time of a file that was extracted and, with mode, its mode.
func finish(path string, h *tar.Header, mode bool) error {
	if !h.ModTime.IsZero() {
		t := unix.NsecToTimespec(h.ModTime.UnixNano())
		if err := unix.UtimesNanoAt(unix.AT_FDCWD, path, []unix.Timespec{t, t}, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return err
		}
	}
	if !mode {
		return nil
	}
	return os.Chmod(path, fs.FileMode(h.Mode)&0o777&^umask())
}

// umask returns the mode bits that new files do not get.
var umask = sync.OnceValue(func() fs.FileMode {
	old := unix.Umask(0o022)
	unix.Umask(old)
	return fs.FileMode(old)
})

// cut returns the error for an archive that ends too early.
func cut(err error) error {
	if errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, tar.ErrHeader) {
		return errCut
	}
	return err
}

// drain reads what follows an archive: the host waits until all was read.
func drain(in io.Reader) error {
	_, err := io.Copy(io.Discard, in)
	return err
}

// check returns an error if a merge would replace a file without p.replace, or something
// that is not of its kind.
func (p push) check(from, to string) error {
	return walk(from, to, func(_, to string, d fs.DirEntry) error {
		st, err := os.Lstat(to)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return skipDir(d)
		case err != nil:
			return err
		case d.IsDir() && !st.IsDir():
			return notADir(to)
		case d.IsDir():
			return nil
		case st.IsDir():
			return fail(guestapi.FilesIsDir, "%s is a directory", shown(to))
		case !p.replace:
			return taken(to)
		}
		return nil
	})
}

// merge moves files into a directory that exists.
func merge(from, to string) error {
	return walk(from, to, func(from, to string, d fs.DirEntry) error {
		if d.IsDir() && exists(to) {
			return nil
		}
		if err := os.Rename(from, to); err != nil {
			return err
		}
		return skipDir(d)
	})
}

// skipDir is the answer of a function of fs.WalkDir that does not look into d.
func skipDir(d fs.DirEntry) error {
	if d.IsDir() {
		return fs.SkipDir
	}
	return nil
}

// walk calls fn for what is below a directory, with the path that it has below another.
func walk(from, to string, fn func(from, to string, d fs.DirEntry) error) error {
	return filepath.WalkDir(from, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == from {
			return err
		}
		name, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		return fn(path, filepath.Join(to, name), d)
	})
}

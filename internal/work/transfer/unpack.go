package transfer

import (
	"archive/tar"
	"cmp"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/returncheck"
	"github.com/agentlab-vm/agentlab/internal/work"
)

const (
	maxEntries   = 1 << 20  // of an archive
	maxEntryName = 4096     // bytes, of a name or of the target of a link
	maxLinkBytes = 32 << 20 // of all links, which are in memory
	// maxEntryHeader is the size of the headers of an entry in an archive that a guest
	// has reason to send.
	maxEntryHeader = 2 * (maxEntryName + 1024)
)

// unpacker extracts the archive of a guest to a directory that is new and empty.
// Nothing in the archive is trusted:
//
//   - The directory is an os.Root, and links are created after everything else, so
//     nothing is written through a link.
//   - Names must be local. Nothing is created twice, and there are no hard links.
//   - Links lead to a place in the directory, or are left out, as are devices, pipes and
//     sockets.
//   - .git is left out: its configuration would run programs on this machine. What becomes
//     a repository otherwise is left to the return check.
//   - Sizes and numbers are limited.
type unpacker struct {
	root *os.Root
	left int64 // bytes of files that are still allowed
	got  *Copied
	show func() // progress; may be nil

	links     []tar.Header
	linkBytes int
	entries   int
	dirs      map[string]bool // that were created
}

// errArchive returns the error for an archive that is refused.
func errArchive(format string, args ...any) error {
	return agentlab.Errorf(agentlab.CodeInvalid, "the sandbox sent an archive that is refused: "+format, args...)
}

// Unpack extracts an archive as the name "top" in root: a directory if the first entry
// is one, and else the only file. It reads the archive to its end.
func Unpack(root *os.Root, from io.Reader, maxBytes int64, got *Copied, show func()) (isDir bool, err error) {
	u := unpacker{root: root, left: maxBytes, got: got, show: show, dirs: map[string]bool{}}
	bounded := &limitedArchive{r: from, left: maxBytes + maxBytes/8 + maxEntries*maxEntryHeader}
	in := tar.NewReader(bounded)
	for {
		h, err := in.Next()
		switch {
		case errors.Is(err, io.EOF):
			if err := archiveEnd(bounded, bounded); err != nil { // tar can still say why there is nothing
				return false, err
			}
			if u.entries == 0 {
				return false, errArchive("it is empty")
			}
			return isDir, u.finish()
		case bounded.left < 0:
			return false, errArchive("it is too long")
		case err != nil:
			return false, errArchive("it is damaged or incomplete: %w", err)
		}
		if u.entries++; u.entries > maxEntries {
			return false, errArchive("it has more than %d entries", maxEntries)
		}
		if u.entries == 1 {
			isDir = h.Typeflag == tar.TypeDir
		}
		if !isDir {
			if u.entries > 1 || h.Typeflag != tar.TypeReg {
				return false, errArchive("it is neither a directory nor one file")
			}
			err = u.file("top", h, in)
		} else {
			err = u.entry(h, in)
		}
		if err != nil {
			return false, err
		}
	}
}

// readOneFile calls fn with the content of the only file of a guest's archive.
func readOneFile(from io.Reader, maxBytes int64, fn func(io.Reader) error) error {
	bounded := &limitedArchive{r: from, left: maxBytes + maxBytes/8 + maxEntryHeader}
	in := tar.NewReader(bounded)
	h, err := in.Next()
	switch {
	case errors.Is(err, io.EOF):
		return cmp.Or(archiveEnd(bounded, bounded), errArchive("it is empty"))
	case err != nil:
		return errArchive("it is damaged or incomplete: %w", err)
	case h.Typeflag != tar.TypeReg:
		return errArchive("it is not one file")
	case h.Size > maxBytes:
		return errTooLarge()
	}
	if err := fn(in); errors.Is(err, io.ErrUnexpectedEOF) {
		return errArchive("it is incomplete: %w", err)
	} else if err != nil {
		return err
	}
	if _, err := in.Next(); !errors.Is(err, io.EOF) {
		return errArchive("it is damaged, or not one file")
	}
	return archiveEnd(bounded, bounded)
}

// entry extracts one entry of a directory.
func (u *unpacker) entry(h *tar.Header, in io.Reader) error {
	if len(h.Name) > maxEntryName || !localName(h.Name) {
		return errArchive("an entry has a name that leaves the directory: %.200q", h.Name)
	}
	name := path.Clean(h.Name)
	if name == "." && h.Typeflag != tar.TypeDir {
		return errArchive("its directory is something else")
	}
	for part := range strings.SplitSeq(name, "/") {
		if returncheck.GitDir(part) {
			if path.Base(name) == part {
				u.got.skip(name, "it belongs to git")
			}
			return nil
		}
	}
	at := path.Join("top", name)
	switch h.Typeflag {
	case tar.TypeDir:
		return u.dir(at, h.Mode)
	case tar.TypeReg:
		if err := u.dir(path.Dir(at), 0o777); err != nil {
			return err
		}
		return u.file(at, h, in)
	case tar.TypeSymlink:
		if reason := returncheck.BadLink(name, h.Linkname); reason != "" {
			u.got.skip(name, "it "+reason)
			return nil
		}
		if u.linkBytes += len(at) + len(h.Linkname); u.linkBytes > maxLinkBytes {
			return errArchive("it has too many links")
		}
		u.links = append(u.links, tar.Header{Name: at, Linkname: h.Linkname})
		return u.dir(path.Dir(at), 0o777)
	case tar.TypeLink:
		return errArchive("it has the hard link %.200q", h.Name)
	case tar.TypeFifo, tar.TypeBlock, tar.TypeChar:
		u.got.skip(name, "it is a pipe or a device")
		return nil
	}
	return errArchive("the entry %.200q has the type %q", h.Name, h.Typeflag)
}

// dir creates a directory and those above it.
func (u *unpacker) dir(at string, mode int64) error {
	if u.dirs[at] {
		return nil
	}
	if at != "top" {
		if err := u.dir(path.Dir(at), 0o777); err != nil {
			return err
		}
	}
	// Always accessible for the user, so that its content can be created and removed.
	if err := u.root.Mkdir(at, fs.FileMode(mode)&0o777|0o700); err != nil {
		return u.fault(at, err)
	}
	u.dirs[at] = true
	u.got.Directories++
	return nil
}

// file creates a file with the content that follows its header.
func (u *unpacker) file(at string, h *tar.Header, in io.Reader) error {
	if h.Size > u.left {
		return errTooLarge()
	}
	u.left -= h.Size
	out, err := u.root.OpenFile(at, os.O_CREATE|os.O_EXCL|os.O_WRONLY, fs.FileMode(h.Mode)&0o777|0o600)
	if err != nil {
		return u.fault(at, err)
	}
	n, err := io.Copy(&shownWriter{out, u}, in)
	err = cmp.Or(err, out.Close())
	if err == nil && n != h.Size {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return u.fault(at, err)
	}
	u.got.Files++
	return nil
}

// errTooLarge is the error of a copy that is larger than its limit.
func errTooLarge() error {
	return agentlab.Errorf(agentlab.CodeLimit, "the files are larger than the limit of the copy").WithHint("allow more with --max-size")
}

// shownWriter counts what is written to a file.
type shownWriter struct {
	w io.Writer
	u *unpacker
}

// Write implements io.Writer.
func (s *shownWriter) Write(p []byte) (int, error) {
	n, err := s.w.Write(p)
	s.u.got.Bytes += int64(n)
	if s.u.show != nil {
		s.u.show()
	}
	return n, err
}

// finish creates the links.
func (u *unpacker) finish() error {
	for _, l := range u.links {
		if err := u.root.Symlink(l.Linkname, l.Name); err != nil {
			return u.fault(l.Name, err)
		}
		u.got.Links++
	}
	return nil
}

// fault returns the error for an entry that cannot be created. An existing one is due
// to the archive: the directory was empty.
func (u *unpacker) fault(at string, err error) error {
	name := strings.TrimPrefix(strings.TrimPrefix(at, "top"), "/")
	switch {
	case errors.Is(err, fs.ErrExist):
		return errArchive("it has %.200q twice", name)
	case errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, errArchiveSize):
		return errArchive("it is damaged or incomplete: %w", err)
	}
	return work.LocalFault(cmp.Or(name, "the file"), err)
}

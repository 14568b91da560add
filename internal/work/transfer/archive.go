package transfer

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"path/filepath"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
)

// maxArchive bounds the uncompressed archive of a workspace, in bytes: the headers of
// many small files can need more than the files.
func maxArchive(w api.Workspace) int64 { return int64(w.SizeGB) << 31 }

// CopyArchive copies a tar archive unchanged up to limit bytes and checks it: it is
// complete, and its entries are files, directories, links and pipes with names that
// stay in the directory to which it is extracted. It calls see, which may be nil, with each
// entry and its content, and returns their number.
func CopyArchive(to io.Writer, from io.Reader, limit int64, see func(*tar.Header, io.Reader) error) (entries int, err error) {
	bad := func(format string, args ...any) (int, error) {
		return entries, agentlab.Errorf(agentlab.CodeInvalid, "the archive "+format, args...)
	}
	bounded := &limitedArchive{r: from, left: limit}
	src := io.TeeReader(bounded, to)
	in := tar.NewReader(src)
	for {
		h, err := in.Next()
		switch {
		case errors.Is(err, io.EOF):
			return entries, archiveEnd(src, bounded)
		case bounded.left < 0:
			return bad("has more than %d bytes", limit)
		case err != nil:
			return bad("is damaged or incomplete: %w", err)
		case !localName(h.Name):
			return bad("has an entry whose name leaves its directory: %.200q", h.Name)
		}
		switch h.Typeflag {
		case tar.TypeReg, tar.TypeDir, tar.TypeSymlink, tar.TypeFifo:
		case tar.TypeLink:
			if !localName(h.Linkname) {
				return bad("has a link to a file outside of its directory: %.200q", h.Linkname)
			}
		default:
			return bad("has the entry %.200q of type %q, which no workspace has", h.Name, h.Typeflag)
		}
		entries++
		if see != nil {
			if err := see(h, in); err != nil {
				return entries, err
			}
		}
	}
}

// localName reports whether the name of an entry stays in the directory of its archive.
func localName(name string) bool {
	return filepath.IsLocal(strings.TrimSuffix(name, "/")) && !strings.ContainsRune(name, 0)
}

// limitedArchive reads up to left bytes, and records that r has ended.
type limitedArchive struct {
	r     io.Reader
	left  int64 // negative if there were more
	ended bool
}

// Read implements io.Reader.
func (l *limitedArchive) Read(p []byte) (int, error) {
	n, err := l.r.Read(p)
	if l.left -= int64(n); l.left < 0 {
		return 0, errArchiveSize
	}
	if n > 0 && errors.Is(err, io.EOF) {
		return n, nil // the next call returns it
	}
	l.ended = l.ended || errors.Is(err, io.EOF)
	return n, err
}

var errArchiveSize = errors.New("the archive is too long")

// archiveEnd copies what follows the end of an archive, which can be zeros only. The
// end itself is two blocks of zeros; an archive without it was cut off.
func archiveEnd(src io.Reader, archive *limitedArchive) error {
	if archive.ended {
		return agentlab.Errorf(agentlab.CodeInvalid, "the archive is incomplete")
	}
	buf := make([]byte, 4096)
	for {
		n, err := src.Read(buf)
		if len(bytes.Trim(buf[:n], "\x00")) > 0 {
			return agentlab.Errorf(agentlab.CodeInvalid, "the archive has data after its end")
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return agentlab.Errorf(agentlab.CodeInvalid, "the archive is damaged: %w", err)
		}
	}
}

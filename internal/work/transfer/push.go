package transfer

import (
	"archive/tar"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/returncheck"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/guestrun"
)

// maxPart is the size of the parts in which standard input is sent: its size is not
// known, and the end of an archive shows that it is complete.
const maxPart = 256 << 10

// Push copies a local file or directory, or standard input (from is "-"), to a sandbox.
func Push(ctx context.Context, ui work.UI, c *client.Client, stdin io.Reader, from string, to Place, opt Options) (Copied, error) {
	p, err := openPacker(from, stdin)
	if err != nil {
		return Copied{}, err
	}
	defer func() { _ = p.Close() }()
	p.got = Copied{Source: from, Destination: to.String()}
	base := filepath.Base(from)
	if from == "-" {
		base = path.Base(to.Path)
	}
	m := ui.Meter()
	var mu sync.Mutex // after an error of the guest, pack can still run
	p.show = func() {
		mu.Lock()
		defer mu.Unlock()
		moved(m, "sending", p.got)
	}
	err = sendArchive(ctx, c, to, opt, base, p)
	mu.Lock()
	defer mu.Unlock()
	m.Done()
	if err != nil {
		return Copied{}, err
	}
	return p.got, nil
}

// sendArchive sends what p packs, whose name in the sandbox is base.
func sendArchive(ctx context.Context, c *client.Client, to Place, opt Options, base string, p *packer) error {
	out, raw := io.Pipe()
	done := make(chan error, 1)
	go func() {
		err := p.pack(raw)
		done <- err
		_ = raw.CloseWithError(err) // the guest refuses an archive without its last entry
	}()
	code, text, err := runFiles(ctx, c, to, opt.User, p.pushArgs(to, base, opt.Force), guestrun.Input{PipeReader: out}, &bytes.Buffer{})
	_ = out.CloseWithError(guestrun.ErrEnded) // if it did not run
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil || code != 0 {
		select {
		case bad := <-done:
			if bad != nil && !errors.Is(bad, guestrun.ErrEnded) {
				return bad // this is why the guest failed
			}
		default: // it may wait for standard input
		}
		return cmp.Or(err, copyFault(to, code, text))
	}
	return <-done
}

// pushArgs returns the arguments of 'agentlab-agent files' for the archive.
func (p *packer) pushArgs(to Place, base string, replace bool) []string {
	args := []string{"push", "--mode", fmt.Sprintf("%o", p.mode.Perm())}
	if p.kind != guestapi.FilesContent {
		args = append(args, "--name", base)
	}
	if replace {
		args = append(args, "--replace")
	}
	return append(args, "--", p.kind, to.Path)
}

// packer writes archives of a local file or directory. What the user named can be a
// link; links below it are copied as such.
type packer struct {
	kind  string // of the guestapi.Files… kinds
	name  string
	mode  fs.FileMode
	got   Copied
	show  func() // progress
	file  io.ReadCloser
	size  int64 // of the file; negative if it is not known
	root  *os.Root
	names []string // of the files in root to send; nil: all
}

// openPacker opens a local file or directory.
func openPacker(name string, stdin io.Reader) (*packer, error) {
	p := &packer{kind: guestapi.FilesFile, name: name, show: func() {}}
	if name == "-" {
		p.name, p.mode, p.file, p.size = "standard input", 0o644, io.NopCloser(stdin), -1
		return p, nil
	}
	st, err := os.Stat(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, agentlab.Errorf(agentlab.CodeNotFound, "%s does not exist on this machine", name).WithHint("check the path; a path in a sandbox is SANDBOX:PATH")
	case err != nil:
		return nil, work.LocalFault(name, err)
	case st.IsDir():
		if p.kind = guestapi.FilesTree; (Place{Path: name}).content() {
			p.kind = guestapi.FilesContent
		}
		if p.root, err = os.OpenRoot(name); err != nil {
			return nil, work.LocalFault(name, err)
		}
		return p, nil
	case !st.Mode().IsRegular():
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "%s is neither a file nor a directory", name).WithHint("use - to send what a pipe has")
	}
	f, err := openRegular(os.OpenFile, name)
	if err != nil {
		return nil, err
	}
	st, err = f.Stat()
	if err != nil {
		_ = f.Close()
		return nil, work.LocalFault(name, err)
	}
	p.mode, p.file, p.size = st.Mode().Perm(), f, st.Size()
	return p, nil
}

// openRegular opens a regular file, without waiting for what replaced it.
func openRegular(open func(string, int, fs.FileMode) (*os.File, error), name string) (*os.File, error) {
	f, err := open(name, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, work.LocalFault(name, err)
	}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = errors.New("it is no longer a file")
	}
	if err != nil {
		_ = f.Close()
		return nil, work.LocalFault(name, err)
	}
	return f, nil
}

// Close closes what openPacker opened.
func (p *packer) Close() error {
	if p.root != nil {
		return p.root.Close()
	}
	return p.file.Close()
}

// pack writes the archive.
func (p *packer) pack(to io.Writer) (err error) {
	w := tar.NewWriter(to)
	switch {
	case p.root != nil:
		if err = p.tree(w); err == nil {
			err = w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: guestapi.FilesEnd, Mode: 0o600})
		}
	case p.size < 0:
		err = p.parts(w)
	default:
		err = p.content(w, p.file, p.name, p.mode, p.size, time.Time{})
	}
	if err == nil && p.root == nil {
		err = p.end(w)
	}
	if err != nil {
		return err
	}
	return w.Close()
}

// parts sends a file of unknown size.
func (p *packer) parts(w *tar.Writer) error {
	part := make([]byte, maxPart)
	for {
		n, err := io.ReadFull(p.file, part)
		ended := errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
		if err != nil && !ended {
			return work.LocalFault(p.name, err)
		}
		if err := p.content(w, bytes.NewReader(part[:n]), p.name, p.mode, int64(n), time.Time{}); err != nil || ended {
			return err
		}
	}
}

// end sends the size of a file.
func (p *packer) end(w *tar.Writer) error {
	p.got.Files++
	size := fmt.Sprintf("%0*d", guestapi.FilesSizeDigits, p.got.Bytes)
	if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: guestapi.FilesPart, Mode: 0o600, Size: int64(len(size))}); err != nil {
		return err
	}
	_, err := io.WriteString(w, size)
	return err
}

// content sends the entry of a file.
func (p *packer) content(w *tar.Writer, from io.Reader, name string, mode fs.FileMode, size int64, changed time.Time) error {
	as := guestapi.FilesPart
	if p.root != nil {
		as = path.Join(guestapi.FilesNew, name)
	}
	if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: as, Mode: int64(mode.Perm()), Size: size, ModTime: changed, Format: tar.FormatPAX}); err != nil {
		return err
	}
	n, err := io.Copy(&sentWriter{w, p}, io.LimitReader(from, size))
	if err == nil && n < size {
		return agentlab.Errorf(agentlab.CodeConflict, "%s became shorter while it was read", name).WithHint("run the command again")
	}
	return err
}

// sentWriter counts what is sent.
type sentWriter struct {
	w io.Writer
	p *packer
}

// Write implements io.Writer.
func (s *sentWriter) Write(b []byte) (int, error) {
	n, err := s.w.Write(b)
	if s.p.got.Bytes += int64(n); err == nil {
		s.p.show()
	}
	return n, err
}

// tree sends a directory. No link leads out of it: it is an os.Root.
func (p *packer) tree(w *tar.Writer) error {
	if p.names != nil {
		for _, name := range p.names {
			st, err := p.root.Lstat(name)
			if err != nil {
				return work.LocalFault(name, err)
			}
			if err := p.add(w, name, fs.FileInfoToDirEntry(st)); err != nil {
				return err
			}
		}
		return nil
	}
	return fs.WalkDir(p.root.FS(), ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return work.LocalFault(name, err)
		}
		if !returncheck.GitDir(path.Base(name)) {
			return p.add(w, name, d)
		}
		if p.got.skip(name, "it belongs to git"); d.IsDir() {
			return fs.SkipDir
		}
		return nil
	})
}

// add sends an entry of a directory.
func (p *packer) add(w *tar.Writer, name string, d fs.DirEntry) error {
	switch {
	case d.IsDir():
		st, err := d.Info()
		if err != nil {
			return work.LocalFault(name, err)
		}
		p.got.Directories++
		return w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: path.Join(guestapi.FilesNew, name) + "/", Mode: int64(st.Mode().Perm()), ModTime: st.ModTime(), Format: tar.FormatPAX})
	case d.Type() == fs.ModeSymlink:
		to, err := p.root.Readlink(name)
		if err != nil {
			return work.LocalFault(name, err)
		}
		st, err := d.Info()
		if err != nil {
			return work.LocalFault(name, err)
		}
		p.got.Links++
		return w.WriteHeader(&tar.Header{Typeflag: tar.TypeSymlink, Name: path.Join(guestapi.FilesNew, name), Linkname: to, Mode: 0o777, ModTime: st.ModTime(), Format: tar.FormatPAX})
	case !d.Type().IsRegular():
		p.got.skip(name, "it is a pipe, a device or a socket")
		return nil
	}
	f, err := openRegular(p.root.OpenFile, name)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	st, err := f.Stat()
	if err != nil {
		return work.LocalFault(name, err)
	}
	if err := p.content(w, f, name, st.Mode(), st.Size(), st.ModTime()); err != nil {
		return err
	}
	p.got.Files++
	return nil
}

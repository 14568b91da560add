package transfer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/returncheck"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
)

// Pull copies a file or a directory of a sandbox to a local path.
func Pull(ctx context.Context, ui work.UI, c *client.Client, from Place, to string, opt Options) (got Copied, err error) {
	target, err := findTarget(from, to)
	if err == nil {
		err = target.free(from, opt.Force)
	}
	if err != nil {
		return got, err
	}
	parent, err := os.OpenRoot(target.parent)
	if err != nil {
		return got, work.LocalFault(target.parent, err)
	}
	defer func() { _ = parent.Close() }()
	stage, remove, err := gitsafe.StageDir(parent)
	if err != nil {
		return got, err
	}
	defer remove()
	root, err := parent.OpenRoot(stage)
	if err != nil {
		return got, work.LocalFault(target.parent, err)
	}
	defer func() { _ = root.Close() }()
	got.Source = from.String()
	isDir := false
	m := ui.Meter()
	defer m.Done()
	got.Changed, err = fetchArchive(ctx, c, from, opt.User, guestapi.FilesTree, nil, func(archive io.Reader) (err error) {
		isDir, err = Unpack(root, archive, int64(opt.Gib)<<30, &got, func() { moved(m, "receiving", got) })
		return err
	})
	m.Done()
	if err != nil {
		return got, err
	}
	name, err := target.name(from, isDir)
	if err != nil {
		return got, err
	}
	got.Found, err = AdmitCopy(ctx, ui, root, target.parent, name, &got)
	if err != nil {
		return got, err
	}
	got.Findings = gitsafe.FindingsJSON(got.Found)
	if err := (installer{parent, opt.Force}).install(path.Join(stage, "top"), name); err != nil {
		return got, err
	}
	got.Destination = filepath.Join(target.parent, name)
	return got, nil
}

// AdmitCopy is the return check of a copy in a staging directory. It leaves out what is
// refused, unless that is everything, and asks about what must be confirmed.
func AdmitCopy(ctx context.Context, ui work.UI, stage *os.Root, parent, name string, got *Copied) ([]returncheck.Finding, error) {
	j, err := gitsafe.JudgeFiles(ctx, stage, "top", parent, name)
	if err != nil {
		return nil, err
	}
	bad := gitsafe.OfLevel(j.Found, returncheck.Refused)
	how := gitsafe.Admission{Dir: parent, Verb: "copied"}
	above := "\x00" // what was left out last
	for _, f := range bad {
		at := j.Staged[f.Path]
		if strings.HasPrefix(at, above+"/") {
			continue
		}
		if above = at; at == "top" {
			return nil, gitsafe.Admit(ctx, ui, bad, how)
		}
		if err := stage.RemoveAll(at); err != nil {
			return nil, work.LocalFault(f.Path, err)
		}
		got.skip(f.Path, "it "+strings.TrimPrefix(f.Why, "it "))
	}
	rest := j.Found[len(bad):]
	if len(bad) > 0 {
		if err := got.count(stage); err != nil {
			return nil, err
		}
		if got.Files == 0 {
			return nil, gitsafe.Admit(ctx, ui, bad, how)
		}
	}
	return rest, gitsafe.Admit(ctx, ui, rest, how)
}

// count counts what is left of a copy in a staging directory.
func (r *Copied) count(stage *os.Root) error {
	r.Files, r.Directories, r.Links, r.Bytes = 0, 0, 0, 0
	return fs.WalkDir(stage.FS(), "top", func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return work.LocalFault(name, err)
		}
		st, err := d.Info()
		switch {
		case err != nil:
			return work.LocalFault(name, err)
		case d.IsDir():
			r.Directories++
		case d.Type().IsRegular():
			r.Files++
			r.Bytes += st.Size()
		default:
			r.Links++
		}
		return nil
	})
}

// moved shows how much of a copy of unknown size was sent or received.
func moved(m *work.Meter, what string, got Copied) {
	m.Show(func() string {
		rate := int64(float64(got.Bytes) / max(m.Now().Sub(m.Began).Seconds(), 0.001))
		return fmt.Sprintf("%s: %s, %s/s", what, work.ByteSize(got.Bytes), work.ByteSize(rate))
	})
}

// fetchArchive gets an archive of a file or directory, or of the files in a directory whose
// names list has, each with a NUL byte at its end. It calls read with the archive, and read
// ends at the end of the archive. changed reports that files changed while they were read.
func fetchArchive(ctx context.Context, c *client.Client, from Place, user, kind string, list io.Reader, read func(io.Reader) error) (changed bool, err error) {
	args := []string{"pull"}
	if list != nil {
		args = append(args, "--names")
	}
	in, raw := io.Pipe()
	done := make(chan error, 1)
	go func() {
		err := read(in)
		_ = in.CloseWithError(cmp.Or(err, io.ErrClosedPipe))
		done <- err
	}()
	code, text, err := runFiles(ctx, c, from, user, append(args, "--", kind, from.Path), list, raw)
	_ = raw.CloseWithError(cmp.Or(err, io.EOF))
	bad := <-done
	switch {
	case ctx.Err() != nil:
		return false, ctx.Err()
	case err != nil && errors.Is(bad, err): // it ended the archive
		return false, err
	case err == nil && code != 0 && code != guestapi.FilesChanged: // then the archive is incomplete
		return false, copyFault(from, code, text)
	case bad != nil:
		return false, bad // what the guest sent is why the transfer ended
	}
	return code == guestapi.FilesChanged, err
}

// PullFile calls read with the content of a file of a sandbox.
func PullFile(ctx context.Context, c *client.Client, from Place, opt Options, read func(io.Reader) error) error {
	_, err := fetchArchive(ctx, c, from, opt.User, guestapi.FilesFile, nil, func(archive io.Reader) error {
		return readOneFile(archive, int64(opt.Gib)<<30, read)
	})
	return err
}

// target is where a copy goes: the directory parent, or a name in it.
type target struct {
	parent string
	last   string // "" if parent is what the user named
	slash  bool   // the user wrote a slash after the name
}

// findTarget looks up a local destination, which need not exist.
func findTarget(from Place, to string) (target, error) {
	st, err := os.Stat(to)
	switch {
	case err == nil && st.IsDir():
		return target{parent: filepath.Clean(to)}, nil
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return target{}, work.LocalFault(to, err)
	}
	clean := filepath.Clean(to)
	t := target{filepath.Dir(clean), filepath.Base(clean), strings.HasSuffix(to, "/")}
	if returncheck.GitDir(t.last) {
		return t, agentlab.Errorf(agentlab.CodeDenied, "%s is not copied from a sandbox: git runs programs that its configuration names", from).
			WithHint("fetch commits instead")
	}
	if st, err := os.Stat(t.parent); err != nil || !st.IsDir() {
		return t, agentlab.Errorf(agentlab.CodeNotFound, "the directory %s does not exist", t.parent).WithHint("mkdir -p %s", work.ShellQuote(t.parent))
	}
	return t, nil
}

// free returns an error, before anything is copied, if a file has the name of the copy.
func (t target) free(from Place, force bool) error {
	at := filepath.Join(t.parent, cmp.Or(t.last, from.base()))
	if st, err := os.Lstat(at); force || err != nil || st.IsDir() {
		return nil //nolint:nilerr // there is none
	}
	return agentlab.Errorf(agentlab.CodeExists, "%s exists", at).WithHint("use --force to replace it")
}

// name returns the path of the copy in the parent directory.
func (t target) name(from Place, isDir bool) (string, error) {
	switch {
	case t.last != "" && t.slash && !isDir:
		return "", agentlab.Errorf(agentlab.CodeNotFound, "the directory %s does not exist", filepath.Join(t.parent, t.last)).WithHint("create it, or remove the slash")
	case t.last != "":
		return t.last, nil
	case isDir && from.content():
		return ".", nil
	case returncheck.GitDir(from.base()):
		return "", agentlab.Errorf(agentlab.CodeDenied, "%s is not copied from a sandbox: git runs programs that its configuration names", from).
			WithHint("fetch commits instead")
	}
	return from.base(), nil
}

// installer moves extracted files to their place in a directory.
type installer struct {
	root  *os.Root
	force bool // replace existing files
}

// install moves a file or directory. If both are directories, it moves the content; it
// changes nothing if that is not possible.
func (i installer) install(from, to string) error {
	if err := i.check(from, to); err != nil {
		return err
	}
	return i.move(from, to)
}

// check returns an error if something exists that cannot be replaced. A file that is equal
// can.
func (i installer) check(from, to string) error {
	return i.walk(from, to, func(from, to string, have fs.FileInfo) error {
		if have != nil && !i.force && !gitsafe.SameContent(i.root, from, i.root, to) {
			return agentlab.Errorf(agentlab.CodeExists, "%s exists", to).WithHint("use --force to replace existing files")
		}
		return nil
	})
}

// move moves what check has checked.
func (i installer) move(from, to string) error {
	return i.walk(from, to, func(from, to string, _ fs.FileInfo) error {
		if err := i.root.Rename(from, to); err != nil {
			return work.LocalFault(to, err)
		}
		return nil
	})
}

// walk calls fn for each file, and for each directory that is new.
func (i installer) walk(from, to string, fn func(from, to string, have fs.FileInfo) error) error {
	have, err := i.root.Lstat(to)
	if errors.Is(err, fs.ErrNotExist) {
		return fn(from, to, nil)
	}
	if err != nil {
		return work.LocalFault(to, err)
	}
	is, err := i.root.Lstat(from)
	switch {
	case err != nil:
		return work.LocalFault(from, err)
	case is.IsDir() && !have.IsDir():
		return agentlab.Errorf(agentlab.CodeExists, "%s exists and is not a directory", to).WithHint("remove it, or choose another destination")
	case !is.IsDir() && have.IsDir():
		return agentlab.Errorf(agentlab.CodeExists, "%s is a directory, and a file in the sandbox", to).WithHint("remove it, or choose another destination")
	case !is.IsDir():
		return fn(from, to, have)
	}
	dir, err := i.root.Open(from)
	if err != nil {
		return work.LocalFault(from, err)
	}
	names, err := dir.Readdirnames(-1)
	_ = dir.Close()
	if err != nil {
		return work.LocalFault(from, err)
	}
	for _, name := range names {
		if err := i.walk(path.Join(from, name), path.Join(to, name), fn); err != nil {
			return err
		}
	}
	return nil
}

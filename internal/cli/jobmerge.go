package cli

import (
	"bufio"
	"context"
	"crypto/rand"
	"crypto/sha1" //nolint:gosec // the object names of git
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
)

// Modes of files in git's trees.
const (
	modeNone    = "000000"
	modeFile    = "100644"
	modeProgram = "100755"
	modeLink    = "120000"
	modeModule  = "160000"
)

// noBlob is the object name of a file that does not exist.
const noBlob = "0000000000000000000000000000000000000000"

// maxLink is the most bytes of a symbolic link's target.
const maxLink = 4096

// maxApplied is the most bytes of files that one command unpacks to apply. A
// guest sends less than a third of it.
const maxApplied = 1 << 30

// applyPlan says what applying changes to a work tree means. Nothing of the
// work tree changes while it is made.
type applyPlan struct {
	ch      changes
	job     string // its id
	w       *workTree
	dir     string // for files of ours
	room    int64  // bytes that may still be unpacked there
	steps   []applyStep
	dirty   []string // files to be changed that hold uncommitted work of the user
	same    int      // files that have the changes already
	skipped []string // submodules
}

// applyStep changes one file of the work tree.
type applyStep struct {
	change
	content string      // file of ours with the content, or a link's target; "" deletes
	perm    fs.FileMode // 0 keeps that of the file
	ours    string      // file of ours with the user's version, when that must be merged
}

// fileVersion is a file as the work tree has it.
type fileVersion struct {
	mode, blob string
	file       string // a copy, when git does not have the blob
	dirty      bool
}

func regular(mode string) bool { return mode == modeFile || mode == modeProgram }

// make decides for each change what is to be done.
func (p *applyPlan) make(ctx context.Context, list []change) error {
	var conflicts []string
	blobs := map[string]bool{}
	for _, c := range list {
		if c.oldMode == modeModule || c.newMode == modeModule {
			p.skipped = append(p.skipped, c.path)
			continue
		}
		if !slices.Contains([]string{modeNone, modeFile, modeProgram, modeLink}, c.newMode) {
			return agentlab.Errorf(agentlab.CodeDenied, "%s would get the mode %s; nothing was applied", plain(c.path), c.newMode)
		}
		ours, err := p.version(c.path)
		switch {
		case errors.Is(err, errInTheWay):
			conflicts = append(conflicts, c.path)
			continue
		case err != nil:
			return agentlab.Errorf(agentlab.CodeInvalid, "cannot read %s: %w", plain(c.path), err)
		case ours.mode == c.newMode && ours.blob == c.newBlob:
			p.same++
			continue
		}
		step := applyStep{change: c, perm: permOf(c)}
		if ours.blob != c.oldBlob || regular(ours.mode) != regular(c.oldMode) {
			if !regular(ours.mode) || !regular(c.oldMode) || !regular(c.newMode) {
				conflicts = append(conflicts, c.path)
				continue
			}
			blobs[c.oldBlob] = true
			if step.ours = ours.file; ours.file == "" {
				step.ours, blobs[ours.blob] = p.blobFile(ours.blob), true
			}
		}
		if ours.dirty {
			p.dirty = append(p.dirty, c.path)
		}
		if c.newMode != modeNone {
			step.content, blobs[c.newBlob] = p.blobFile(c.newBlob), true
		}
		p.steps = append(p.steps, step)
	}
	if len(conflicts) > 0 {
		return p.conflict(conflicts)
	}
	return p.readBlobs(ctx, blobs)
}

// permOf returns the permissions that a change sets; 0 when it sets none.
func permOf(c change) fs.FileMode {
	switch c.newMode {
	case c.oldMode:
		return 0
	case modeProgram:
		return 0o777 // the umask applies
	}
	return 0o666
}

func (p *applyPlan) conflict(paths []string) error {
	return agentlab.Errorf(agentlab.CodeConflict, "the changes do not fit these files: %s; nothing was applied", someNames(paths)).
		WithHint("resolve it with git: agentlab job fetch --with-changes %s, then git cherry-pick --no-commit refs/agentlab/%s-changes; or name the other files", p.job, p.job)
}

// errInTheWay means that something else than a file has a path of the changes.
var errInTheWay = errors.New("it is no file, or below something that is no folder")

// version returns the work tree's version of a file. One that git calls clean
// is the one of the index, whatever filters made of it.
func (p *applyPlan) version(name string) (fileVersion, error) {
	for dir := path.Dir(name); dir != "."; dir = path.Dir(dir) {
		st, err := p.w.root.Lstat(dir)
		if err == nil && !st.IsDir() {
			return fileVersion{}, errInTheWay
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fileVersion{}, err
		}
	}
	tracked, isTracked := p.w.index[name]
	st, err := p.w.root.Lstat(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fileVersion{mode: modeNone, blob: noBlob, dirty: isTracked}, nil
	case err != nil:
		return fileVersion{}, err
	case isTracked && !p.w.dirty[name] && !p.w.hidden[name]:
		return fileVersion{mode: tracked.mode, blob: tracked.blob}, nil
	case st.Mode()&fs.ModeSymlink != 0:
		target, err := p.w.root.Readlink(name)
		return fileVersion{mode: modeLink, blob: blobName([]byte(target)), dirty: true}, err
	case !st.Mode().IsRegular():
		return fileVersion{}, errInTheWay
	}
	v := fileVersion{mode: modeFile, dirty: true, file: filepath.Join(p.dir, "ours-"+rand.Text())}
	if st.Mode()&0o100 != 0 {
		v.mode = modeProgram
	}
	text, err := p.w.root.ReadFile(name)
	if err != nil {
		return v, err
	}
	if v.blob = blobName(text); p.w.hidden[name] && v.blob == tracked.blob {
		return fileVersion{mode: tracked.mode, blob: tracked.blob}, nil
	}
	return v, os.WriteFile(v.file, text, 0o600)
}

// blobName is the name that git gives to a blob.
func blobName(text []byte) string {
	h := sha1.New() //nolint:gosec // as above
	fmt.Fprintf(h, "blob %d\x00", len(text))
	h.Write(text)
	return hex.EncodeToString(h.Sum(nil))
}

func (p *applyPlan) blobFile(blob string) string { return filepath.Join(p.dir, "blob-"+blob) }

// readBlobs writes blobs to files of ours.
func (p *applyPlan) readBlobs(ctx context.Context, blobs map[string]bool) error {
	var names strings.Builder
	for blob := range blobs {
		names.WriteString(blob + "\n")
	}
	r, w := io.Pipe()
	done := make(chan error, 1)
	go func() {
		err := p.splitBlobs(r, len(blobs))
		_ = r.CloseWithError(err) // git ends when nobody reads
		done <- err
	}()
	_, err := p.ch.git(ctx, gitInput{stdin: strings.NewReader(names.String()), stdout: w}, "cat-file", "--batch")
	_ = w.Close()
	if readErr := <-done; err == nil || agentlab.CodeOf(readErr) == agentlab.CodeLimit {
		err = readErr
	}
	if agentlab.CodeOf(err) == agentlab.CodeLimit {
		return err
	}
	if err != nil && ctx.Err() == nil {
		return agentlab.Errorf(agentlab.CodeConflict, "the changed files cannot be read: %s; nothing was applied", plain(err.Error()))
	}
	return err
}

// splitBlobs reads the output of git cat-file --batch.
func (p *applyPlan) splitBlobs(r io.Reader, count int) error {
	in := bufio.NewReader(r)
	for range count {
		line, err := in.ReadString('\n')
		if err != nil {
			return err
		}
		var blob, kind string
		var size int64
		if n, _ := fmt.Sscanf(line, "%s %s %d", &blob, &kind, &size); n != 3 || kind != "blob" {
			return fmt.Errorf("%s is no file", strings.TrimSpace(line))
		}
		if p.room -= size; size < 0 || p.room < 0 {
			return agentlab.Errorf(agentlab.CodeLimit, "the changed files have more than %s unpacked; nothing was applied", byteSize(maxApplied)).
				WithHint("name some of them: agentlab job apply %s PATH; see 'agentlab job diff --stat %s'", p.job, p.job)
		}
		f, err := os.OpenFile(p.blobFile(blob), os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
		if err != nil {
			return err
		}
		_, err = io.CopyN(f, in, size)
		if err = errors.Join(err, f.Close()); err != nil {
			return err
		}
		if _, err := in.Discard(1); err != nil {
			return err
		}
	}
	return nil
}

// merge merges what must be, into files of ours, and checks links.
func (p *applyPlan) merge(ctx context.Context) error {
	var conflicts []string
	for i, s := range p.steps {
		if s.newMode == modeLink {
			if err := safeLink(s.path, s.content); err != nil {
				return agentlab.Errorf(agentlab.CodeDenied, "the link %s of the job leads elsewhere: %w; nothing was applied", plain(s.path), err)
			}
		}
		if s.ours == "" {
			continue
		}
		merged, err := os.Create(filepath.Join(p.dir, "merged-"+rand.Text()))
		if err != nil {
			return err
		}
		_, err = p.ch.git(ctx, gitInput{stdout: merged}, "merge-file", "-p", s.ours, p.blobFile(s.oldBlob), s.content)
		_ = merged.Close()
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil { // conflicting lines, or a binary file
			conflicts = append(conflicts, s.path)
		}
		p.steps[i].content = merged.Name()
	}
	if len(conflicts) > 0 {
		return p.conflict(conflicts)
	}
	return nil
}

// safeLink refuses links that leave the work tree or enter what git keeps.
func safeLink(name, content string) error {
	st, err := os.Stat(content)
	if err != nil {
		return err
	}
	if st.Size() > maxLink {
		return errors.New("its target is too long")
	}
	target, err := os.ReadFile(content) //nolint:gosec // our own file
	if err != nil {
		return err
	}
	if path.IsAbs(string(target)) || len(target) == 0 {
		return fmt.Errorf("%.100q is not relative", target)
	}
	down := false
	for part := range strings.SplitSeq(string(target), "/") {
		if part == ".." && down { // of a folder that may be a link
			return fmt.Errorf("%.100q goes up after it went down", target)
		}
		down = down || part != ".." && part != "." && part != ""
	}
	if to := path.Join(path.Dir(name), string(target)); to != "." {
		return safePath(to)
	}
	return nil
}

// write does a step. Every file appears whole. os.Root lets no link lead out
// of the work tree.
func (w *workTree) write(s applyStep) error {
	if s.content == "" {
		if err := w.root.Remove(s.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		for dir := path.Dir(s.path); dir != "." && w.root.Remove(dir) == nil; dir = path.Dir(dir) {
			continue // as git does, folders go with their last file
		}
		return nil
	}
	dir := path.Dir(s.path)
	if err := w.root.MkdirAll(dir, 0o777); err != nil { //nolint:gosec // the umask applies
		return err
	}
	tmp := path.Join(dir, ".agentlab-"+rand.Text())
	if s.newMode == modeLink {
		target, err := os.ReadFile(s.content)
		if err == nil {
			err = w.root.Symlink(string(target), tmp)
		}
		if err != nil {
			return err
		}
	} else if err := w.copyIn(s, tmp); err != nil {
		_ = w.root.Remove(tmp)
		return err
	}
	if err := w.root.Rename(tmp, s.path); err != nil {
		_ = w.root.Remove(tmp)
		return err
	}
	return nil
}

func (w *workTree) copyIn(s applyStep, tmp string) error {
	perm, keep := s.perm, false
	if st, err := w.root.Lstat(s.path); perm == 0 && err == nil && st.Mode().IsRegular() {
		perm, keep = st.Mode().Perm(), true
	}
	if perm == 0 {
		perm = 0o666
	}
	in, err := os.Open(s.content)
	if err != nil {
		return err
	}
	defer func() { _ = in.Close() }()
	out, err := w.root.OpenFile(tmp, os.O_CREATE|os.O_EXCL|os.O_WRONLY, perm)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	if err == nil && keep {
		err = out.Chmod(perm)
	}
	return errors.Join(err, out.Close())
}

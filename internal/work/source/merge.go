package source

import (
	"bufio"
	"bytes"
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
	"github.com/agentlab-vm/agentlab/internal/returncheck"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
)

// maxApplied limits the bytes of files that one command unpacks. A guest sends
// less than a third of it.
const maxApplied = 1 << 30

// applyPlan is the plan for applying changes to a work tree. Making it changes
// nothing in the work tree.
type applyPlan struct {
	ch      Changes
	w       *workTree
	Dir     string // for temporary files
	room    int64  // bytes that may still be unpacked there
	steps   []applyStep
	same    int                    // files that already have the changes
	skipped []string               // submodules
	left    []returncheck.Finding  // links that are left out
	applied map[string]appliedFile // what was applied before; nil if nothing was
	took    []gitsafe.Change       // all changes that are in the work tree afterwards, as the agent has them
	ours    map[string]hashedFile  // files of the user that are not as in the index
	env     []string               // of git in the work tree; see gitIn
}

// applyStep changes one file of the work tree.
type applyStep struct {
	gitsafe.Change
	content string      // temporary file with the content, or a link's target; "" deletes
	perm    fs.FileMode // 0 keeps the permissions of the file
	ours    string      // temporary file with the user's version, if it must be merged
	seen    fs.FileInfo // of the user's version; nil if there was none
	dirty   bool        // it has uncommitted changes of the user
}

// fileVersion is a file of the work tree.
type fileVersion struct {
	Mode, Blob string
	dirty      bool
	seen       fs.FileInfo // nil if it does not exist
}

// make decides what to do for each change.
func (p *applyPlan) make(ctx context.Context, list []gitsafe.Change) error {
	if err := p.hashOurs(ctx, list); err != nil {
		return err
	}
	var conflicts []conflict
	blobs := map[string]int{} // how many files need them
	for _, c := range list {
		if c.OldMode == gitsafe.ModeModule || c.NewMode == gitsafe.ModeModule {
			p.skipped = append(p.skipped, c.Path)
			continue
		}
		if !slices.Contains([]string{gitsafe.ModeNone, gitsafe.ModeFile, gitsafe.ModeProgram, gitsafe.ModeLink}, c.NewMode) {
			return agentlab.Errorf(agentlab.CodeDenied, "%s has the unsupported mode %s; nothing was applied", agentlab.WithoutControls(c.Path), c.NewMode)
		}
		ours, err := p.version(c.Path)
		switch {
		case errors.Is(err, errInTheWay):
			conflicts = append(conflicts, conflict{c.Path, err.Error()})
			continue
		case err != nil:
			return agentlab.Errorf(agentlab.CodeInvalid, "cannot read %s: %w", agentlab.WithoutControls(c.Path), err)
		case ours.Mode == c.NewMode && ours.Blob == c.NewBlob:
			p.same++
			continue
		}
		p.took = append(p.took, c)
		based, own := p.rebase(c, ours)
		c = based
		step := applyStep{Change: c, perm: permOf(c), seen: ours.seen}
		if ours.Blob != c.OldBlob || gitsafe.Regular(ours.Mode) != gitsafe.Regular(c.OldMode) {
			if !gitsafe.Regular(ours.Mode) || !gitsafe.Regular(c.OldMode) || !gitsafe.Regular(c.NewMode) {
				conflicts = append(conflicts, conflict{c.Path, mismatch(c, ours)})
				continue
			}
			blobs[c.OldBlob]++
			step.ours = p.blobFile(ours.Blob)
			blobs[ours.Blob]++
		}
		step.dirty = ours.dirty && !own
		if c.NewMode != gitsafe.ModeNone {
			step.content = p.blobFile(c.NewBlob)
			blobs[c.NewBlob]++
		}
		p.steps = append(p.steps, step)
	}
	if len(conflicts) > 0 {
		return p.conflict(conflicts)
	}
	return p.readBlobs(ctx, blobs)
}

// permOf returns the permissions that a change sets; 0 when it sets none.
func permOf(c gitsafe.Change) fs.FileMode {
	switch c.NewMode {
	case c.OldMode:
		return 0
	case gitsafe.ModeProgram:
		return 0o777 // the umask applies
	}
	return 0o666
}

// conflict is a file to which a change cannot be applied.
type conflict struct{ path, why string }

// mismatch returns why a change that cannot be merged does not fit.
func mismatch(c gitsafe.Change, ours fileVersion) string {
	switch {
	case ours.Mode == gitsafe.ModeNone:
		return "the file does not exist"
	case c.OldMode == gitsafe.ModeNone:
		return "it was created in the sandbox, but the path exists"
	case c.NewMode == gitsafe.ModeNone:
		return "it was deleted in the sandbox, but it differs from the version there"
	}
	return "it is not the regular file that was changed in the sandbox"
}

func (p *applyPlan) conflict(list []conflict) error {
	var names []string
	for _, c := range list {
		names = append(names, c.path+" ("+c.why+")")
	}
	return agentlab.Errorf(agentlab.CodeConflict, "cannot apply the changes of %s; nothing was applied", work.JoinNames(names)).
		WithHint("resolve it with git: %s; or name the other files", p.ch.Of.Merge)
}

// errInTheWay means that the path of a change, or a parent, has another type.
var errInTheWay = errors.New("the path")

func inTheWay(name, what string) error { return fmt.Errorf("%w %s is %s", errInTheWay, name, what) }

// version returns the work tree's version of a file. If git reports it as clean,
// that is the version of the index, regardless of filters.
func (p *applyPlan) version(name string) (fileVersion, error) {
	for dir := path.Dir(name); dir != "."; dir = path.Dir(dir) {
		st, err := p.w.root.Lstat(dir)
		if err == nil && !st.IsDir() {
			return fileVersion{}, inTheWay(dir, "not a directory here")
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fileVersion{}, err
		}
	}
	tracked, isTracked := p.w.index[name]
	st, err := p.w.root.Lstat(name)
	switch {
	case errors.Is(err, fs.ErrNotExist) && p.w.hidden[name]: // in a sparse work tree
		return fileVersion{Mode: tracked.mode, Blob: tracked.blob}, nil
	case errors.Is(err, fs.ErrNotExist):
		return fileVersion{Mode: gitsafe.ModeNone, Blob: gitsafe.NoBlob, dirty: isTracked}, nil
	case err != nil:
		return fileVersion{}, err
	case isTracked && !p.w.dirty[name] && !p.w.hidden[name]:
		return fileVersion{Mode: tracked.mode, Blob: tracked.blob, seen: st}, nil
	case st.Mode()&fs.ModeSymlink != 0:
		target, err := p.w.root.Readlink(name)
		return fileVersion{Mode: gitsafe.ModeLink, Blob: blobName([]byte(target)), dirty: true, seen: st}, err
	case st.IsDir():
		return fileVersion{}, inTheWay(name, "a directory here")
	case !st.Mode().IsRegular():
		return fileVersion{}, inTheWay(name, "not a regular file here")
	}
	ours, is := p.ours[name]
	if !is {
		return fileVersion{}, errors.New("it has changed since the command began")
	}
	v := fileVersion{Mode: gitsafe.ModeFile, Blob: ours.blob, dirty: true, seen: ours.seen}
	if st.Mode()&0o100 != 0 {
		v.Mode = gitsafe.ModeProgram
	}
	if p.w.hidden[name] && v.Blob == tracked.blob {
		v.Mode, v.dirty = tracked.mode, false
	}
	return v, nil
}

// blobName returns git's object name of a blob.
func blobName(text []byte) string {
	h := sha1.New() //nolint:gosec // as above
	fmt.Fprintf(h, "blob %d\x00", len(text))
	h.Write(text)
	return hex.EncodeToString(h.Sum(nil))
}

func (p *applyPlan) blobFile(blob string) string { return filepath.Join(p.Dir, "blob-"+blob) }

// readBlobs writes blobs to temporary files.
func (p *applyPlan) readBlobs(ctx context.Context, blobs map[string]int) error {
	var names strings.Builder
	for blob := range blobs {
		names.WriteString(blob + "\n")
	}
	r, w := io.Pipe()
	done := make(chan error, 1)
	go func() {
		err := p.splitBlobs(r, blobs)
		_ = r.CloseWithError(err) // ends git
		done <- err
	}()
	_, err := p.ch.Git(ctx, gitsafe.Command{Stdin: strings.NewReader(names.String()), Stdout: w}, "cat-file", "--batch")
	_ = w.Close()
	if readErr := <-done; err == nil || agentlab.CodeOf(readErr) == agentlab.CodeLimit {
		err = readErr
	}
	if agentlab.CodeOf(err) == agentlab.CodeLimit {
		return err
	}
	if err != nil && ctx.Err() == nil {
		return agentlab.Errorf(agentlab.CodeConflict, "cannot read the changed files: %s; nothing was applied", agentlab.WithoutControls(err.Error()))
	}
	return err
}

// splitBlobs reads the output of git cat-file --batch. The room counts a blob for each
// file that needs it.
func (p *applyPlan) splitBlobs(r io.Reader, blobs map[string]int) error {
	in := bufio.NewReader(r)
	for range len(blobs) {
		line, err := in.ReadString('\n')
		if err != nil {
			return err
		}
		var blob, kind string
		var size int64
		if n, _ := fmt.Sscanf(line, "%s %s %d", &blob, &kind, &size); n != 3 || kind != "blob" {
			return fmt.Errorf("%s is not a blob", strings.TrimSpace(line))
		}
		uses := int64(max(blobs[blob], 1))
		if size < 0 || size > p.room/uses {
			return agentlab.Errorf(agentlab.CodeLimit, "the changed files have more than %s; nothing was applied", work.ByteSize(maxApplied)).
				WithHint("apply some of them: %s PATH; list them: %s --stat", p.ch.Of.Apply, p.ch.Of.Diff)
		}
		p.room -= size * uses
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

// merge merges files where needed, into temporary files.
func (p *applyPlan) merge(ctx context.Context) error {
	var conflicts []conflict
	for i, s := range p.steps {
		if s.ours == "" {
			continue
		}
		merged, err := os.Create(filepath.Join(p.Dir, "merged-"+rand.Text()))
		if err != nil {
			return err
		}
		_, err = p.ch.Git(ctx, gitsafe.Command{Stdout: merged}, "merge-file", "-p", s.ours, p.blobFile(s.OldBlob), s.content)
		_ = merged.Close()
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil { // conflicting lines, or a binary file
			conflicts = append(conflicts, conflict{s.Path, "its changes conflict with yours"})
		}
		p.steps[i].content = merged.Name()
	}
	if len(conflicts) > 0 {
		return p.conflict(conflicts)
	}
	return p.dropMerged()
}

// dirty returns the files to change that have uncommitted changes of the user.
func (p *applyPlan) dirty() (names []string) {
	for _, s := range p.steps {
		if s.dirty {
			names = append(names, s.Path)
		}
	}
	return names
}

// dropMerged drops the steps whose merge gives what the user has already.
func (p *applyPlan) dropMerged() error {
	var steps []applyStep
	for _, s := range p.steps {
		if s.ours != "" && s.perm == 0 {
			mine, err := os.ReadFile(s.ours)
			if err != nil {
				return err
			}
			merged, err := os.ReadFile(s.content)
			if err != nil {
				return err
			}
			if bytes.Equal(mine, merged) {
				p.same++
				continue
			}
		}
		steps = append(steps, s)
	}
	p.steps = steps
	return nil
}

// judge is the return check of the plan. It leaves out links that must not be created.
func (p *applyPlan) judge(ctx context.Context) ([]returncheck.Finding, error) {
	targets := map[string]string{}
	var steps []applyStep
	var list []gitsafe.Change
	for _, s := range p.steps {
		if s.NewMode == gitsafe.ModeLink {
			target, err := readTarget(s.content)
			if err != nil {
				return nil, err
			}
			if why := returncheck.BadLink(s.Path, target); why != "" {
				p.left = append(p.left, returncheck.Finding{Path: s.Path, Why: why, New: s.OldMode == gitsafe.ModeNone})
				continue
			}
			targets[s.Path] = target
		}
		steps, list = append(steps, s), append(list, s.Change)
	}
	p.steps = steps
	host := gitsafe.WorkTreeHost(ctx, p.w.top)
	host.Names = func(dir string) []string { return gitsafe.DirNames(p.w.root, dir) }
	return returncheck.Check(gitsafe.ChangeEntries(list, func(c gitsafe.Change) string { return targets[c.Path] }), host), nil
}

// readTarget reads the target of a link from a temporary file; one that is too long is "".
func readTarget(file string) (string, error) {
	st, err := os.Stat(file)
	if err != nil || st.Size() > returncheck.MaxLink {
		return "", err
	}
	target, err := os.ReadFile(file)
	return string(target), err
}

// apply writes all steps, unless the user has changed one of their files.
func (p *applyPlan) apply() error {
	for _, s := range p.steps {
		if err := p.w.unchanged(s); err != nil {
			return err
		}
	}
	for _, s := range p.steps {
		if err := p.w.unchanged(s); err != nil {
			return err
		}
		if err := p.w.write(s); err != nil {
			return agentlab.Errorf(agentlab.CodeUnavailable, "cannot write %s: %w", agentlab.WithoutControls(s.Path), err).
				WithHint("fix this and run the command again; it skips files that are already applied")
		}
	}
	return nil
}

// unchanged returns an error if the user has changed the file of a step since the plan
// was made, as in an editor while a question waits for its answer.
func (w *workTree) unchanged(s applyStep) error {
	st, err := w.root.Lstat(s.Path)
	switch {
	case errors.Is(err, fs.ErrNotExist) && s.seen == nil:
		return nil
	case err == nil && s.seen != nil && os.SameFile(st, s.seen) && st.Mode() == s.seen.Mode() && st.Size() == s.seen.Size() && st.ModTime().Equal(s.seen.ModTime()):
		return nil
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return err
	}
	return agentlab.Errorf(agentlab.CodeConflict, "%s has changed since the command began", agentlab.WithoutControls(s.Path)).
		WithHint("run the command again; it skips files that are already applied")
}

// write applies a step. Files are replaced atomically. os.Root prevents links
// from leaving the work tree.
func (w *workTree) write(s applyStep) error {
	if s.content == "" {
		if err := w.root.Remove(s.Path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		for dir := path.Dir(s.Path); dir != "." && w.root.Remove(dir) == nil; dir = path.Dir(dir) {
			continue // like git, remove directories with their last file
		}
		return nil
	}
	dir := path.Dir(s.Path)
	if err := w.root.MkdirAll(dir, 0o777); err != nil {
		return err
	}
	tmp := path.Join(dir, ".agentlab-"+rand.Text())
	if s.NewMode == gitsafe.ModeLink {
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
	if err := w.root.Rename(tmp, s.Path); err != nil {
		_ = w.root.Remove(tmp)
		return err
	}
	return nil
}

func (w *workTree) copyIn(s applyStep, tmp string) error {
	perm, keep := s.perm, false
	if st, err := w.root.Lstat(s.Path); perm == 0 && err == nil && st.Mode().IsRegular() {
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

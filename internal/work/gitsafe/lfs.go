package gitsafe

import (
	"context"
	"errors"
	"io"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/lfs"
	"github.com/agentlab-vm/agentlab/internal/returncheck"
	"github.com/agentlab-vm/agentlab/internal/work"
)

// Limits of the objects of Git LFS that a guest sends at once. Others are left out.
const (
	maxGuestLFS   = 16 << 30 // bytes
	maxLFSObjects = 50_000
	lfsHeader     = 96 // bytes before an object, at most
)

// LFSGit runs git in a repository of the user for package lfs.
func LFSGit(ctx context.Context, path string) lfs.Git {
	return func(in io.Reader, out io.Writer, args ...string) error {
		_, err := Command{Stdin: in, Stdout: out}.Run(ctx, path, args...)
		return err
	}
}

// LFSFiles are the files of Git LFS of a local commit.
type LFSFiles struct {
	Store lfs.Store
	Files []lfs.File
}

// FindLFS returns the files of Git LFS of a commit.
func FindLFS(ctx context.Context, path, commit string) (l LFSFiles, err error) {
	run := LFSGit(ctx, path)
	if l.Files, err = lfs.Files(run, commit); err == nil && len(l.Files) > 0 {
		l.Store, err = lfs.StoreOf(run)
	}
	return l, err
}

// Objects returns the objects of the files, each once.
func (l LFSFiles) Objects() (list []lfs.Pointer) {
	seen := map[lfs.Pointer]bool{}
	for _, f := range l.Files {
		if !seen[f.Pointer] {
			seen[f.Pointer] = true
			list = append(list, f.Pointer)
		}
	}
	return list
}

// maxBundleLFS limits the objects that a bundle for a job has, in bytes.
const maxBundleLFS = 2 << 30

// inBundle returns the objects that a bundle gets.
func (l LFSFiles) inBundle() (list []lfs.Pointer) {
	left := int64(maxBundleLFS)
	for _, p := range l.Objects() {
		if p.Size > 0 && p.Size <= left && l.Store.Has(p) {
			list, left = append(list, p), left-p.Size
		}
	}
	return list
}

// addTo stores the objects of inBundle as blobs in a bare repository, with refs.
func (l LFSFiles) addTo(ctx context.Context, bare string) (refs []string, err error) {
	list := l.inBundle()
	if len(list) == 0 {
		return nil, nil
	}
	var paths, update strings.Builder
	for _, p := range list {
		paths.WriteString(l.Store.Path(p.OID) + "\n")
	}
	in := Command{Stdin: strings.NewReader(paths.String())}
	ids, err := in.Run(ctx, bare, "--git-dir="+bare, "-c", "core.bigFileThreshold=16m", "hash-object", "-w", "--no-filters", "--stdin-paths")
	if err != nil {
		return nil, err
	}
	lines := strings.Fields(ids)
	if len(lines) != len(list) {
		return nil, agentlab.Errorf(agentlab.CodeUnsupported, "the objects of Git LFS in %s cannot be read", l.Store.Dir).WithHint("move the repository to a path without line breaks")
	}
	for i, id := range lines {
		ref := guestapi.RefLFS + list[i].OID
		refs = append(refs, ref)
		update.WriteString("update " + ref + " " + id + "\n")
	}
	in = Command{Stdin: strings.NewReader(update.String())}
	_, err = in.Run(ctx, bare, "--git-dir="+bare, "update-ref", "--stdin")
	return refs, err
}

// Names returns the files of objects that a test selects.
func (l LFSFiles) Names(of func(lfs.Pointer) bool) (names []string) {
	for _, f := range l.Files {
		if of(f.Pointer) {
			names = append(names, f.Path)
		}
	}
	return names
}

// LFSNames is a number of files with their names, for the middle of a sentence.
func LFSNames(names []string) string {
	return agentlab.Plural(len(names), "Git LFS file") + " (" + work.JoinNames(names) + ")"
}

// BoundedLFS returns the first objects of a list that are within the limits, and the bytes
// that they and their headers have.
func BoundedLFS(list []lfs.Pointer) (want []lfs.Pointer, total int64) {
	for _, p := range list {
		if size := p.Size + lfsHeader; total+size <= maxGuestLFS && len(want) < maxLFSObjects { // sizes are limited
			want, total = append(want, p), total+size
		}
	}
	return want, total
}

// Lacks returns how many objects of a list a store does not have.
func Lacks(store lfs.Store, list []lfs.Pointer) (n int) {
	for _, p := range list {
		if !store.Has(p) {
			n++
		}
	}
	return n
}

// NewLFS returns the objects to which the new commits of a bundle point, and the store of
// the user's repository.
func (b *Bundle) NewLFS(ctx context.Context) ([]lfs.Pointer, lfs.Store, error) {
	var revs strings.Builder
	for _, f := range b.files {
		for _, commit := range f.header.Refs {
			revs.WriteString(commit + "\n")
		}
	}
	for _, commit := range b.base() {
		revs.WriteString("^" + commit + "\n")
	}
	list, err := lfs.New(func(in io.Reader, out io.Writer, args ...string) error {
		_, err := b.Git(ctx, Command{Stdin: in, Stdout: out}, args...)
		return err
	}, revs.String())
	if err != nil || len(list) == 0 {
		return nil, lfs.Store{}, err
	}
	store, err := lfs.StoreOf(LFSGit(ctx, b.Path))
	return list, store, err
}

// CheckOutLFS puts objects into the work tree in place of their pointers, after a merge
// from one commit to another that runs no filter, if the user's git does so. Files that
// programs of this machine obey or run stay pointers: the user has seen only these.
func CheckOutLFS(ctx context.Context, ui work.UI, path, from, to string) error {
	smudge, err := Git(ctx, path, "config", "--get", "filter.lfs.smudge")
	if err != nil || smudge == "" || strings.Contains(smudge, "--skip") {
		return nil //nolint:nilerr // the user does not use Git LFS
	}
	text, err := Command{Raw: true}.Run(ctx, path, "diff-tree", "-r", "-z", "--no-renames", "--name-only", "--diff-filter=AMT", from, to)
	if err != nil {
		return err
	}
	changed := map[string]bool{}
	for name := range strings.SplitSeq(text, "\x00") {
		changed[name] = true
	}
	obeyed := 0
	want := func(f lfs.File) bool {
		if !changed[f.Path] {
			return false
		}
		if len(returncheck.Check([]returncheck.Entry{{Path: f.Path, Kind: returncheck.File}}, returncheck.Host{})) > 0 {
			obeyed++
			return false
		}
		return true
	}
	run := LFSGit(ctx, path)
	store, err := lfs.StoreOf(run)
	if err == nil {
		_, err = store.Checkout(ctx, run, path, want, maxMerged)
	}
	if errors.Is(err, lfs.ErrTooLarge) {
		ui.Progressf("note: the new files of Git LFS have more than %s, and stay pointers\n  → git lfs checkout", work.ByteSize(maxMerged))
		err = nil
	}
	if obeyed > 0 && err == nil {
		ui.Progressf("note: %s of Git LFS stay pointers, because programs of this machine obey or run them\n  → look at them, then: git lfs checkout", agentlab.Plural(obeyed, "file"))
	}
	return err
}

// NoteLFS says how many objects were not found, after a fetch.
func NoteLFS(ui work.UI, missing int) {
	if missing > 0 {
		ui.Progressf("note: %s of Git LFS cannot be fetched: the sandbox does not have them, or they are too large; their files stay pointers", agentlab.Plural(missing, "object"))
	}
}

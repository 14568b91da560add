package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/bounded"
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

// lfsGit runs git in a repository of the user for package lfs.
func lfsGit(ctx context.Context, path string) lfs.Git {
	return func(in io.Reader, out io.Writer, args ...string) error {
		_, err := gitInput{stdin: in, stdout: out}.run(ctx, path, args...)
		return err
	}
}

// localLFS are the files of Git LFS of a local commit.
type localLFS struct {
	store lfs.Store
	files []lfs.File
}

func findLFS(ctx context.Context, path, commit string) (l localLFS, err error) {
	run := lfsGit(ctx, path)
	if l.files, err = lfs.Files(run, commit); err == nil && len(l.files) > 0 {
		l.store, err = lfs.StoreOf(run)
	}
	return l, err
}

// objects returns the objects of the files, each once.
func (l localLFS) objects() (list []lfs.Pointer) {
	seen := map[lfs.Pointer]bool{}
	for _, f := range l.files {
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
func (l localLFS) inBundle() (list []lfs.Pointer) {
	left := int64(maxBundleLFS)
	for _, p := range l.objects() {
		if p.Size > 0 && p.Size <= left && l.store.Has(p) {
			list, left = append(list, p), left-p.Size
		}
	}
	return list
}

// addTo stores the objects of inBundle as blobs in a bare repository, with refs.
func (l localLFS) addTo(ctx context.Context, bare string) (refs []string, err error) {
	list := l.inBundle()
	if len(list) == 0 {
		return nil, nil
	}
	var paths, update strings.Builder
	for _, p := range list {
		paths.WriteString(l.store.Path(p.OID) + "\n")
	}
	in := gitInput{stdin: strings.NewReader(paths.String())}
	ids, err := in.run(ctx, bare, "--git-dir="+bare, "-c", "core.bigFileThreshold=16m", "hash-object", "-w", "--no-filters", "--stdin-paths")
	if err != nil {
		return nil, err
	}
	lines := strings.Fields(ids)
	if len(lines) != len(list) {
		return nil, agentlab.Errorf(agentlab.CodeUnsupported, "the objects of Git LFS in %s cannot be read", l.store.Dir).WithHint("move the repository to a path without line breaks")
	}
	for i, id := range lines {
		ref := guestapi.RefLFS + list[i].OID
		refs = append(refs, ref)
		update.WriteString("update " + ref + " " + id + "\n")
	}
	in = gitInput{stdin: strings.NewReader(update.String())}
	_, err = in.run(ctx, bare, "--git-dir="+bare, "update-ref", "--stdin")
	return refs, err
}

// names returns the files of objects that a test selects.
func (l localLFS) names(of func(lfs.Pointer) bool) (names []string) {
	for _, f := range l.files {
		if of(f.Pointer) {
			names = append(names, f.Path)
		}
	}
	return names
}

// lfsNames is a number of files with their names, for the middle of a sentence.
func lfsNames(names []string) string {
	return agentlab.Plural(len(names), "Git LFS file") + " (" + work.JoinNames(names) + ")"
}

// sendLFS sends the objects of the files of Git LFS of a commit that this machine has and
// the session lacks, and says which files stay pointers.
func (a *App) sendLFS(ctx context.Context, r sessionRepo, commit string) error {
	l, err := findLFS(ctx, r.path, commit)
	if err != nil || len(l.files) == 0 {
		return err
	}
	all := l.objects()
	got, err := r.receiveLFS(ctx, a, l.store, all, nil)
	if err != nil {
		return err
	}
	missing := map[string]bool{}
	note := func() {
		clear(missing)
		for _, oid := range got.Missing {
			missing[oid] = true
		}
	}
	note()
	isMissing := func(p lfs.Pointer) bool { return missing[p.OID] }
	send := slices.DeleteFunc(slices.Clone(all), func(p lfs.Pointer) bool { return !isMissing(p) || !l.store.Has(p) })
	if len(send) > 0 {
		if got, err = r.receiveLFS(ctx, a, l.store, all, send); err != nil {
			return err
		}
		note()
		a.Progressf("sent %s of Git LFS", agentlab.Plural(len(send), "object"))
	}
	if names := l.names(isMissing); len(names) > 0 {
		a.Progressf("note: the sandbox has only the pointers of %s: the content is not on this machine\n  → git lfs fetch, and start again", lfsNames(names))
	}
	if here := l.names(func(p lfs.Pointer) bool { return !isMissing(p) }); !got.Installed && len(here) > 0 {
		a.Progressf("note: the sandbox has only the pointers of %s: its image does not have git-lfs", lfsNames(here))
	}
	return nil
}

// receiveLFS sends objects to a session, which needs all.
func (r sessionRepo) receiveLFS(ctx context.Context, a *App, store lfs.Store, all, send []lfs.Pointer) (got guestapi.RepoLFSReceived, err error) {
	line, err := json.Marshal(guestapi.RepoLFS{Objects: wireLFS(all)})
	if err != nil {
		return got, err
	}
	var total int64
	for _, p := range send {
		total += p.Size
	}
	m := a.Meter()
	defer m.Done()
	pr, pw := io.Pipe()
	defer func() { _ = pr.Close() }()
	go func() { _ = pw.CloseWithError(store.Send(pw, send)) }()
	in, stop := r.slowAfterSent(io.MultiReader(bytes.NewReader(append(line, '\n')), &work.MeterReader{R: pr, M: m, What: "sending Git LFS objects", Total: total}), m, "lfs")
	defer func() { stop() }()
	err = r.callFor(ctx, in, &got, "lfs", "receive")
	return got, err
}

func wireLFS(list []lfs.Pointer) []guestapi.LFSObject {
	out := make([]guestapi.LFSObject, 0, len(list))
	for _, p := range list {
		out = append(out, guestapi.LFSObject(p))
	}
	return out
}

// fetchLFS gets the objects of Git LFS to which the commits of a checked bundle point from
// the session, into the store of the user's repository. It returns how many neither has.
func (r sessionRepo) fetchLFS(ctx context.Context, b *checkedBundle) (missing int, err error) {
	list, store, err := b.newLFS(ctx)
	if list = slices.DeleteFunc(list, store.Has); err != nil || len(list) == 0 {
		return 0, err
	}
	want, total := boundedLFS(list)
	if r.left != nil {
		if *r.left -= total; *r.left < 0 {
			*r.left = 0
			return 0, errTooMuchToSync()
		}
	}
	limit := &bounded.Writer{Left: total, Fail: errOutputTooLarge}
	line, err := json.Marshal(guestapi.RepoLFS{Objects: wireLFS(want)})
	if err != nil {
		return 0, err
	}
	pr, pw := io.Pipe()
	stored := make(chan error, 1)
	go func() {
		_, err := store.Receive(pr, want)
		_ = pr.CloseWithError(errors.Join(err, io.ErrClosedPipe))
		stored <- err
	}()
	limit.W = pw
	err = r.call(ctx, bytes.NewReader(append(line, '\n')), limit, "lfs", "pack")
	_ = pw.CloseWithError(err)
	if bad := <-stored; bad != nil && (err == nil || errors.Is(err, io.ErrClosedPipe)) {
		return 0, guestInvalid("%w", bad)
	}
	if errors.Is(err, errOutputTooLarge) {
		return 0, guestInvalid("more objects of Git LFS than the command has asked for")
	}
	if err != nil {
		return 0, err
	}
	return lacks(store, list), nil
}

// boundedLFS returns the first objects of a list that are within the limits, and the bytes
// that they and their headers have.
func boundedLFS(list []lfs.Pointer) (want []lfs.Pointer, total int64) {
	for _, p := range list {
		if size := p.Size + lfsHeader; total+size <= maxGuestLFS && len(want) < maxLFSObjects { // sizes are limited
			want, total = append(want, p), total+size
		}
	}
	return want, total
}

// lacks returns how many objects of a list a store does not have.
func lacks(store lfs.Store, list []lfs.Pointer) (n int) {
	for _, p := range list {
		if !store.Has(p) {
			n++
		}
	}
	return n
}

// fetchJobLFS is sessionRepo.fetchLFS for the commits of a job, which has its objects in
// an artifact.
func (a *App) fetchJobLFS(ctx context.Context, c *client.Client, j api.Job, b *checkedBundle) error {
	list, store, err := b.newLFS(ctx)
	if err != nil || lacks(store, list) == 0 {
		return bundleFault(ctx, j, err)
	}
	if slices.ContainsFunc(j.Artifacts, func(f api.Artifact) bool { return f.Path == agentlab.ArtifactLFS }) {
		body, err := c.Artifact(ctx, j.ID, agentlab.ArtifactLFS)
		if err != nil {
			return err
		}
		defer func() { _ = body.Close() }()
		want, _ := boundedLFS(list)
		if _, err := store.Receive(body, want); err != nil {
			return bundleFault(ctx, j, err)
		}
	}
	a.noteLFS(lacks(store, list))
	return nil
}

// newLFS returns the objects to which the new commits of a bundle point, and the store of
// the user's repository.
func (b *checkedBundle) newLFS(ctx context.Context) ([]lfs.Pointer, lfs.Store, error) {
	var revs strings.Builder
	for _, f := range b.files {
		for _, commit := range f.header.refs {
			revs.WriteString(commit + "\n")
		}
	}
	for _, commit := range b.base() {
		revs.WriteString("^" + commit + "\n")
	}
	list, err := lfs.New(func(in io.Reader, out io.Writer, args ...string) error {
		_, err := b.git(ctx, gitInput{stdin: in, stdout: out}, args...)
		return err
	}, revs.String())
	if err != nil || len(list) == 0 {
		return nil, lfs.Store{}, err
	}
	store, err := lfs.StoreOf(lfsGit(ctx, b.path))
	return list, store, err
}

// checkOutLFS puts objects into the work tree in place of their pointers, after a merge
// from one commit to another that runs no filter, if the user's git does so. Files that
// programs of this machine obey or run stay pointers: the user has seen only these.
func (a *App) checkOutLFS(ctx context.Context, path, from, to string) error {
	smudge, err := git(ctx, path, "config", "--get", "filter.lfs.smudge")
	if err != nil || smudge == "" || strings.Contains(smudge, "--skip") {
		return nil //nolint:nilerr // the user does not use Git LFS
	}
	text, err := gitInput{raw: true}.run(ctx, path, "diff-tree", "-r", "-z", "--no-renames", "--name-only", "--diff-filter=AMT", from, to)
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
	run := lfsGit(ctx, path)
	store, err := lfs.StoreOf(run)
	if err == nil {
		_, err = store.Checkout(ctx, run, path, want, maxMerged)
	}
	if errors.Is(err, lfs.ErrTooLarge) {
		a.Progressf("note: the new files of Git LFS have more than %s, and stay pointers\n  → git lfs checkout", work.ByteSize(maxMerged))
		err = nil
	}
	if obeyed > 0 && err == nil {
		a.Progressf("note: %s of Git LFS stay pointers, because programs of this machine obey or run them\n  → look at them, then: git lfs checkout", agentlab.Plural(obeyed, "file"))
	}
	return err
}

// noteLFS says how many objects were not found, after a fetch.
func (a *App) noteLFS(missing int) {
	if missing > 0 {
		a.Progressf("note: %s of Git LFS cannot be fetched: the sandbox does not have them, or they are too large; their files stay pointers", agentlab.Plural(missing, "object"))
	}
}

package session

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"slices"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/bounded"
	"github.com/agentlab-vm/agentlab/internal/lfs"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/guestrun"
)

// findLFS returns the files of Git LFS of each of the commits that has some. "" is no commit.
func findLFS(ctx context.Context, path string, commits ...string) (found []gitsafe.LFSFiles, err error) {
	slices.Sort(commits)
	for _, commit := range slices.Compact(commits) {
		if commit == "" {
			continue
		}
		l, err := gitsafe.FindLFS(ctx, path, commit)
		if err != nil {
			return nil, err
		}
		if len(l.Files) > 0 {
			found = append(found, l)
		}
	}
	return found, nil
}

// sendLFS sends the objects of the files of Git LFS of a commit that this machine has and
// the session lacks, and says which files stay pointers.
func sendLFS(ctx context.Context, ui work.UI, r Repo, l gitsafe.LFSFiles) error {
	all := l.Objects()
	got, err := r.receiveLFS(ctx, ui, l.Store, all, nil)
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
	send := slices.DeleteFunc(slices.Clone(all), func(p lfs.Pointer) bool { return !isMissing(p) || !l.Store.Has(p) })
	if len(send) > 0 {
		if got, err = r.receiveLFS(ctx, ui, l.Store, all, send); err != nil {
			return err
		}
		note()
		ui.Progressf("sent %s of Git LFS", agentlab.Plural(len(send), "object"))
	}
	if names := l.Names(isMissing); len(names) > 0 {
		ui.Progressf("note: the sandbox has only the pointers of %s: the content is not on this machine\n  → git lfs fetch, and start again", gitsafe.LFSNames(names))
	}
	if here := l.Names(func(p lfs.Pointer) bool { return !isMissing(p) }); !got.Installed && len(here) > 0 {
		ui.Progressf("note: the sandbox has only the pointers of %s: its image does not have git-lfs", gitsafe.LFSNames(here))
	}
	return nil
}

// receiveLFS sends objects to a session, which needs all.
func (r Repo) receiveLFS(ctx context.Context, ui work.UI, store lfs.Store, all, send []lfs.Pointer) (got guestapi.RepoLFSReceived, err error) {
	line, err := json.Marshal(guestapi.RepoLFS{Objects: wireLFS(all)})
	if err != nil {
		return got, err
	}
	var total int64
	for _, p := range send {
		total += p.Size
	}
	m := ui.Meter()
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

// FetchLFS gets the objects of Git LFS to which the commits of a checked bundle point from
// the session, into the store of the user's repository. It returns how many neither has.
func (r Repo) FetchLFS(ctx context.Context, b *gitsafe.Bundle) (missing int, err error) {
	list, store, err := b.NewLFS(ctx)
	if list = slices.DeleteFunc(list, store.Has); err != nil || len(list) == 0 {
		return 0, err
	}
	want, total := gitsafe.BoundedLFS(list)
	if r.Left != nil {
		if *r.Left -= total; *r.Left < 0 {
			*r.Left = 0
			return 0, errTooMuchToSync()
		}
	}
	limit := &bounded.Writer{Left: total, Fail: gitsafe.ErrOutputTooLarge}
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
	err = r.Call(ctx, bytes.NewReader(append(line, '\n')), limit, "lfs", "pack")
	_ = pw.CloseWithError(err)
	if bad := <-stored; bad != nil && (err == nil || errors.Is(err, io.ErrClosedPipe)) {
		return 0, guestrun.Invalid("%w", bad)
	}
	if errors.Is(err, gitsafe.ErrOutputTooLarge) {
		return 0, guestrun.Invalid("more objects of Git LFS than the command has asked for")
	}
	if err != nil {
		return 0, err
	}
	return gitsafe.Lacks(store, list), nil
}

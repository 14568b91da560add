package session

import (
	"context"
	"fmt"
	"maps"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/returncheck"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
)

// autoSync fetches the commits of a session in the background while a terminal is
// attached, and forwards the branch that is checked out if that loses nothing. It prints
// nothing before the terminal has ended.
type autoSync struct {
	cancel  context.CancelFunc
	done    sync.WaitGroup
	commits int
	err     error                 // of the last attempt
	held    error                 // why the last commits were fetched and not merged
	found   []returncheck.Finding // about the last merge
	left    int64                 // bytes that may still be fetched
}

func startSync(ctx context.Context, ui work.UI, w *Opened, mode string) *autoSync {
	ctx, cancel := context.WithCancel(ctx)
	s := &autoSync{cancel: cancel}
	if mode == SyncManual {
		return s
	}
	w.Left = &s.left
	s.left = syncTotal
	s.done.Go(func() {
		wait := syncEvery
		var seen, fetched map[string]string
		same := 0
		for work.SleepOr(ctx, wait) == nil {
			st, err := w.Repo.State(ctx)
			if err != nil { // the sandbox may be away for a while
				continue
			}
			if same++; !maps.Equal(st.Branches, seen) {
				seen, same = st.Branches, 0
			}
			if maps.Equal(st.Branches, fetched) || mode == SyncOnIdle && same < idleRounds {
				wait = max(wait/2, syncEvery)
				continue
			}
			if w.Guest = st; s.once(ctx, ui, w) {
				fetched = st.Branches
			}
			if s.left <= 0 {
				if _, tty := work.TerminalOf(ui.Stream()); tty { // it is in raw mode
					_, _ = fmt.Fprintf(ui.Stream(), "\r\n[agentlab: commits are no longer fetched in this terminal: %s]\r\n", errSyncTotal)
				}
				return
			}
			wait = nextSync(wait)
		}
	})
	return s
}

// nextSync returns the time until the next read after one that has fetched.
func nextSync(wait time.Duration) time.Duration { return min(2*wait, syncSlowest) }

// once fetches and forwards. It reports whether the commits were fetched.
func (s *autoSync) once(ctx context.Context, ui work.UI, w *Opened) bool {
	unlock, err := gitsafe.LockRepo(ctx, ui, w.Path, true)
	if err != nil {
		s.err = err
		return false
	}
	defer unlock()
	got, err := fetchSession(ctx, ui, w)
	if err == nil {
		for _, h := range got.Fetched {
			s.commits += h.Commits
		}
		current := gitsafe.CurrentBranch(ctx, w.Path)
		if ref := w.Link.Ref(current); w.Guest.Branches[current] != "" {
			if gitsafe.IsAncestor(ctx, w.Path, "HEAD", ref) {
				err = s.forward(ctx, ui, w, current, ref)
			}
		}
	}
	if ctx.Err() == nil {
		s.err = err
	}
	return err == nil
}

// forward merges a ref that has all commits of the current branch, unless the return check
// finds something that the user must see first.
func (s *autoSync) forward(ctx context.Context, ui work.UI, w *Opened, current, ref string) error {
	if err := idle(ctx, w.Path); err != nil {
		return err
	}
	j, err := gitsafe.JudgeCommit(ctx, w.Path, w.Path, true, "HEAD", ref)
	if err != nil {
		return err
	}
	if s.held = gitsafe.Admit(ctx, ui, j.Found, w.admission("HEAD", ref, true)); s.held != nil {
		return ctx.Err()
	}
	if _, err = mergeRef(ctx, ui, w.Path, current, ref, j); err == nil {
		s.found = append(s.found, j.Found...)
	}
	return err
}

// stop ends the synchronization and waits for it.
func (s *autoSync) stop() {
	s.cancel()
	s.done.Wait()
}

func (s *autoSync) report(ui work.UI) {
	if s.commits > 0 {
		ui.Progressf("fetched %s of the session", agentlab.Plural(s.commits, "commit"))
	}
	gitsafe.NoteNamed(ui, s.found)
	if s.held != nil {
		ui.Progressf("note: the newest commits are fetched and not merged: %v\n  → agentlab sync", s.held)
	}
	if s.err != nil {
		ui.Progressf("note: the last synchronization failed: %v\n  → agentlab sync", s.err)
	}
}

// The modes of synchronization while a terminal is attached.
const (
	SyncManual   = "manual"
	SyncOnCommit = "on-commit"
	SyncOnIdle   = "on-idle"
)

// How often the branches of a session are read, and for how many reads they must stay
// the same to be idle.
const (
	syncEvery  = 5 * time.Second
	idleRounds = 4
	// After each fetch the next read is twice as late, until nothing has changed. A guest
	// that commits all the time so costs little.
	syncSlowest = 2 * time.Minute
	// syncTotal is the maximum of commits, in bytes, that one attached terminal fetches.
	syncTotal = 1 << 30
)

// syncMode returns the mode of a flag, or else of the configuration of a repository.
func syncMode(ctx context.Context, path, flag string) (string, error) {
	mode := flag
	if mode == "" {
		mode, _ = gitsafe.Git(ctx, path, "config", "--get", "agentlab.sync")
	}
	switch mode {
	case "":
		return SyncManual, nil
	case SyncManual, SyncOnCommit, SyncOnIdle:
		return mode, nil
	}
	return "", work.UsageErrorf("unknown mode of synchronization %q", mode).WithHint("use one of %s, %s, %s", SyncManual, SyncOnCommit, SyncOnIdle)
}

package cli

import (
	"context"
	"os"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/returncheck"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/session"
	"github.com/agentlab-vm/agentlab/internal/work/transfer"
)

// syncedArtifacts is the output of 'agentlab sync --artifacts' under --json.
type syncedArtifacts struct {
	SessionID string                  `json:"session_id"`
	Directory string                  `json:"directory"` // on this machine
	Files     []string                `json:"files"`     // sorted, relative to the directory
	Bytes     int64                   `json:"bytes"`
	Skipped   []transfer.SkippedEntry `json:"skipped"`
	Changed   bool                    `json:"changed_while"`      // the guest changed files during the copy
	Findings  []gitsafe.Finding       `json:"findings,omitempty"` // of the return check

	found []returncheck.Finding
}

// syncArtifacts copies files that git does not carry from the session of the repository
// in the current directory to its work tree here.
func (a *App) syncArtifacts(ctx context.Context, c *client.Client, o transfer.ArtifactOptions) error {
	l, err := session.FindLink(ctx, ".", "")
	if err != nil {
		return err
	}
	if o.Patterns, err = transfer.ArtifactPatterns(l.Path, o.Patterns); err != nil { // before a VM is started
		return err
	}
	w, err := a.openSession(ctx, c, o.Session)
	if err != nil {
		return err
	}
	defer a.leave(ctx, w)
	got, err := a.pullArtifacts(ctx, w, o)
	if err != nil {
		return err
	}
	if !a.json {
		transfer.CopyNotes(a, transfer.Copied{Skipped: got.Skipped, Changed: got.Changed})
		gitsafe.NoteNamed(a, got.found)
	}
	return a.done(got, "copied %s (%s) to %s: %s", agentlab.Plural(len(got.Files), "file"), work.ByteSize(got.Bytes), agentlab.WithoutControls(got.Directory), work.JoinNames(got.Files))
}

// pullArtifacts copies the files that match. It changes nothing if one of them cannot be
// copied.
func (a *App) pullArtifacts(ctx context.Context, w *openedSession, o transfer.ArtifactOptions) (syncedArtifacts, error) {
	got := syncedArtifacts{SessionID: w.session.ID, Directory: w.Path, Files: []string{}, Skipped: []transfer.SkippedEntry{}}
	tree, err := w.worktree(o.Worktree)
	if err != nil {
		return got, err
	}
	from := transfer.Place{Sandbox: w.Sandbox, Path: session.JoinGuest(tree.Dir)}
	names, err := transfer.ListArtifacts(ctx, a, w.C, from, o.Patterns)
	if err != nil {
		return got, err
	}
	root, err := os.OpenRoot(w.Path)
	if err != nil {
		return got, work.LocalFault(w.Path, err)
	}
	defer func() { _ = root.Close() }()
	all := transfer.Copied{}
	if names, err = transfer.WantedArtifacts(ctx, root, w.Path, names, &all); err != nil {
		return got, err
	}
	if len(names) == 0 {
		e := agentlab.Errorf(agentlab.CodeNotFound, "no file of the session that git does not carry matches %s", agentlab.WithoutControls(strings.Join(o.Patterns, " ")))
		if n := len(all.Skipped); n > 0 {
			e = agentlab.Errorf(agentlab.CodeNotFound, "%s of the session, e.g. %s, cannot be copied: %s", agentlab.Plural(n, "file"), agentlab.WithoutControls(all.Skipped[0].Path), all.Skipped[0].Reason)
		}
		return got, e.WithHint("build them in the session first, or choose other patterns; commits come with 'agentlab sync'")
	}
	if got.Files, got.found, err = transfer.InstallArtifacts(ctx, a, w.C, root, from, names, o, &all); err != nil {
		return got, err
	}
	got.Bytes, got.Skipped, got.Changed = all.Bytes, append(got.Skipped, all.Skipped...), all.Changed
	got.Findings = gitsafe.FindingsJSON(got.found)
	return got, nil
}

package session

import (
	"context"
	"os"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/returncheck"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/transfer"
)

// Artifacts is the output of 'agentlab sync --artifacts' under --json.
type Artifacts struct {
	SessionID string                  `json:"session_id"`
	Directory string                  `json:"directory"` // on this machine
	Files     []string                `json:"files"`     // sorted, relative to the directory
	Bytes     int64                   `json:"bytes"`
	Skipped   []transfer.SkippedEntry `json:"skipped"`
	Changed   bool                    `json:"changed_while"`      // the guest changed files during the copy
	Findings  []gitsafe.Finding       `json:"findings,omitempty"` // of the return check

	Found []returncheck.Finding `json:"-"`
}

// PullArtifacts copies the files that match. It changes nothing if one of them cannot be
// copied.
func PullArtifacts(ctx context.Context, ui work.UI, w *Opened, o transfer.ArtifactOptions) (Artifacts, error) {
	got := Artifacts{SessionID: w.Session.ID, Directory: w.Path, Files: []string{}, Skipped: []transfer.SkippedEntry{}}
	tree, err := w.worktree(o.Worktree)
	if err != nil {
		return got, err
	}
	from := transfer.Place{Sandbox: w.Sandbox, Path: JoinGuest(tree.Dir)}
	names, err := transfer.ListArtifacts(ctx, ui, w.C, from, o.Patterns)
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
	if got.Files, got.Found, err = transfer.InstallArtifacts(ctx, ui, w.C, root, from, names, o, &all); err != nil {
		return got, err
	}
	got.Bytes, got.Skipped, got.Changed = all.Bytes, append(got.Skipped, all.Skipped...), all.Changed
	got.Findings = gitsafe.FindingsJSON(got.Found)
	return got, nil
}

package sessioncmd

import (
	"context"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/session"
	"github.com/agentlab-vm/agentlab/internal/work/transfer"
)

// syncArtifacts copies files that git does not carry from the session of the repository
// in the current directory to its work tree here.
func syncArtifacts(ctx context.Context, a *cli.App, c *client.Client, o transfer.ArtifactOptions) error {
	l, err := session.FindLink(ctx, ".", "")
	if err != nil {
		return err
	}
	if o.Patterns, err = transfer.ArtifactPatterns(l.Path, o.Patterns); err != nil { // before a VM is started
		return err
	}
	w, err := session.Open(ctx, a, c, o.Session)
	if err != nil {
		return err
	}
	defer session.Leave(ctx, a, w)
	got, err := session.PullArtifacts(ctx, a, w, o)
	if err != nil {
		return err
	}
	if !a.JSON {
		transfer.CopyNotes(a, transfer.Copied{Skipped: got.Skipped, Changed: got.Changed})
		gitsafe.NoteNamed(a, got.Found)
	}
	return a.Done(got, "copied %s (%s) to %s: %s", agentlab.Plural(len(got.Files), "file"), work.ByteSize(got.Bytes), agentlab.WithoutControls(got.Directory), work.JoinNames(got.Files))
}

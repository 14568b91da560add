// Package project has what a repository asks for in its project file .agentlab.yaml and its dev
// container: the image, the commands under setup, services.
package project

import (
	"cmp"
	"context"
	"errors"
	"io"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/bounded"
	"github.com/agentlab-vm/agentlab/internal/projectfile"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
)

// Limits on the commands under setup of a session.
const (
	setupSeconds   = 30 * 60
	maxSetupOutput = 16 << 20 // bytes that are shown
)

// at returns the project file of a commit; a missing one is empty.
func at(ctx context.Context, path, commit string) (projectfile.File, error) {
	list, err := treeOf(ctx, path, commit, projectfile.Name)
	if err != nil || len(list) == 0 {
		return projectfile.File{}, err
	}
	if e := list[0]; e.kind != "blob" || !strings.HasPrefix(e.mode, "100") || e.size > projectfile.MaxBytes {
		return projectfile.File{}, agentlab.Errorf(agentlab.CodeInvalid, "it is not a file of at most %s", work.ByteSize(projectfile.MaxBytes))
	}
	text, err := gitsafe.Command{Raw: true}.Run(ctx, path, "cat-file", "blob", list[0].id)
	if err != nil {
		return projectfile.File{}, err
	}
	return projectfile.Parse([]byte(text))
}

// Of is At for a session: an error is shown, and the session starts
// without the file, so that an agent can correct it.
func Of(ctx context.Context, ui work.UI, path, commit string) projectfile.File {
	p, err := at(ctx, path, commit)
	if err != nil && ctx.Err() == nil {
		ui.Progressf("warning: %s of commit %.12s is not used: %s", projectfile.Name, commit, agentlab.WithoutControls(agentlab.TextWithHint(err)))
	}
	return p
}

// Use completes the request for a job with the project file of its commit.
func Use(ctx context.Context, src gitsafe.LocalCommit, r *api.JobCreate) (projectfile.File, error) {
	p, err := at(ctx, src.Path, src.Commit)
	if err != nil {
		return p, agentlab.Errorf(agentlab.CodeInvalid, "%s of commit %.12s: %w", projectfile.Name, src.Commit, err).WithField("repo").WithHint("%s", cmp.Or(agentlab.HintOf(err), "correct it and commit it"))
	}
	if r.Session == "" { // which has an image of its own
		r.Image = cmp.Or(r.Image, p.Image)
	}
	return p, nil
}

// ImageError returns an error about the image of a request so that it names the project
// file, if the image comes from there.
func ImageError(err error, fromProject bool) error {
	e, ok := errors.AsType[*agentlab.Error](err)
	if !ok || !fromProject || e.Field != "image" {
		return err
	}
	return agentlab.Errorf(e.Code, "image in %s: %s", projectfile.Name, e.Message).
		WithHint("%s; correct the file and commit it, or choose an image with --image", cmp.Or(e.Hint, "there is no such image"))
}

// SetupOf returns the commands under setup for a session; nil if there are none.
func SetupOf(s projectfile.Setup) *guestapi.SetupRun {
	if len(s.Run) == 0 {
		return nil
	}
	return &guestapi.SetupRun{Commands: s.Run, Dir: guestapi.RepoDir, Seconds: setupSeconds}
}

// SetupOutput returns a writer that shows the output of the commands under setup.
func SetupOutput(ui work.UI) io.Writer {
	return &bounded.Writer{W: work.LogWriter(ui.Stream()), Left: maxSetupOutput, Fail: gitsafe.ErrOutputTooLarge}
}

// NoteSetupFailed shows the reason if commands under setup failed in a session, which works
// without them.
func NoteSetupFailed(ui work.UI, why string) {
	ui.Progressf("warning: the commands under setup in %s failed: %s\n  → the session continues; the next start runs them again, --no-setup does not", projectfile.Name, why)
}

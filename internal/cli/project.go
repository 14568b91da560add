package cli

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"strconv"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/bounded"
	"github.com/agentlab-vm/agentlab/internal/projectfile"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/guestrun"
)

// Limits on the commands under setup of a session.
const (
	setupSeconds   = 30 * 60
	maxSetupOutput = 16 << 20 // bytes that are shown
)

// treeEntry is a file of a commit.
type treeEntry struct {
	mode, kind, id, name string
	size                 int64
}

// treeOf lists the files of a commit: all, or those at paths.
func treeOf(ctx context.Context, path, commit string, paths ...string) ([]treeEntry, error) {
	args := append([]string{"ls-tree", "-r", "-l", "-z", "--full-tree", commit, "--"}, paths...)
	out, err := gitsafe.Command{Raw: true}.Run(ctx, path, args...)
	if err != nil {
		return nil, err
	}
	var list []treeEntry
	for line := range strings.SplitSeq(strings.TrimSuffix(out, "\x00"), "\x00") {
		info, name, _ := strings.Cut(line, "\t")
		f := strings.Fields(info)
		if len(f) != 4 {
			continue
		}
		size, _ := strconv.ParseInt(f[3], 10, 64) // "-" for a submodule
		list = append(list, treeEntry{mode: f[0], kind: f[1], id: f[2], size: size, name: name})
	}
	return list, nil
}

// projectAt returns the project file of a commit; a missing one is empty.
func projectAt(ctx context.Context, path, commit string) (projectfile.File, error) {
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

// projectOf is projectAt for a session: an error is shown, and the session starts
// without the file, so that an agent can correct it.
func (a *App) projectOf(ctx context.Context, path, commit string) projectfile.File {
	p, err := projectAt(ctx, path, commit)
	if err != nil && ctx.Err() == nil {
		a.Progressf("warning: %s of commit %.12s is not used: %s", projectfile.Name, commit, agentlab.WithoutControls(agentlab.TextWithHint(err)))
	}
	return p
}

// useProject completes the request for a job with the project file of its commit.
func useProject(ctx context.Context, src gitsafe.LocalCommit, r *api.JobCreate) (projectfile.File, error) {
	p, err := projectAt(ctx, src.Path, src.Commit)
	if err != nil {
		return p, agentlab.Errorf(agentlab.CodeInvalid, "%s of commit %.12s: %w", projectfile.Name, src.Commit, err).WithField("repo").WithHint("%s", cmp.Or(agentlab.HintOf(err), "correct it and commit it"))
	}
	if r.Session == "" { // which has an image of its own
		r.Image = cmp.Or(r.Image, p.Image)
	}
	return p, nil
}

// projectImage returns an error about the image of a request so that it names the project
// file, if the image comes from there.
func projectImage(err error, fromProject bool) error {
	e, ok := errors.AsType[*agentlab.Error](err)
	if !ok || !fromProject || e.Field != "image" {
		return err
	}
	return agentlab.Errorf(e.Code, "image in %s: %s", projectfile.Name, e.Message).
		WithHint("%s; correct the file and commit it, or choose an image with --image", cmp.Or(e.Hint, "there is no such image"))
}

// sameImage returns an error for an image that a session does not have. If only the
// repository names another one, a note says so.
func (a *App) sameImage(s api.Session, asked, project string) error {
	switch {
	case asked != "" && asked != s.Image:
		return agentlab.Errorf(agentlab.CodeConflict, "session %s has %s, not %s", s.Name, imageOf(s), agentlab.WithoutControls(asked)).
			WithHint("continue it without --image, or replace it by a new one with --fresh --image %s", agentlab.WithoutControls(asked))
	case asked == "" && project != "" && project != s.Image:
		a.Progressf("note: %s asks for the image %s, and session %s has %s\n  → a new session: agentlab start --fresh", projectfile.Name, project, s.Name, imageOf(s))
	}
	return nil
}

func imageOf(s api.Session) string {
	if s.Image == "" {
		return "the image of profile " + s.Profile
	}
	return "the image " + s.Image
}

// setUpSession runs the commands under setup in a session, unless they have run in its
// sandbox, and shows their output. The session is usable without them: why returns what
// failed in them.
func (a *App) setUpSession(ctx context.Context, c *client.Client, sandbox string, s projectfile.Setup) (why string, err error) {
	if len(s.Run) == 0 {
		return "", nil
	}
	var in bytes.Buffer
	if err := json.NewEncoder(&in).Encode(guestapi.SetupRun{Commands: s.Run, Dir: guestapi.RepoDir, Seconds: setupSeconds}); err != nil {
		return "", err
	}
	out := &bounded.Writer{W: logWriter(a.Stderr), Left: maxSetupOutput, Fail: gitsafe.ErrOutputTooLarge}
	err = guestrun.Run(ctx, c, sandbox, guestapi.ExecRequest{Command: []string{"agentlab-agent", "setup"}}, &in, out)
	if err == nil || ctx.Err() != nil || agentlab.CodeOf(err) == agentlab.CodeUnavailable {
		return "", err
	}
	why = agentlab.WithoutControls(err.Error())
	if e, ok := errors.AsType[*agentlab.Error](err); ok {
		why = agentlab.WithoutControls(e.Message)
	}
	a.Progressf("warning: the commands under setup in %s failed: %s\n  → the session continues; the next start runs them again, --no-setup does not", projectfile.Name, why)
	return why, nil
}

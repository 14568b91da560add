package cli

import (
	"cmp"
	"context"
	"os"
	"path/filepath"
	"slices"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/work/attach"
	"github.com/agentlab-vm/agentlab/internal/work/guestrun"
	"github.com/agentlab-vm/agentlab/internal/work/session"
)

// containerFiles describe the dev container of a repository, see docs/environments.md.
var containerFiles = []string{".devcontainer/devcontainer.json", ".devcontainer.json"}

// hasContainer reports whether the work tree in dir describes a dev container.
func hasContainer(dir string) bool {
	return slices.ContainsFunc(containerFiles, func(name string) bool {
		_, err := os.Lstat(filepath.Join(dir, name))
		return err == nil
	})
}

// startEnvironment starts the services and the dev container of the repository in its
// sandbox, which opening the terminal would do later. It is called if the work tree here
// has an environment, so that the user sees what happens. services reports whether there
// are services; mode is the one of the flag.
func (a *App) startEnvironment(ctx context.Context, c *client.Client, s api.Session, sandbox string, l session.Link, services bool, mode string) error {
	if !services && mode == "" && !hasContainer(l.Path) {
		return nil
	}
	p, err := c.Profile(ctx, s.Profile)
	if err != nil && agentlab.CodeOf(err) != agentlab.CodeNotFound { // the profile of an old session
		return err
	}
	req := guestapi.ExecRequest{Command: []string{"agentlab-agent", "environment"}, Dir: "/"}
	if mode = cmp.Or(mode, p.Devcontainer); mode != "" {
		req.Command = append(req.Command, "--devcontainer", mode)
	}
	a.Progressf("starting the environment of the repository")
	var e guestapi.Environment
	if err := guestrun.Document(ctx, c, sandbox, req, &e, attach.FilteredWriter(a.Stderr)); err != nil {
		return err
	}
	if e.Notice != "" {
		a.Progressf("note: %s", agentlab.WithoutControls(e.Notice))
	}
	if e.Contained {
		a.Progressf("agents run in the dev container of the repository")
	}
	return nil
}

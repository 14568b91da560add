package project

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
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/attach"
	"github.com/agentlab-vm/agentlab/internal/work/guestrun"
)

// ContainerFiles describe the dev container of a repository, see docs/environments.md.
var ContainerFiles = []string{".devcontainer/devcontainer.json", ".devcontainer.json"}

// HasContainer reports whether the work tree in dir describes a dev container.
func HasContainer(dir string) bool {
	return slices.ContainsFunc(ContainerFiles, func(name string) bool {
		_, err := os.Lstat(filepath.Join(dir, name))
		return err == nil
	})
}

// StartEnvironment starts the services and the dev container of the repository in its
// sandbox, which opening the terminal would do later. It is called if the work tree in
// path has an environment, so that the user sees what happens. services reports whether there
// are services; mode is the one of the flag.
func StartEnvironment(ctx context.Context, ui work.UI, c *client.Client, s api.Session, sandbox, path string, services bool, mode string) error {
	if !services && mode == "" && !HasContainer(path) {
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
	ui.Progressf("starting the environment of the repository")
	var e guestapi.Environment
	if err := guestrun.Document(ctx, c, sandbox, req, &e, attach.FilteredWriter(ui.Stream())); err != nil {
		return err
	}
	if e.Notice != "" {
		ui.Progressf("note: %s", agentlab.WithoutControls(e.Notice))
	}
	if e.Contained {
		ui.Progressf("agents run in the dev container of the repository")
	}
	return nil
}

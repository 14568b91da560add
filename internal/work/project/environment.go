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

// EnvironmentOf returns the request for the services and the dev container of a repository,
// which opening the terminal would start later. It is nil unless the work tree in path has
// an environment; with it the user sees what happens. services reports whether there are
// services; mode is the one of the flag.
func EnvironmentOf(ctx context.Context, c *client.Client, s api.Session, path string, services bool, mode string) (*guestapi.SessionEnvironment, error) {
	if !services && mode == "" && !HasContainer(path) {
		return nil, nil
	}
	p, err := c.Profile(ctx, s.Profile)
	if err != nil && agentlab.CodeOf(err) != agentlab.CodeNotFound { // the profile of an old session
		return nil, err
	}
	return &guestapi.SessionEnvironment{Devcontainer: cmp.Or(mode, p.Devcontainer)}, nil
}

// NoteEnvironment says what was started.
func NoteEnvironment(ui work.UI, e guestapi.Environment) {
	if e.Notice != "" {
		ui.Progressf("note: %s", agentlab.WithoutControls(e.Notice))
	}
	if e.Contained {
		ui.Progressf("agents run in the dev container of the repository")
	}
}

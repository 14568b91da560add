// Package commands is the program agentlab: the command line with all of its commands.
package commands

import (
	"path/filepath"
	"slices"

	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/cli/hostcmd"
	"github.com/agentlab-vm/agentlab/internal/cli/imagecmd"
	"github.com/agentlab-vm/agentlab/internal/cli/jobcmd"
	"github.com/agentlab-vm/agentlab/internal/cli/networkcmd"
	"github.com/agentlab-vm/agentlab/internal/cli/sandboxcmd"
	"github.com/agentlab-vm/agentlab/internal/cli/sessioncmd"
	"github.com/agentlab-vm/agentlab/internal/cli/workspacecmd"
)

// Main runs the program and returns its exit code. args begins with the name of the program:
// called as git-remote-agentlab, it is git's helper for the repositories of sessions.
func Main(args []string) int {
	if filepath.Base(args[0]) == sessioncmd.RemoteHelper {
		return sessioncmd.MainRemoteHelper(args[1:])
	}
	return cli.Main(All(), args[1:])
}

// All returns the commands of all packages.
func All() []cli.Command {
	return slices.Concat(
		jobcmd.Commands(), sandboxcmd.Commands(), workspacecmd.Commands(), sessioncmd.Commands(),
		networkcmd.Commands(), imagecmd.Commands(), hostcmd.Commands(),
	)
}

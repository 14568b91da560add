// Package workspacecmd has the commands of workspaces.
package workspacecmd

import "github.com/agentlab-vm/agentlab/internal/cli"

// Commands returns the commands of this package.
func Commands() []cli.Command {
	return []cli.Command{
		{Group: cli.GroupWork, New: workspaceCmd},
	}
}

// Package jobcmd has the commands of jobs.
package jobcmd

import "github.com/agentlab-vm/agentlab/internal/cli"

// Commands returns the commands of this package.
func Commands() []cli.Command {
	return []cli.Command{
		{Group: cli.GroupWork, New: jobCmd},
	}
}

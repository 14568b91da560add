// Package sessioncmd has the commands of sessions: the interactive workflow.
package sessioncmd

import (
	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/work/session"
)

// Commands returns the commands of this package.
func Commands() []cli.Command {
	out := []cli.Command{
		{Group: cli.GroupWork, New: sessionCmd},
		{Group: cli.GroupOperate, New: msgCmd},
		{Group: cli.GroupInteractive, New: startCmd},
		{Group: cli.GroupInteractive, New: attachCmd},
		{Group: cli.GroupInteractive, New: syncCmd},
		{Group: cli.GroupInteractive, New: sessionDiffCmd},
		{Group: cli.GroupInteractive, New: sessionApplyCmd},
		{Group: cli.GroupInteractive, New: worktreeCmd},
		{Group: cli.GroupInteractive, New: syncEnvCmd},
		{Group: cli.GroupInteractive, New: lsCmd},
		{Group: cli.GroupInteractive, New: stopCmd},
		{Group: cli.GroupInteractive, New: rmCmd},
		{Group: cli.GroupInteractive, New: sessionizerCmd},
	}
	for _, agent := range session.Agents {
		out = append(out, cli.Command{Group: cli.GroupInteractive, New: func(a *cli.App) *cobra.Command { return agentCmd(a, agent) }})
	}
	return out
}

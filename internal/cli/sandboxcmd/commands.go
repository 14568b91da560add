// Package sandboxcmd has the commands of sandboxes.
package sandboxcmd

import "github.com/agentlab-vm/agentlab/internal/cli"

// Commands returns the commands of this package.
func Commands() []cli.Command {
	return []cli.Command{
		{Group: cli.GroupWork, New: sandboxCmd},
		{Group: cli.GroupWork, New: execCmd},
		{Group: cli.GroupWork, New: sshCmd},
		{Group: cli.GroupWork, New: sshConfigCmd},
		{Group: cli.GroupWork, New: logsCmd},
		{Group: cli.GroupInteractive, New: portCmd},
		{Group: cli.GroupInteractive, New: openCmd},
		{Group: cli.GroupInteractive, New: cpCmd},
		{New: proxyCmd},
		{New: sshProxyCmd},
	}
}

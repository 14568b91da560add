// Package networkcmd has the commands of the network of sandboxes.
package networkcmd

import "github.com/agentlab-vm/agentlab/internal/cli"

// Commands returns the commands of this package.
func Commands() []cli.Command {
	return []cli.Command{
		{Group: cli.GroupOperate, New: egressCmd},
		{Group: cli.GroupOperate, New: policyCmd},
		{Group: cli.GroupOperate, New: verifyCmd},
	}
}

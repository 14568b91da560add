// Package hostcmd has the commands of the host, its daemon and its configuration.
package hostcmd

import "github.com/agentlab-vm/agentlab/internal/cli"

// Commands returns the commands of this package.
func Commands() []cli.Command {
	return []cli.Command{
		{Group: cli.GroupSetup, New: initCmd},
		{Group: cli.GroupSetup, New: profileCmd},
		{Group: cli.GroupSetup, New: secretsCmd},
		{Group: cli.GroupSetup, New: loginCmd},
		{Group: cli.GroupSetup, New: logoutCmd},
		{Group: cli.GroupOperate, New: statusCmd},
		{Group: cli.GroupOperate, New: doctorCmd},
		{Group: cli.GroupOperate, New: metricsCmd},
		{Group: cli.GroupOperate, New: eventsCmd},
		{Group: cli.GroupOperate, New: tokenCmd},
		{Group: cli.GroupOperate, New: backendCmd},
		{Group: cli.GroupOperate, New: hostCmd},
		{Group: cli.GroupOperate, New: dnsCmd},
		{Group: cli.GroupOperate, New: daemonCmd},
		{Group: cli.GroupOperate, New: dbCmd},
	}
}

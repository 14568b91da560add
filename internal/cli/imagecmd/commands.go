// Package imagecmd has the commands of images, templates, setup snapshots and the registry cache.
package imagecmd

import "github.com/agentlab-vm/agentlab/internal/cli"

// Commands returns the commands of this package.
func Commands() []cli.Command {
	return []cli.Command{
		{Group: cli.GroupSetup, New: imageCmd},
		{Group: cli.GroupSetup, New: templateCmd},
		{Group: cli.GroupSetup, New: setupCmd},
		{Group: cli.GroupSetup, New: cacheCmd},
	}
}

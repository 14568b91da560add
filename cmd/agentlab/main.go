// Command agentlab runs AI coding agents in disposable virtual machines. It is the
// command line of the daemon agentlabd. Called as git-remote-agentlab, it is git's
// helper for the repositories of sessions.
package main

import (
	"os"
	"path/filepath"

	"github.com/agentlab-vm/agentlab/internal/cli"
)

func main() {
	if filepath.Base(os.Args[0]) == cli.RemoteHelper {
		os.Exit(cli.MainRemoteHelper(os.Args[1:]))
	}
	os.Exit(cli.Main(os.Args[1:]))
}

// Command agentlab runs AI coding agents in disposable virtual machines. It is the
// command line of the daemon agentlabd. Called as git-remote-agentlab, it is git's
// helper for the repositories of sessions.
package main

import (
	"os"

	"github.com/agentlab-vm/agentlab/internal/cli/commands"
)

func main() { os.Exit(commands.Main(os.Args)) }

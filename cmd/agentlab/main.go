// Command agentlab runs AI coding agents unattended in disposable virtual
// machines. It is the command line of the daemon agentlabd.
package main

import (
	"os"

	"github.com/agentlab-vm/agentlab/internal/cli"
)

func main() { os.Exit(cli.Main(os.Args[1:])) }

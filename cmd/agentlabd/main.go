// Command agentlabd is the daemon of AgentLab, and as 'agentlabd vmm DIR' the
// supervisor process of one virtual machine.
package main

import (
	"os"

	"github.com/agentlab-vm/agentlab/internal/daemon"
)

func main() { os.Exit(daemon.Main(os.Args[1:])) }

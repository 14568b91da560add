// Command agent-runner is AgentLab's program in the guest. One binary is all
// of it; the name that it is called by or its first argument says which:
//
//	init            PID 1 of the initrd (also when it is called as /init)
//	supervise       keeps guestd alive
//	guestd          the control server
//	run             the runner: fetches the bootstrap document, does the job
//	agentlab-agent  the wrapper of the coding agents (also by that name)
package main

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/agentlab-vm/agentlab/internal/guest/guestd"
	"github.com/agentlab-vm/agentlab/internal/guest/initd"
	"github.com/agentlab-vm/agentlab/internal/version"
)

func main() {
	args := os.Args[1:]
	name := filepath.Base(os.Args[0])
	if name != "agentlab-agent" && len(args) > 0 {
		name, args = args[0], args[1:]
	}
	os.Exit(run(name, args))
}

func run(name string, args []string) int {
	switch name {
	case "init":
		if os.Getpid() != 1 {
			return usage("init is for PID 1 of a sandbox")
		}
		return initd.Main()
	case "supervise":
		return initd.Supervise(len(args) > 0 && args[0] == "--adopt")
	case "guestd":
		if len(args) > 0 && args[0] == "--boot" {
			return guestd.Boot()
		}
		return guestd.Main()
	case "--version", "version":
		fmt.Println("agent-runner " + version.String())
		return 0
	}
	return usage(fmt.Sprintf("unknown command %q", name))
}

func usage(problem string) int {
	fmt.Fprintln(os.Stderr, "agent-runner: "+problem+"\nusage: agent-runner run | agentlab-agent | --version  (init, supervise, guestd: internal)")
	return 2
}

// Command agent-runner has all commands of AgentLab in the guest, selected by its name or argument.
package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/agentlab-vm/agentlab/internal/guest/agentcmd"
	"github.com/agentlab-vm/agentlab/internal/guest/guestd"
	"github.com/agentlab-vm/agentlab/internal/guest/initd"
	"github.com/agentlab-vm/agentlab/internal/guest/msgcmd"
	"github.com/agentlab-vm/agentlab/internal/guest/prober"
	"github.com/agentlab-vm/agentlab/internal/guest/runner"
	"github.com/agentlab-vm/agentlab/internal/version"
)

const usage = `usage: agent-runner COMMAND
  run             run the job that the bootstrap document names
  probe           run the network probes read from standard input (JSON)
  agentlab-agent, agentlab-msg, agentlab-lease (also by these names): run a coding agent; post and read messages; renew the lease
  --version
  init, supervise, guestd: started by the sandbox itself
`

func main() {
	name, args := filepath.Base(os.Args[0]), os.Args[1:]
	if name != "agentlab-agent" && !msgcmd.Programs(name) && len(args) > 0 {
		name, args = args[0], args[1:]
	}
	switch {
	case name == "init" && os.Getpid() == 1: // also if called as /init
		os.Exit(initd.Main())
	case name == "supervise":
		os.Exit(initd.Supervise(slices.Contains(args, "--adopt")))
	case name == "guestd":
		os.Exit(guestd.Main(args))
	case name == "run" && !guestd.LockRunner():
		fmt.Fprintln(os.Stderr, "agent-runner: another runner runs in this sandbox")
		os.Exit(guestd.ExitLocked)
	case name == "run":
		if staged, ok := guestd.AwaitGate(runner.Rehearse, runner.WipeStaged); ok { // guestd needs it
			os.Exit(runner.Main(args, staged))
		}
	case name == "probe":
		os.Exit(prober.Main(args))
	case name == "agentlab-agent" && len(args) > 0 && args[0] == "workspace": // in a maintenance sandbox
		os.Exit(guestd.Maintain(args[1:]))
	case name == "agentlab-agent":
		os.Exit(agentcmd.Main(args))
	case msgcmd.Programs(name):
		os.Exit(msgcmd.Main(name, args))
	case name == "--version":
		fmt.Println("agent-runner " + version.String())
	default:
		fmt.Fprint(os.Stderr, usage)
		os.Exit(2)
	}
}

package agentcmd

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/guest/filescmd"
	"github.com/agentlab-vm/agentlab/internal/guest/sessioncmd"
)

// sessionMain starts the work in a session.
func sessionMain(in io.Reader, out io.Writer, args []string) int {
	home, err := os.UserHomeDir()
	if err != nil {
		return reportError(os.Stderr, err)
	}
	filescmd.RemoveOnSignal()
	reclaim()
	g := sessioncmd.Guest{
		Repo: guestapi.RepoDir, Home: home, Link: guestapi.ProjectDir,
		Terminal: func(t guestapi.SessionTerminal) (guestapi.TerminalChoice, error) {
			if !slices.Contains(agentlab.Terminals, t.Name) {
				return guestapi.TerminalChoice{}, fmt.Errorf("unknown multiplexer %q", t.Name)
			}
			return chooseTerminal(t.Name, t.Default)
		},
		Environment: func(r guestapi.SessionEnvironment) (guestapi.Environment, error) {
			if r.Devcontainer != "" && !slices.Contains(agentlab.DevcontainerModes, r.Devcontainer) {
				return guestapi.Environment{}, fmt.Errorf("unknown mode %q of the dev container", r.Devcontainer)
			}
			e, err := startEnvironment(guestapi.RepoDir, r.Devcontainer)
			return guestapi.Environment{Notice: agentlab.OneLine(e.Notice, maxReason), Contained: e.Container != nil}, err
		},
		SetUp: func(r guestapi.SetupRun, out io.Writer) error { return setUpOnce(r, home, out) },
	}
	switch err := g.Run(args, in, out, os.Stderr); {
	case errors.Is(err, sessioncmd.ErrUsage):
		fmt.Fprintln(os.Stderr, err)
		return 2
	case err != nil:
		fmt.Fprintf(os.Stderr, "agentlab-agent: %v\n", err)
		return 1
	}
	return 0
}

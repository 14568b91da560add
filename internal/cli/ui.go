package cli

import (
	"os/exec"
	"time"

	"github.com/agentlab-vm/agentlab/internal/work"
)

// Meter returns a meter on standard error.
func (a *App) Meter() *work.Meter {
	_, tty := work.TerminalOf(a.Stderr)
	return work.NewMeter(a.Stderr, time.Now, tty)
}

// Attach connects a program of the user with the terminal. Its output goes to standard
// error.
func (a *App) Attach(cmd *exec.Cmd) {
	cmd.Stdin, cmd.Stdout, cmd.Stderr = a.Stdin, a.Stderr, a.Stderr
}

package cli

import (
	"bufio"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
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

// Confirm asks for confirmation on the terminal. Without a terminal the answer is
// no.
func (a *App) Confirm(question string) bool {
	if a.JSON {
		return false
	}
	answer, ok := a.Prompt(question + " [y/N] ")
	return ok && (answer == "y" || answer == "yes")
}

// Asks reports whether Confirm and Prompt can ask: on a terminal, and neither with
// --no-input nor with --json.
func (a *App) Asks() bool {
	_, tty := work.TerminalOf(a.Stdin)
	return tty && !a.NoInput && !a.JSON
}

// Prompt asks a question on the terminal and returns the answer in lower case.
// ok is false without a terminal and with --no-input.
func (a *App) Prompt(question string) (answer string, ok bool) {
	if _, tty := work.TerminalOf(a.Stdin); !tty || a.NoInput {
		return "", false
	}
	fmt.Fprint(a.Stderr, question)
	line, err := bufio.NewReader(a.Stdin).ReadString('\n')
	if err != nil {
		fmt.Fprintln(a.Stderr)
	}
	return strings.ToLower(strings.TrimSpace(line)), err == nil
}

// Progressf writes one line of progress to standard error.
func (a *App) Progressf(format string, args ...any) {
	fmt.Fprintf(a.Stderr, format+"\n", args...)
}

// ShowEvent prints an event on standard error.
func (a *App) ShowEvent(e api.Event) {
	a.Shown = e.ID
	a.Progressf("%s  %s", e.Time.Local().Format("15:04:05"), agentlab.WithoutControls(e.Message))
}

// Stream returns standard error.
func (a *App) Stream() io.Writer { return a.Stderr }

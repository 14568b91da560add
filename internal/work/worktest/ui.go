// Package worktest has the user and the repositories of tests of workflows.
package worktest

import (
	"fmt"
	"io"
	"os/exec"
	"time"

	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/work"
)

// UI is a work.UI that writes notes to Out. Its user gives the answer Yes to each
// question.
type UI struct {
	Out io.Writer
	Yes bool
}

// Progressf implements work.UI.
func (u UI) Progressf(format string, args ...any) { fmt.Fprintf(u.Out, format+"\n", args...) }

// ShowEvent implements work.UI.
func (u UI) ShowEvent(e api.Event) { u.Progressf("%s", e.Message) }

// Meter implements work.UI.
func (u UI) Meter() *work.Meter { return work.NewMeter(u.Out, time.Now, false) }

// Stream implements work.UI.
func (u UI) Stream() io.Writer { return u.Out }

// Attach implements work.UI.
func (u UI) Attach(cmd *exec.Cmd) { cmd.Stdout, cmd.Stderr = u.Out, u.Out }

// Asks implements work.UI.
func (u UI) Asks() bool { return u.Yes }

// Confirm implements work.UI.
func (u UI) Confirm(string) bool { return u.Yes }

// Prompt implements work.UI.
func (u UI) Prompt(string) (string, bool) { return "yes", u.Yes }

// Asking is a UI whose user has an answer of their own to each question.
type Asking struct {
	UI
	Answer func(question string) string
}

// Asks implements work.UI.
func (Asking) Asks() bool { return true }

// Confirm implements work.UI.
func (u Asking) Confirm(question string) bool {
	answer, _ := u.Prompt(question + " [y/N] ")
	return answer == "y"
}

// Prompt implements work.UI.
func (u Asking) Prompt(question string) (string, bool) {
	fmt.Fprint(u.Out, question)
	return u.Answer(question), true
}

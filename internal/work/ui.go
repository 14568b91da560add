// Package work has the workflows that run on the machine of the user: transfer of
// commits and files between a repository and a sandbox, and what is built on it. It has
// no flags, writes no data to standard output and never ends the process: the command
// line and other user interfaces call it, and implement UI.
//
// Guests are hostile. What they send is checked before anything of it is used.
package work

import (
	"io"
	"os/exec"

	"github.com/agentlab-vm/agentlab/api"
)

// UI shows the progress of a workflow, and asks the user. Its methods are not safe for
// concurrent use, except Progressf.
type UI interface {
	// Progressf shows a line of progress or a note, which can have further lines with
	// commands to run next. The text has no line break at its end.
	Progressf(format string, args ...any)
	// ShowEvent shows an event of a sandbox that a workflow waits for.
	ShowEvent(e api.Event)
	// Meter returns a display of the progress of one step, which has begun.
	Meter() *Meter
	// Stream returns the writer for output that is shown as it arrives, such as the output of
	// a program in a sandbox. The caller filters what comes from a guest: see LogWriter.
	Stream() io.Writer
	// Attach connects a program of the user with the terminal, if there is one.
	Attach(cmd *exec.Cmd)
	// Asks reports whether the user can answer.
	Asks() bool
	// Confirm asks a question, and reports whether the answer is yes. It is no if the
	// user cannot answer.
	Confirm(question string) bool
	// Prompt asks a question and returns the answer in lower case; ok is false if
	// the user cannot answer.
	Prompt(question string) (answer string, ok bool)
}

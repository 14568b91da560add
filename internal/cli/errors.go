package cli

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
)

// Exit codes of every command. exec and ssh exit with the guest's code.
const (
	exitOK          = 0
	exitFailure     = 1
	exitUsage       = 2
	exitTimeout     = 124
	exitInterrupted = 130
)

// usageError is an error in the command line: exit code 2.
type usageError struct {
	err  *agentlab.Error
	flag string // named in the message instead of the error's field; "" for an argument
}

func (u usageError) Error() string {
	if u.flag == "" {
		return u.err.Error()
	}
	return u.err.WithField("--" + u.flag).Error()
}

func (u usageError) Unwrap() error { return u.err }

// WithHint returns a copy with a hint.
func (u usageError) WithHint(format string, args ...any) error {
	return usageError{u.err.WithHint(format, args...), u.flag}
}

func usageErrorf(format string, args ...any) usageError {
	return usageError{err: agentlab.Errorf(agentlab.CodeInvalid, format, args...)}
}

// argumentFlags maps the fields of requests that arguments and flags set to the
// names of the flags.
var argumentFlags = map[string]string{
	"name": "name", "ttl": "ttl", "image": "image", "repo": "repo", "ref": "ref", "resources.cores": "cores", "resources.memory_mb": "memory-mb",
	"from_snapshot": "from-snapshot", "name_prefix": "name-prefix",
	"secrets_bundle": "bundle", "target": "", "verbs": "verb",
}

// argumentError returns an error of the daemon about an argument or flag as a
// usage error.
func argumentError(cmd *cobra.Command, err error) error {
	e, ok := errors.AsType[*agentlab.Error](err)
	if _, content := errors.AsType[contentError](err); !ok || content || e.Code != agentlab.CodeInvalid {
		return err
	}
	name, ok := argumentFlags[e.Field]
	if !ok {
		return err
	}
	if !cmd.Flags().Changed(name) {
		name = ""
	}
	return usageError{e, name}
}

// contentError is an error about a file that was sent to the daemon.
type contentError struct{ error }

func (e contentError) Unwrap() error { return e.error }

// statusError is an exit code without a message.
type statusError int

func (s statusError) Error() string { return fmt.Sprintf("exit status %d", int(s)) }

// exitCode maps errors to exit codes; nothing else does.
func exitCode(err error) int {
	var status statusError
	var usage usageError
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &status):
		return int(status)
	case errors.As(err, &usage):
		return exitUsage
	case errors.Is(err, context.Canceled):
		return exitInterrupted
	case agentlab.CodeOf(err) == agentlab.CodeTimeout:
		return exitTimeout
	}
	return exitFailure
}

// errorJSON is an error under --json.
type errorJSON struct {
	Code    agentlab.Code `json:"code"`
	Message string        `json:"message"`
	Hint    string        `json:"hint,omitempty"`
	Field   string        `json:"field,omitempty"`
}

func (a *App) printError(err error) {
	var status statusError
	if errors.As(err, &status) {
		return
	}
	out := errorJSON{Code: agentlab.CodeOf(err), Message: err.Error(), Hint: agentlab.HintOf(err)}
	if e, ok := errors.AsType[*agentlab.Error](err); ok {
		out.Field = e.Field
	}
	if errors.Is(err, context.Canceled) {
		out.Code, out.Message, out.Hint = "interrupted", "interrupted", ""
	}
	if a.json {
		_ = writeJSON(a.Stderr, map[string]errorJSON{"error": out}, "")
		return
	}
	// Text of builds and guests may be part of it.
	fmt.Fprintf(a.Stderr, "agentlab: %s\n", sanitizeLines(out.Message))
	if out.Hint != "" {
		fmt.Fprintf(a.Stderr, "  → %s\n", sanitizeLines(out.Hint))
	}
}

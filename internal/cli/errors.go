package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/agentlab-vm/agentlab"
)

// Exit codes of every command. exec and ssh pass the guest's code through.
const (
	exitOK          = 0
	exitFailure     = 1
	exitUsage       = 2
	exitTimeout     = 124
	exitInterrupted = 130
)

// usageError marks a fault of the command line itself: exit code 2.
type usageError struct{ err *agentlab.Error }

func (u usageError) Error() string { return u.err.Error() }
func (u usageError) Unwrap() error { return u.err }

// WithHint returns a copy that tells what to do next.
func (u usageError) WithHint(format string, args ...any) error {
	return usageError{u.err.WithHint(format, args...)}
}

func usageErrorf(format string, args ...any) usageError {
	return usageError{agentlab.Errorf(agentlab.CodeInvalid, format, args...)}
}

// usageOf returns the daemon's error as a usage error when it rejects that field
// of the request, whose values only the daemon knows.
func usageOf(err error, field string) error {
	if e, ok := errors.AsType[*agentlab.Error](err); ok && e.Code == agentlab.CodeInvalid && e.Field == field {
		return usageError{e}
	}
	return err
}

// statusError carries an exit code after everything worth saying was said.
type statusError int

func (s statusError) Error() string { return fmt.Sprintf("exit status %d", int(s)) }

// exitCode is the one place that maps errors to exit codes.
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

// errorJSON is the form of an error under --json.
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
		_ = json.NewEncoder(a.Stderr).Encode(map[string]errorJSON{"error": out})
		return
	}
	fmt.Fprintf(a.Stderr, "agentlab: %s\n", out.Message)
	if out.Hint != "" {
		fmt.Fprintf(a.Stderr, "  → %s\n", out.Hint)
	}
}

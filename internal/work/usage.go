package work

import (
	"errors"
	"fmt"

	"github.com/agentlab-vm/agentlab"
)

// UsageError is an error in what the user has asked for. The command line exits with 2.
type UsageError struct {
	Err  *agentlab.Error
	Flag string // of the command line, named in the message instead of the error's field; "" for an argument
}

// Error implements error.
func (u UsageError) Error() string {
	if u.Flag == "" {
		return u.Err.Error()
	}
	return u.Err.WithField("--" + u.Flag).Error()
}

// Unwrap returns the error with its code.
func (u UsageError) Unwrap() error { return u.Err }

// WithHint returns a copy with a hint.
func (u UsageError) WithHint(format string, args ...any) error {
	return UsageError{u.Err.WithHint(format, args...), u.Flag}
}

// UsageErrorf returns a UsageError with the code CodeInvalid.
func UsageErrorf(format string, args ...any) UsageError {
	return UsageError{Err: agentlab.Errorf(agentlab.CodeInvalid, format, args...)}
}

// Usage returns a validation error as a usage error.
func Usage(err error) error {
	if e, ok := errors.AsType[*agentlab.Error](err); ok {
		return UsageError{Err: e}
	}
	return err
}

// ExitStatus is an exit code without a message.
type ExitStatus int

// Error implements error.
func (s ExitStatus) Error() string { return fmt.Sprintf("exit status %d", int(s)) }

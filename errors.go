package agentlab

import (
	"errors"
	"fmt"
)

// Code is the stable, machine-readable name of an error. A code is set where
// the error occurs and is never derived from text. Callers may switch on
// codes, so a code is never renamed.
type Code string

// The codes. HTTP statuses and exit codes are mapped from them in one place
// each (internal/server and internal/cli).
const (
	CodeInvalid        Code = "invalid"         // the request itself is wrong
	CodeNotFound       Code = "not_found"       // no such object
	CodeExists         Code = "exists"          // name or id is taken
	CodeConflict       Code = "conflict"        // not possible in the object's current state
	CodeBusy           Code = "busy"            // try again later
	CodeUnsupported    Code = "unsupported"     // this backend or version cannot do it
	CodeDenied         Code = "denied"          // not allowed
	CodeNoSpace        Code = "no_space"        // disk or quota is full
	CodeUnavailable    Code = "unavailable"     // a dependency (daemon, QEMU, guest) does not answer
	CodeUnknownOutcome Code = "unknown_outcome" // it may or may not have happened
	CodeTimeout        Code = "timeout"         // a deadline passed
	CodePreflight      Code = "preflight"       // a check before the start failed
	CodeLimit          Code = "limit"           // a configured maximum is reached
	CodeSchema         Code = "schema"          // database or config written by another version
	CodeInternal       Code = "internal"        // a bug in AgentLab
)

// Error is the error type that packages return to each other: what failed and
// why (Message, Err), what to do next (Hint), and a Code for programs.
type Error struct {
	Code    Code
	Message string // what failed and why; one line, no secret, no trailing dot
	Hint    string // what to do next; may be empty
	Field   string // the request field or config key at fault; may be empty
	Err     error  // the cause; may be nil; not shown to API callers
}

func (e *Error) Error() string {
	s := e.Message
	if e.Field != "" {
		s = e.Field + ": " + s
	}
	if e.Err != nil {
		if cause := e.Err.Error(); cause != "" {
			s += ": " + cause
		}
	}
	return s
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// Errorf makes an Error with a code and a formatted message. A %w verb sets
// the cause's chain as fmt.Errorf does, with its text part of the message.
func Errorf(code Code, format string, args ...any) *Error {
	err := fmt.Errorf(format, args...)
	return &Error{Code: code, Message: err.Error(), Err: silent(errors.Unwrap(err))}
}

// WithHint returns a copy of e with a hint, which says what to do next.
func (e *Error) WithHint(format string, args ...any) *Error {
	c := *e
	c.Hint = fmt.Sprintf(format, args...)
	return &c
}

// WithField returns a copy of e with the name of the invalid field.
func (e *Error) WithField(name string) *Error {
	c := *e
	c.Field = name
	return &c
}

// CodeOf returns the code of the first Error in err's chain, "" for nil, and
// CodeInternal if the chain has no Error.
func CodeOf(err error) Code {
	if err == nil {
		return ""
	}
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Code
	}
	return CodeInternal
}

// HintOf returns the first non-empty hint in err's chain.
func HintOf(err error) string {
	for err != nil {
		e, ok := errors.AsType[*Error](err)
		if !ok {
			return ""
		}
		if e.Hint != "" {
			return e.Hint
		}
		err = e.Err
	}
	return ""
}

// TextWithHint returns the text of an error with its hint, for a reason that
// is stored.
func TextWithHint(err error) string {
	if hint := HintOf(err); hint != "" {
		return err.Error() + " (" + hint + ")"
	}
	return err.Error()
}

// silentError keeps a cause in the chain (for errors.Is) without repeating
// text that the message already contains.
type silentError struct{ error }

func (silentError) Error() string   { return "" }
func (s silentError) Unwrap() error { return s.error }
func silent(err error) error {
	if err == nil {
		return nil
	}
	return silentError{err}
}

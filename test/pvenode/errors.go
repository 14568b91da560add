package pvenode

import (
	"errors"
	"fmt"
	"strings"
)

// Error is an error answer of the node.
type Error struct {
	// Status is that of HTTP: 400, 403, 500, 501, 596 …
	Status int
	// Message is what the node says, without a final newline. The command
	// line prints it as it is; HTTP has its first line as reason phrase.
	Message string
	// Params is what is wrong with which parameter (status 400).
	Params map[string]string
	// Exit is the exit code that a command of the node gives; 0 draws 255.
	Exit int
}

// Error implements error.
func (e *Error) Error() string { return e.Message }

// dief is Perl's die in a handler: status 500. Its exit code is 255 unless
// errno happened to be set there.
func dief(format string, args ...any) *Error {
	return &Error{Status: 500, Message: fmt.Sprintf(format, args...)}
}

// exit says which exit code a command has after this error.
func (e *Error) exit(code int) *Error { e.Exit = code; return e }

// badParam is a refused parameter.
func badParam(name, text string) *Error {
	return &Error{Status: 400, Message: "Parameter verification failed.", Params: map[string]string{name: text}}
}

// denied is a missing privilege; what is "" for the bare text.
func denied(what string) *Error {
	if what == "" {
		return &Error{Status: 403, Message: "Permission check failed"}
	}
	return &Error{Status: 403, Message: "Permission check failed (" + what + ")"}
}

func notImplemented(method, path string) *Error {
	return &Error{Status: 501, Message: fmt.Sprintf("Method '%s %s' not implemented", method, path)}
}

// message is what a task keeps of an error: one line.
func message(err error) string {
	var e *Error
	if errors.As(err, &e) && len(e.Params) > 0 {
		lines := []string{"400 " + e.Message}
		for _, k := range sortedKeys(e.Params) {
			lines = append(lines, k+": "+strings.TrimRight(e.Params[k], "\n"))
		}
		return strings.Join(lines, " ")
	}
	return strings.ReplaceAll(strings.TrimRight(err.Error(), "\n"), "\n", " ")
}

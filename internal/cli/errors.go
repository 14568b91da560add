package cli

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"

	"github.com/agentlab-vm/agentlab/internal/work"
)

// Exit codes of every command. exec and ssh exit with the guest's code.
const (
	ExitOK          = 0
	ExitFailure     = 1
	exitUsage       = 2
	ExitTimeout     = 124
	ExitInterrupted = 130
)

// argumentFlags maps the fields of requests that arguments and flags set to the names of
// the flags, if they are others than flagNames returns; "" is an argument.
var argumentFlags = map[string]string{
	"repo_url": "repo", "bundle_id": "repo", "secrets_bundle": "bundle", "verbs": "verb", "sandboxes": "sandbox",
	"attempts.count": "attempts", "attempts.agents": "attempt-agent", "attempts.tasks": "attempt-task-file", "attempts.pick": "pick",
	"target": "", "text": "", "command": "", "add": "", "remove": "",
}

// flagNames returns the names that the flag of a field of a request can have:
// workspace_wait_seconds is --workspace-wait, resources.cores --cores, and size_gb is
// --size or --workspace-size.
func flagNames(field string) []string {
	if name, ok := argumentFlag(field); ok {
		return []string{name}
	}
	last := strings.ReplaceAll(field[strings.LastIndexByte(field, '.')+1:], "_", "-")
	names := []string{last}
	for _, unit := range []string{"-minutes", "-seconds", "-gb", "-id"} {
		if short, ok := strings.CutSuffix(last, unit); ok {
			names = append(names, short)
		}
	}
	for _, name := range names {
		names = append(names, "workspace-"+name)
	}
	return names
}

func argumentFlag(field string) (name string, ok bool) {
	name, ok = argumentFlags[strings.TrimPrefix(field, "job.")]
	return name, ok
}

// ArgumentError returns an error of the daemon about an argument or flag as a
// usage error.
func ArgumentError(cmd *cobra.Command, err error) error {
	e, ok := errors.AsType[*agentlab.Error](err)
	if _, content := errors.AsType[contentError](err); !ok || content || e.Code != agentlab.CodeInvalid || e.Field == "" {
		return err
	}
	for _, name := range flagNames(e.Field) {
		if cmd.Flags().Changed(name) {
			return work.UsageError{Err: e, Flag: name}
		}
	}
	if name, ok := argumentFlag(e.Field); ok && name == "" || isArgument(cmd, e.Field) {
		return work.UsageError{Err: e}
	}
	return err
}

// isArgument reports whether an argument of a command has the name of a field, as NAME
// in "create NAME".
func isArgument(cmd *cobra.Command, field string) bool {
	field = strings.ToUpper(field[strings.LastIndexByte(field, '.')+1:])
	return slices.ContainsFunc(strings.FieldsFunc(cmd.Use, func(r rune) bool { return !unicode.IsLetter(r) && r != '_' }), func(word string) bool { return word == field })
}

// ContentError returns err as an error about a file that was sent to the daemon: no flag
// or argument corrects it.
func ContentError(err error) error { return contentError{err} }

// contentError is an error about a file that was sent to the daemon.
type contentError struct{ error }

func (e contentError) Unwrap() error { return e.error }

// ExitCode maps errors to exit codes; nothing else does.
func ExitCode(err error) int {
	var status work.ExitStatus
	var usage work.UsageError
	switch {
	case err == nil:
		return ExitOK
	case errors.As(err, &status):
		return int(status)
	case errors.As(err, &usage):
		return exitUsage
	case errors.Is(err, context.Canceled):
		return ExitInterrupted
	case agentlab.CodeOf(err) == agentlab.CodeTimeout:
		return ExitTimeout
	}
	return ExitFailure
}

// errorJSON is an error under --json.
type errorJSON struct {
	Code    agentlab.Code `json:"code"`
	Message string        `json:"message"`
	Hint    string        `json:"hint,omitempty"`
	Field   string        `json:"field,omitempty"`
}

func toErrorJSON(err error) errorJSON {
	if errors.Is(err, context.Canceled) {
		return errorJSON{Code: "interrupted", Message: "interrupted"}
	}
	out := errorJSON{Code: agentlab.CodeOf(err), Message: err.Error(), Hint: agentlab.HintOf(err)}
	if e, ok := errors.AsType[*agentlab.Error](err); ok {
		out.Field = e.Field
	}
	return out
}

// PrintError prints an error on standard error: one line with its hint, or a document under
// --json.
func (a *App) PrintError(err error) {
	if _, ok := errors.AsType[work.ExitStatus](err); ok {
		return
	}
	out := toErrorJSON(err)
	if a.JSON {
		_ = writeJSON(a.Stderr, map[string]errorJSON{"error": out}, "")
		return
	}
	// Text of builds and guests may be part of it.
	fmt.Fprintf(a.Stderr, "agentlab: %s\n", work.SanitizeLines(out.Message))
	if out.Hint != "" {
		fmt.Fprintf(a.Stderr, "  → %s\n", work.SanitizeLines(out.Hint))
	}
}

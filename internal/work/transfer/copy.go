// Package transfer moves files between this machine and sandboxes, as archives: copies,
// artifacts, environment files, dotfiles, and the files of workspaces. Archives of guests
// are hostile: they are checked and extracted in a staging directory first.
package transfer

import (
	"context"
	"fmt"
	"io"
	"path"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/returncheck"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/guestrun"
)

// Options are the flags of cp.
type Options struct {
	User  string
	Force bool
	Gib   int // limit of a copy from a sandbox
}

// Copied is what cp has copied.
type Copied struct {
	Source      string            `json:"source"`
	Destination string            `json:"destination"`
	Files       int               `json:"files"`
	Directories int               `json:"directories"`
	Links       int               `json:"links"`
	Bytes       int64             `json:"bytes"`
	Skipped     []SkippedEntry    `json:"skipped"`            // the first maxSkipped
	SkippedMore int               `json:"skipped_more"`       // the others
	Changed     bool              `json:"changed_while"`      // the guest changed files during the copy
	Findings    []gitsafe.Finding `json:"findings,omitempty"` // of the return check

	Found []returncheck.Finding `json:"-"` // of the return check
}

// SkippedEntry is a file that cp does not copy.
type SkippedEntry struct {
	Path   string `json:"path"`
	Reason string `json:"reason"`
}

// maxSkipped limits the list of files that were not copied.
const maxSkipped = 1000

func (r *Copied) skip(name, reason string) {
	if len(r.Skipped) == maxSkipped {
		r.SkippedMore++
		return
	}
	r.Skipped = append(r.Skipped, SkippedEntry{name, reason})
}

// Place is an argument of cp: a path in a sandbox, or a local one.
type Place struct{ Sandbox, Path string }

// String returns the argument.
func (p Place) String() string {
	if p.Sandbox == "" {
		return p.Path
	}
	return p.Sandbox + ":" + p.Path
}

// SplitCopy parses an argument of cp. As in scp, a colon after a slash is part of a
// local path.
func SplitCopy(arg string) Place {
	sandbox, name, ok := strings.Cut(arg, ":")
	if !ok || sandbox == "" || strings.ContainsRune(sandbox, '/') {
		return Place{Path: arg}
	}
	return Place{sandbox, name}
}

// content reports whether the path of a directory means its content, because it has no
// name of its own.
func (p Place) content() bool {
	base := p.base()
	return base == "." || base == ".." || base == "/" || p.Sandbox != "" && strings.TrimRight(p.Path, "/") == "~"
}

// base returns the name that a copy of the path has.
func (p Place) base() string { return path.Base(p.Path) }

// CopyNotes reports what was left out of a copy, on standard error.
func CopyNotes(ui work.UI, r Copied) {
	const shown = 10
	for i, s := range r.Skipped {
		if i == shown {
			ui.Progressf("note: %d more are not copied; --json lists them", len(r.Skipped)-shown+r.SkippedMore)
			break
		}
		ui.Progressf("note: %s is not copied: %s", agentlab.WithoutControls(s.Path), agentlab.WithoutControls(s.Reason))
	}
	if r.Changed {
		ui.Progressf("note: files changed in the sandbox during the copy")
	}
}

// copyScript runs a script of cp, as guestrun.Script does.
func copyScript(ctx context.Context, c *client.Client, sandbox, user, script string, args []string, in io.Reader, out io.Writer) (code int, text string, err error) {
	return guestrun.Script(ctx, c, sandbox, guestapi.ExecRequest{User: user}, "agentlab-cp", script, args, in, out)
}

// The exit codes of the scripts of cp. Those of tar are below.
const (
	copyChanged  = 1 // a file changed while tar read it
	copyMissing  = 20
	copyIsDir    = 21
	copySpecial  = 22
	copyExists   = 23
	copyNotADir  = 24
	copyNoTarget = 25
	copyCut      = 26
	copyUnsized  = 27 // as files of /proc are
)

// copyFault returns the error for the exit code of a script of cp.
func copyFault(at Place, code int, text string) error {
	text = strings.TrimSuffix(text, "\ntar: Exiting with failure status due to previous errors")
	last := text[strings.LastIndexByte(text, '\n')+1:]
	switch code {
	case copyMissing:
		return agentlab.Errorf(agentlab.CodeNotFound, "%s does not exist", at).WithHint("agentlab exec %s -- ls -la", at.Sandbox)
	case copyIsDir:
		return agentlab.Errorf(agentlab.CodeInvalid, "%s is a directory", at)
	case copySpecial:
		return agentlab.Errorf(agentlab.CodeInvalid, "%s is neither a file nor a directory", at)
	case copyExists:
		return agentlab.Errorf(agentlab.CodeExists, "%s:%s exists", at.Sandbox, last).WithHint("use --force to replace existing files")
	case copyUnsized:
		return agentlab.Errorf(agentlab.CodeUnsupported, "%s has content but no size, as files of the kernel", at).
			WithHint("agentlab exec %s -- cat %s > FILE", at.Sandbox, work.ShellQuote(at.Path))
	case copyNotADir:
		return agentlab.Errorf(agentlab.CodeInvalid, "%s exists and is not a directory", at)
	case copyNoTarget:
		return agentlab.Errorf(agentlab.CodeNotFound, "the directory of %s does not exist", at).WithHint("agentlab exec %s -- mkdir -p %s", at.Sandbox, work.ShellQuote(path.Dir(at.Path)))
	}
	reason := fmt.Sprintf("exit code %d", code)
	if code == copyCut {
		last = "what arrived is incomplete"
	}
	if last != "" {
		reason = agentlab.Reason(last)
	}
	e := agentlab.Errorf(agentlab.CodeUnavailable, "the copy failed in the sandbox: %s", reason)
	switch {
	case strings.Contains(text, "Permission denied"):
		e.Code = agentlab.CodeDenied
		return e.WithHint("use --user root")
	case strings.Contains(text, "No space left on device"):
		e.Code = agentlab.CodeNoSpace
	}
	return e
}

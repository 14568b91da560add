// Package transfer moves files between this machine and sandboxes, as archives: copies,
// artifacts, environment files, dotfiles, and the files of workspaces. Archives of guests
// are hostile: they are checked and extracted in a staging directory first.
package transfer

import (
	"cmp"
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

// runFiles runs 'agentlab-agent files' in a sandbox as a user; "" is the agent. It returns
// the exit code and the text of standard error.
func runFiles(ctx context.Context, c *client.Client, at Place, user string, args []string, in io.Reader, out io.Writer) (code int, text string, err error) {
	req := guestapi.ExecRequest{User: user, Command: append([]string{"agentlab-agent", "files"}, args...)}
	return guestrun.Tool(ctx, c, at.Sandbox, req, in, out, io.Discard)
}

// copyFault returns the error for the exit code and the text of 'agentlab-agent files'.
func copyFault(at Place, code int, text string) error {
	last := guestrun.LastLine(text)
	reason := agentlab.Reason(cmp.Or(last, fmt.Sprintf("exit code %d", code)))
	failed := func(code agentlab.Code) *agentlab.Error {
		return agentlab.Errorf(code, "the copy failed in the sandbox: %s", reason)
	}
	switch code {
	case 2, 127:
		return guestrun.GuestFault(guestapi.ExecRequest{Command: []string{"agentlab-agent", "files"}}, code, last)
	case guestapi.FilesMissing:
		return agentlab.Errorf(agentlab.CodeNotFound, "%s does not exist", at).WithHint("agentlab exec %s -- ls -la", at.Sandbox)
	case guestapi.FilesIsDir:
		return agentlab.Errorf(agentlab.CodeInvalid, "%s is a directory", at)
	case guestapi.FilesSpecial:
		return agentlab.Errorf(agentlab.CodeInvalid, "%s is neither a file nor a directory", at)
	case guestapi.FilesExists:
		return agentlab.Errorf(agentlab.CodeExists, "%s:%s exists", at.Sandbox, last).WithHint("use --force to replace existing files")
	case guestapi.FilesUnsized:
		return agentlab.Errorf(agentlab.CodeUnsupported, "%s has content but no size, as files of the kernel", at).
			WithHint("agentlab exec %s -- cat %s > FILE", at.Sandbox, work.ShellQuote(at.Path))
	case guestapi.FilesNotADir:
		return agentlab.Errorf(agentlab.CodeInvalid, "%s exists and is not a directory", at)
	case guestapi.FilesNoTarget:
		return agentlab.Errorf(agentlab.CodeNotFound, "the directory of %s does not exist", at).WithHint("agentlab exec %s -- mkdir -p %s", at.Sandbox, work.ShellQuote(path.Dir(at.Path)))
	case guestapi.FilesDenied:
		return failed(agentlab.CodeDenied).WithHint("use --user root")
	case guestapi.FilesNoSpace:
		return failed(agentlab.CodeNoSpace)
	}
	return failed(agentlab.CodeUnavailable)
}

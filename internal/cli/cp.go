package cli

import (
	"context"
	"fmt"
	"io"
	"path"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/returncheck"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
	"github.com/agentlab-vm/agentlab/internal/work/guestrun"
)

// copyOptions are the flags of cp.
type copyOptions struct {
	user  string
	force bool
	gib   int // limit of a copy from a sandbox
}

// copied is what cp has copied.
type copied struct {
	Source      string            `json:"source"`
	Destination string            `json:"destination"`
	Files       int               `json:"files"`
	Directories int               `json:"directories"`
	Links       int               `json:"links"`
	Bytes       int64             `json:"bytes"`
	Skipped     []skippedEntry    `json:"skipped"`            // the first maxSkipped
	SkippedMore int               `json:"skipped_more"`       // the others
	Changed     bool              `json:"changed_while"`      // the guest changed files during the copy
	Findings    []gitsafe.Finding `json:"findings,omitempty"` // of the return check

	found []returncheck.Finding
}

// skippedEntry is a file that cp does not copy.
type skippedEntry struct {
	Path   string `json:"path"`
	Reason string `json:"reason"`
}

// maxSkipped limits the list of files that were not copied.
const maxSkipped = 1000

func (r *copied) skip(name, reason string) {
	if len(r.Skipped) == maxSkipped {
		r.SkippedMore++
		return
	}
	r.Skipped = append(r.Skipped, skippedEntry{name, reason})
}

func (a *App) cpCmd() *cobra.Command {
	var opt copyOptions
	cmd := &cobra.Command{
		Use: "cp SOURCE DESTINATION", Short: "Copy files between this machine and a sandbox", Args: exactArgs("SOURCE", "DESTINATION"),
		Long: `Copy a file or a directory between this machine and a sandbox. One of SOURCE and
DESTINATION is SANDBOX:PATH, or SESSION:PATH for the sandbox of a session, with a PATH
relative to the home of the user in the sandbox; write ./a:b for a local name with a
colon. The other is a local path, or - for standard input or output, with the content
of one file.

If DESTINATION is a directory, the source is copied into it. If SOURCE ends with /.,
the content of the directory is copied, and not the directory itself. Existing files
are replaced only with --force. Either everything is copied, or nothing: a copy that
is refused or interrupted changes nothing on this machine.

Files keep their permissions, except setuid, setgid and sticky bits; owners and times
are not copied. .git is not copied: it has configuration that runs programs, and
credentials. 'agentlab job fetch' and 'agentlab exec SANDBOX git' are for commits.

A guest is not trusted. Links that lead out of the directory that is copied, devices,
pipes, sockets and what makes a directory a git repository are left out and reported.
Files that programs of this machine execute or obey without a command, such as .envrc
and .vscode, must be confirmed; see 'git config agentlab.return' in 'agentlab sync
--help'. An archive with names outside of its
directory, or larger than --max-size, is refused.`,
		Example: `  agentlab cp play:report.html .
  agentlab cp play:/var/log/syslog - | less
  agentlab cp fixtures play:/tmp
  agentlab cp play:/tmp/out/. ./out --force
  pg_dump app | agentlab cp - play:app.sql`,
		ValidArgsFunction: a.completeCopy,
	}
	flags := cmd.Flags()
	flags.StringVarP(&opt.user, "user", "u", "", "user in the sandbox (default agent)")
	flags.BoolVar(&opt.force, "force", false, "replace existing files; with -, write binary data to a terminal")
	opt.gib = 16
	between(flags, &opt.gib, "max-size", 1, 1<<20, "limit of a copy from a sandbox, in GiB")
	cmd.RunE = a.run(func(ctx context.Context, c *client.Client, args []string) error {
		from, to := splitCopy(args[0]), splitCopy(args[1])
		switch {
		case from.sandbox == "" && to.sandbox == "":
			return work.UsageErrorf("neither %q nor %q is SANDBOX:PATH", args[0], args[1]).WithHint("name a sandbox: agentlab cp SANDBOX:PATH PATH")
		case from.sandbox != "" && to.sandbox != "":
			return work.UsageErrorf("both %q and %q are in a sandbox", args[0], args[1]).WithHint("copy to this machine first; or: agentlab cp %s - | agentlab cp - %s", args[0], args[1])
		case from.path == "" || to.path == "":
			return work.UsageErrorf("a path is empty").WithHint("write SANDBOX:. for the home directory")
		case strings.ContainsRune(from.path+to.path, 0):
			return work.UsageErrorf("a path contains a zero byte")
		}
		switch {
		case to.sandbox != "":
			return a.finishCopy(push(ctx, a, c, a.Stdin, from.path, to, opt))
		case to.path == "-" && a.json:
			return work.UsageErrorf("--json cannot be used with - as the destination")
		case to.path == "-":
			return pullFile(ctx, c, from, opt, func(r io.Reader) error { return copyOut(a.Stdout, r, opt.force) })
		}
		return a.finishCopy(pull(ctx, a, c, from, to.path, opt))
	})
	return cmd
}

// copyPath is an argument of cp: a path in a sandbox, or a local one.
type copyPath struct{ sandbox, path string }

// String returns the argument.
func (p copyPath) String() string {
	if p.sandbox == "" {
		return p.path
	}
	return p.sandbox + ":" + p.path
}

// splitCopy parses an argument of cp. As in scp, a colon after a slash is part of a
// local path.
func splitCopy(arg string) copyPath {
	sandbox, name, ok := strings.Cut(arg, ":")
	if !ok || sandbox == "" || strings.ContainsRune(sandbox, '/') {
		return copyPath{path: arg}
	}
	return copyPath{sandbox, name}
}

// content reports whether the path of a directory means its content, because it has no
// name of its own.
func (p copyPath) content() bool {
	base := p.base()
	return base == "." || base == ".." || base == "/" || p.sandbox != "" && strings.TrimRight(p.path, "/") == "~"
}

// base returns the name that a copy of the path has.
func (p copyPath) base() string { return path.Base(p.path) }

// completeCopy completes the arguments of cp: names of sandboxes with a colon, and
// otherwise local files.
func (a *App) completeCopy(cmd *cobra.Command, given []string, begin string) ([]cobra.Completion, cobra.ShellCompDirective) {
	if len(given) > 1 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	names := a.names(cmd.Context(), begin, listSandboxes, listSessions)
	for i, found := range names {
		name, about, _ := strings.Cut(found, "\t")
		names[i] = cobra.CompletionWithDesc(name+":", about)
	}
	return names, cobra.ShellCompDirectiveNoSpace
}

// copyNotes reports what was left out of a copy, on standard error.
func copyNotes(ui work.UI, r copied) {
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

// finishCopy prints the result of a copy.
func (a *App) finishCopy(r copied, err error) error {
	if err != nil {
		return err
	}
	if r.Skipped == nil {
		r.Skipped = []skippedEntry{}
	}
	if !a.json {
		gitsafe.NoteNamed(a, r.found)
		copyNotes(a, r)
	}
	return a.done(r, "copied %s to %s (%s, %s)", agentlab.WithoutControls(r.Source), agentlab.WithoutControls(r.Destination), agentlab.Plural(r.Files, "file"), work.ByteSize(r.Bytes))
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
func copyFault(at copyPath, code int, text string) error {
	text = strings.TrimSuffix(text, "\ntar: Exiting with failure status due to previous errors")
	last := text[strings.LastIndexByte(text, '\n')+1:]
	switch code {
	case copyMissing:
		return agentlab.Errorf(agentlab.CodeNotFound, "%s does not exist", at).WithHint("agentlab exec %s -- ls -la", at.sandbox)
	case copyIsDir:
		return agentlab.Errorf(agentlab.CodeInvalid, "%s is a directory", at)
	case copySpecial:
		return agentlab.Errorf(agentlab.CodeInvalid, "%s is neither a file nor a directory", at)
	case copyExists:
		return agentlab.Errorf(agentlab.CodeExists, "%s:%s exists", at.sandbox, last).WithHint("use --force to replace existing files")
	case copyUnsized:
		return agentlab.Errorf(agentlab.CodeUnsupported, "%s has content but no size, as files of the kernel", at).
			WithHint("agentlab exec %s -- cat %s > FILE", at.sandbox, work.ShellQuote(at.path))
	case copyNotADir:
		return agentlab.Errorf(agentlab.CodeInvalid, "%s exists and is not a directory", at)
	case copyNoTarget:
		return agentlab.Errorf(agentlab.CodeNotFound, "the directory of %s does not exist", at).WithHint("agentlab exec %s -- mkdir -p %s", at.sandbox, work.ShellQuote(path.Dir(at.path)))
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

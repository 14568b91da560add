// Package filescmd implements 'agentlab-agent files', with which the host copies files to
// and from a sandbox. It runs in the guest, as the user whose files they are. Therefore
// the host trusts nothing of its output.
package filescmd

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/guest/repocmd"
)

const usage = `usage: agentlab-agent files pull [--names] file|tree PATH
       agentlab-agent files push [--name NAME] [--mode MODE] [--replace] file|tree|content PATH
       agentlab-agent files list DIR PATHSPEC...

pull writes an archive of a file or a directory; with --names only the files of a directory
whose names are on standard input, each with a NUL byte at its end. push extracts an archive
beside its destination and moves what it has there. list prints the files of a work tree
that git does not track, each with a NUL byte at its end.
`

// Main runs a command with the files of the guest and returns its exit code; args do not
// include "files".
func Main(args []string) int {
	c := Command{Home: os.Getenv("HOME"), In: os.Stdin, Out: os.Stdout}
	RemoveOnSignal()
	err := c.Run(args)
	if err == nil {
		return 0
	}
	if errors.Is(err, errUsage) {
		fmt.Fprint(os.Stderr, usage)
		return 2
	}
	fmt.Fprintf(os.Stderr, "agentlab-agent: %s\n", err)
	return ExitCode(err)
}

// ExitCode returns the exit code for an error of Run.
func ExitCode(err error) int {
	var f *fault
	switch {
	case err == nil:
		return 0
	case errors.As(err, &f):
		return f.code
	case errors.Is(err, errUsage):
		return 2
	case errors.Is(err, fs.ErrPermission):
		return guestapi.FilesDenied
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return guestapi.FilesNoSpace
	}
	return 1
}

var errUsage = errors.New("wrong usage")

// fault is an error with an exit code of its own.
type fault struct {
	code int
	text string
}

// Error implements error.
func (f *fault) Error() string { return f.text }

func fail(code int, format string, args ...any) error {
	return &fault{code, fmt.Sprintf(format, args...)}
}

// Command is a run of 'agentlab-agent files'.
type Command struct {
	Dir  string // for relative paths; "" is the current directory
	Home string // for paths that begin with "~"
	In   io.Reader
	Out  io.Writer
}

// Run runs a command; args do not include "files".
func (c *Command) Run(args []string) error {
	if len(args) == 0 {
		return errUsage
	}
	f := flag.NewFlagSet("files", flag.ContinueOnError)
	f.SetOutput(io.Discard)
	switch args[0] {
	case "list":
		if len(args) < 3 {
			return errUsage
		}
		return repocmd.ListUntracked(c.path(args[1]), args[2:], c.Out)
	case "pull":
		names := f.Bool("names", false, "")
		if f.Parse(args[1:]) != nil || f.NArg() != 2 {
			return errUsage
		}
		return c.pull(f.Arg(0), c.path(f.Arg(1)), *names)
	case "push":
		var p push
		f.StringVar(&p.name, "name", "", "")
		mode := f.String("mode", "644", "")
		f.BoolVar(&p.replace, "replace", false, "")
		if f.Parse(args[1:]) != nil || f.NArg() != 2 {
			return errUsage
		}
		bits, err := strconv.ParseUint(*mode, 8, 9)
		if err != nil || p.name != "" && filepath.Base(p.name) != p.name {
			return errUsage
		}
		p.mode, p.kind, p.path = fs.FileMode(bits), f.Arg(0), c.path(f.Arg(1))
		return p.run(c.In)
	}
	return errUsage
}

// path returns the path that an argument means. It does not shorten the path: what ".."
// means depends on links.
func (c *Command) path(arg string) string {
	switch {
	case arg == "~" || strings.HasPrefix(arg, "~/"):
		return c.Home + strings.TrimPrefix(arg, "~")
	case c.Dir == "" || filepath.IsAbs(arg):
		return arg
	}
	return c.Dir + "/" + arg
}

// exists reports whether there is a file or link.
func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// isDir reports whether a path leads to a directory.
func isDir(path string) bool {
	st, err := os.Stat(path)
	return err == nil && st.IsDir()
}

// shown returns a name on one line.
func shown(name string) string {
	if strings.ContainsAny(name, "\n\r") {
		return strconv.Quote(name)
	}
	return name
}

package agentcmd

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
)

// multiplexer keeps terminals running without a connection.
type multiplexer interface {
	// ensure starts a terminal, and its agent, if they do not run.
	ensure(o opening) error
	// attach is ensure, and then replaces this process by a client of the terminal. It
	// returns only an error.
	attach(o opening) error
	// web is ensure, and then starts the web server of the terminals. Its port is 0 if
	// there is none.
	web(o opening) (guestapi.TerminalWeb, error)
	// end ends a terminal with its programs, if it exists.
	end(terminal string) error
	// running reports whether there is any terminal.
	running() bool
}

// openMultiplexer returns a multiplexer, or nil if the image does not have it.
func openMultiplexer(name string) (multiplexer, error) {
	path := lookPath(name, os.Getenv("PATH"))
	if path == "" {
		return nil, nil
	}
	dir := filepath.Join(os.Getenv("HOME"), ".cache", "agentlab")
	if name == agentlab.TerminalZellij {
		return openZellij(path, filepath.Join(dir, "zellij"))
	}
	return openTmux(path, dir)
}

// workspaceDir is a variable for tests, which cannot have a workspace there.
var workspaceDir = guestapi.WorkspaceDir

// choicePath is the file with the chosen multiplexer: on the workspace, which outlives
// the sandbox, if there is one.
func choicePath() string {
	if _, err := os.Stat(workspaceDir); err == nil {
		return filepath.Join(workspaceDir, stateDir, "terminal")
	}
	return filepath.Join(os.Getenv("HOME"), ".cache", "agentlab", "terminal")
}

// chosen returns the multiplexer that was chosen for this session; "" if none was.
func chosen() string {
	p, err := os.ReadFile(choicePath())
	if name := strings.TrimSpace(string(p)); err == nil && slices.Contains(agentlab.Terminals, name) {
		return name
	}
	return ""
}

// terminalMain chooses the multiplexer of new terminals.
func terminalMain(stdout io.Writer, args []string) int {
	f := flags("terminal")
	isDefault := f.Bool("default", false, "")
	if f.Parse(args) != nil || f.NArg() != 1 || !slices.Contains(agentlab.Terminals, f.Arg(0)) {
		fmt.Fprint(os.Stderr, usage)
		return 2
	}
	c, err := chooseTerminal(f.Arg(0), *isDefault)
	if err != nil {
		return reportError(os.Stderr, err)
	}
	if err := json.NewEncoder(stdout).Encode(c); err != nil {
		return ExitNotRun
	}
	return 0
}

// chooseTerminal chooses a multiplexer; if isDefault, only unless there is a choice or a
// terminal already. Two multiplexers with terminals at once would hide the programs of
// one of them.
func chooseTerminal(name string, isDefault bool) (c guestapi.TerminalChoice, err error) {
	before := chosen()
	if isDefault && before != "" {
		name = before
	}
	c.Name = name
	m, err := openMultiplexer(name)
	if m == nil || err != nil {
		c.Missing = err == nil
		return c, err
	}
	for _, other := range agentlab.Terminals {
		if other == name {
			continue
		}
		o, err := openMultiplexer(other)
		if err != nil {
			return c, err
		}
		if o != nil && o.running() {
			if isDefault {
				return guestapi.TerminalChoice{Name: other}, nil
			}
			c.Running = other
			return c, nil
		}
	}
	at := choicePath()
	if name == before {
		return c, nil
	}
	if err := os.MkdirAll(filepath.Dir(at), 0o700); err != nil {
		return c, err
	}
	tmp := at + ".agentlab-new"
	if err := os.WriteFile(tmp, []byte(name+"\n"), 0o600); err != nil {
		return c, err
	}
	return c, os.Rename(tmp, at)
}

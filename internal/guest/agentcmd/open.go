package agentcmd

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/guest/devenv"
)

// opening is what openMain was asked for.
type opening struct {
	session string // name of the terminal
	dir     string
	agent   string // "" opens a shell, or with a terminal that exists what it shows
	shell   bool   // opens a shell, also if the terminal shows an agent
	first   string // command of a shell in a new session, in the syntax of sh
	resume  bool
	detach  bool
	web     bool // print the address of the web server instead of attaching
	args    []string
}

// openMain attaches to a terminal, and starts it, the agent's window or the agent if
// they are missing.
func openMain(stdout io.Writer, args []string) int {
	var o opening
	f := flags("open")
	f.StringVar(&o.session, "session", "main", "")
	f.StringVar(&o.dir, "dir", guestapi.RepoDir, "")
	f.StringVar(&o.agent, "agent", "", "")
	f.BoolVar(&o.shell, "shell", false, "")
	f.StringVar(&o.first, "run", "", "")
	f.BoolVar(&o.resume, "resume", false, "")
	f.BoolVar(&o.detach, "detach", false, "")
	f.BoolVar(&o.web, "web", false, "")
	if f.Parse(args) != nil {
		return 2
	}
	o.args = f.Args()
	if err := o.run(stdout); err != nil {
		return reportError(os.Stderr, err)
	}
	return 0
}

// tuiMain runs an agent in a terminal.
func tuiMain(args []string) int {
	f := flags("tui")
	name := f.String("agent", "", "")
	resume := f.Bool("resume", false, "")
	inside := f.String("inside", "", "")
	if f.Parse(args) != nil {
		return 2
	}
	return reportError(os.Stderr, runTUI(*name, *resume, *inside, f.Args()))
}

// tui is the command of the agent.
func (o opening) tui() []string {
	words := []string{"agentlab-agent", "tui", "--agent", o.agent}
	if o.resume {
		words = append(words, "--resume")
	}
	return append(append(words, "--"), o.args...)
}

// closeMain ends a terminal with its programs, if it exists.
func closeMain(args []string) int {
	f := flags("close")
	session := f.String("session", "", "")
	if f.Parse(args) != nil || *session == "" {
		return 2
	}
	m, err := openMultiplexer(cmp.Or(chosen(), agentlab.TerminalTmux))
	if m != nil && err == nil {
		err = m.end(*session)
	}
	if err != nil {
		return reportError(os.Stderr, err)
	}
	return 0
}

func (o opening) run(stdout io.Writer) error {
	if o.agent != "" {
		a, err := find(o.agent)
		if err != nil {
			return err
		}
		contained := isBelow(o.dir, guestapi.RepoDir) && devenv.ConfigHash(guestapi.RepoDir) != "" // it may have the agent
		if !contained && lookPath(a.program, os.Getenv("PATH")) == "" {
			return notInstalled{a}
		}
	}
	name := chosen()
	m, err := openMultiplexer(cmp.Or(name, agentlab.TerminalTmux))
	if err != nil {
		return err
	}
	if m == nil && name != "" {
		return fmt.Errorf("%s is not installed in this image: choose an image that has it, or another multiplexer: agentlab attach --terminal NAME", name)
	}
	if _, err := os.Stat(workspaceDir); err == nil { // for conversations
		if err := os.MkdirAll(filepath.Join(workspaceDir, stateDir), 0o700); err != nil {
			return err
		}
	}
	if err := os.Chdir(o.dir); err != nil {
		return err
	}
	if isBelow(o.dir, guestapi.RepoDir) {
		if _, err := startEnvironment(guestapi.RepoDir, ""); err != nil {
			return err
		}
	}
	if m == nil {
		return o.withoutMultiplexer()
	}
	switch {
	case o.web:
		w, err := m.web(o)
		if err != nil {
			return err
		}
		return json.NewEncoder(stdout).Encode(w)
	case o.detach:
		return m.ensure(o)
	}
	return m.attach(o)
}

// withoutMultiplexer runs the program directly. It ends with the connection.
func (o opening) withoutMultiplexer() error {
	if o.detach || o.web {
		return errors.New("tmux is not installed in this image, so nothing can run in the background")
	}
	fmt.Fprintln(os.Stderr, "agentlab-agent: tmux is not installed in this image, so this terminal ends with the connection")
	if o.agent != "" {
		return runTUI(o.agent, o.resume, "", o.args)
	}
	return syscall.Exec("/bin/bash", []string{"bash", "--login"}, os.Environ())
}

// ShellQuote quotes a word for sh.
func ShellQuote(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

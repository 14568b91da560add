package agentcmd

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"
)

// Limits of Zellij's commands.
const (
	zellijWait = 10 * time.Second // for output after a command has ended
	paneWait   = 20 * time.Second // for a pane to start, also under emulation
	oldPane    = 2 * time.Second  // for the pane of a session that exists
	endWait    = 5 * time.Second
)

// zellij runs the Zellij sessions of this user for AgentLab's terminals. Each agent of a
// terminal has a session of its own: a tab that is added to a session without clients is
// lost in Zellij 0.45.
type zellij struct{ path, dir string }

func openZellij(path, dir string) (*zellij, error) {
	return &zellij{path: path, dir: dir}, os.MkdirAll(dir, 0o700)
}

// env is the environment of Zellij's commands. In a pane of Zellij they would mean its
// session.
func (z *zellij) env() []string {
	env := slices.DeleteFunc(os.Environ(), func(kv string) bool {
		name, _, _ := strings.Cut(kv, "=")
		return name == "ZELLIJ" || name == "ZELLIJ_SESSION_NAME" || name == "ZELLIJ_PANE_ID"
	})
	return withDefaults(env, []string{"SHELL=/bin/bash"})
}

func (z *zellij) run(args ...string) (string, error) {
	cmd := &exec.Cmd{Path: z.path, Args: append([]string{"zellij"}, args...), Env: z.env(), WaitDelay: zellijWait}
	out, err := cmd.CombinedOutput()
	text := strings.TrimSpace(string(out))
	if errors.Is(err, exec.ErrWaitDelay) {
		err = nil // its server has the output open
	}
	if err != nil && text != "" {
		err = fmt.Errorf("zellij %s: %s", strings.Join(args, " "), text)
	}
	return text, err
}

// ensure implements multiplexer.
func (z *zellij) ensure(o opening) error {
	_, err := z.open(o)
	return err
}

// open returns the name of the session that an opening means, which it starts if it does
// not run.
func (z *zellij) open(o opening) (name string, err error) {
	list, err := z.sessions()
	if err != nil {
		return "", err
	}
	name = z.session(o, list)
	existed := slices.Contains(list, name)
	if existed && o.agent == "" {
		return name, nil
	}
	if !existed {
		if err := z.create(name, o); err != nil {
			return "", err
		}
	}
	return name, z.fill(name, o, existed)
}

// fill starts the programs of a session that has just been made, or that existed.
func (z *zellij) fill(name string, o opening, existed bool) error {
	socket, wait := z.file(name, ".sock"), paneWait
	if existed {
		wait = oldPane
	}
	req := paneRequest{Command: o.tuiOrFirst(), Dir: o.dir}
	reply, err := askPane(socket, req, wait)
	if errors.Is(err, errNoPane) && existed { // the user has closed it
		args := append([]string{"--session", name, "run", "--name", o.title(), "--close-on-exit", "--"}, paneCommand(socket)...)
		if _, err := z.run(args...); err != nil {
			return err
		}
		reply, err = askPane(socket, req, paneWait)
	}
	if err != nil {
		return fmt.Errorf("zellij did not start the pane of %s: %w", o.title(), err)
	}
	if reply.Running && len(o.args) > 0 {
		fmt.Fprintf(os.Stderr, "agentlab-agent: %s is running already, so its arguments are not used\n", o.agent)
	}
	return os.WriteFile(z.file(zellijName(o.session), ".current"), []byte(name), 0o600)
}

// create starts a session in the background.
func (z *zellij) create(name string, o opening) error {
	layout := z.file(name, ".kdl")
	if err := os.WriteFile(layout, []byte(zellijLayout(o, paneCommand(z.file(name, ".sock")))), 0o600); err != nil {
		return err
	}
	_, _ = z.run("delete-session", name) // one that has ended would return with its former panes
	_, err := z.run("--layout", layout, "attach", "--create-background", name)
	if err != nil && strings.Contains(err.Error(), "already exists") { // another start was faster
		return nil
	}
	return err
}

// paneCommand is the command of a pane with the programs of a terminal.
func paneCommand(socket string) []string {
	return []string{"agentlab-agent", "pane", "--socket", socket}
}

// tuiOrFirst is the command in the first pane of a terminal; nil for only a shell.
func (o opening) tuiOrFirst() []string {
	switch {
	case o.agent != "":
		return o.tui()
	case o.first != "":
		return []string{"sh", "-c", o.first}
	}
	return nil
}

// title is the name of the pane.
func (o opening) title() string {
	if o.agent != "" {
		return o.agent
	}
	return "shell"
}

// zellijLayout returns a layout: the pane of the agent, with a shell in the same stack,
// or a single shell. The options are those without which a session would end with its
// connection, return with stopped programs after the VM was stopped, or be absent from
// the browser; the configuration of the user decides about everything else.
func zellijLayout(o opening, command []string) string {
	var b strings.Builder
	b.WriteString(`layout {
    default_tab_template {
        pane size=1 borderless=true {
            plugin location="zellij:tab-bar"
        }
        children
        pane size=1 borderless=true {
            plugin location="zellij:status-bar"
        }
    }
`)
	var args []string
	for _, arg := range command[1:] {
		args = append(args, kdlString(arg))
	}
	pane := func(properties string) string {
		return fmt.Sprintf("pane name=%s %sclose_on_exit=true command=%s {\n            args %s\n        }\n",
			kdlString(o.title()), properties, kdlString(command[0]), strings.Join(args, " "))
	}
	fmt.Fprintf(&b, "    tab name=%s focus=true {\n        ", kdlString(o.title()))
	if o.agent == "" {
		b.WriteString(pane("focus=true "))
	} else {
		b.WriteString("pane stacked=true {\n        " + pane("focus=true expanded=true ") + "        pane name=\"shell\"\n        }\n")
	}
	b.WriteString(`    }
}
on_force_close "detach"
session_serialization false
web_sharing "on"
`)
	return b.String()
}

// kdlString returns s as a string of KDL 1.0.
func kdlString(s string) string {
	var b strings.Builder
	b.WriteByte('"')
	for _, r := range s {
		switch {
		case r == '"' || r == '\\':
			b.WriteByte('\\')
			b.WriteRune(r)
		case r < ' ' || r == 0x7f:
			fmt.Fprintf(&b, `\u{%x}`, r)
		default:
			b.WriteRune(r)
		}
	}
	b.WriteByte('"')
	return b.String()
}

// zellijName returns a name for a session: it is a file name, part of a URL and of a
// socket's path, which is short. Other terminals have other names.
func zellijName(terminal string) string {
	name := notInName.ReplaceAllString(terminal, "_")
	if name == terminal && len(name) <= maxZellijName {
		return name
	}
	sum := sha256.Sum256([]byte(terminal))
	return fmt.Sprintf("%.*s-%x", maxZellijName-9, name, sum[:4])
}

var notInName = regexp.MustCompile(`[^A-Za-z0-9_-]`)

// maxZellijName limits the name of a terminal in that of its sessions, in bytes.
const maxZellijName = 32

// session is the name of the session that an opening means: that of its agent, or else
// the one that the terminal has shown last. list has the sessions that run.
func (z *zellij) session(o opening, list []string) string {
	terminal := zellijName(o.session)
	if o.agent != "" {
		return terminal + "." + o.agent
	}
	p, err := os.ReadFile(z.file(terminal, ".current"))
	if current := string(p); err == nil && slices.Contains(list, current) {
		return current
	}
	return terminal
}

func (z *zellij) file(name, suffix string) string { return filepath.Join(z.dir, name+suffix) }

// sessions lists the sessions that run and are of AgentLab.
func (z *zellij) sessions() ([]string, error) {
	out, err := z.run("list-sessions", "--no-formatting")
	if err != nil && strings.Contains(err.Error(), "No active zellij sessions") {
		return nil, nil
	}
	var names []string
	for line := range strings.Lines(out) {
		name, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		if _, serr := os.Stat(z.file(name, ".kdl")); errors.Is(serr, fs.ErrNotExist) || strings.Contains(rest, "EXITED") {
			continue
		}
		names = append(names, name)
	}
	return names, err
}

// attach implements multiplexer.
func (z *zellij) attach(o opening) error {
	name, err := z.open(o)
	if err != nil {
		return err
	}
	return syscall.Exec(z.path, []string{"zellij", "attach", name}, z.env())
}

// end implements multiplexer.
func (z *zellij) end(terminal string) error {
	terminal = zellijName(terminal)
	left := func() (names []string, err error) {
		list, err := z.sessions()
		for _, name := range list {
			if name == terminal || strings.HasPrefix(name, terminal+".") {
				names = append(names, name)
			}
		}
		return names, err
	}
	names, err := left()
	for _, name := range names {
		if _, kerr := z.run("kill-session", name); err == nil {
			err = kerr
		}
	}
	if err != nil {
		return err
	}
	if !waitUntil(endWait, func() bool { names, err = left(); return len(names) == 0 || err != nil }) {
		err = fmt.Errorf("zellij did not end the session %s", names[0])
	}
	return err
}

// running implements multiplexer.
func (z *zellij) running() bool {
	list, err := z.sessions()
	return err != nil || len(list) > 0
}

package agentcmd

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"golang.org/x/term"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/sockpath"
)

// maxPaneRequest limits a request to a pane, in bytes.
const maxPaneRequest = 4 << 20

// shellEnds limits the time until a shell that is replaced has ended.
const shellEnds = 5 * time.Second

// paneRequest asks a pane to run a command, and a shell after it.
type paneRequest struct {
	Command []string `json:"command"` // empty: only the shell
	Dir     string   `json:"dir"`
}

// paneReply is the answer to a paneRequest.
type paneReply struct {
	Running bool `json:"running"` // an earlier command runs, so this one is not started
}

// pane runs the commands of a pane one after the other. Zellij cannot replace the
// command of a pane, and not all its versions can change a session without clients.
type pane struct {
	mu    sync.Mutex
	next  *paneRequest
	some  *sync.Cond // next is set
	busy  bool       // a command runs
	shell *os.Process
	ended bool
}

// paneMain runs in a pane. It takes requests at a socket until a shell ends without one.
func paneMain(args []string) int {
	f := flags("pane")
	socket := f.String("socket", "", "")
	if f.Parse(args) != nil || *socket == "" || f.NArg() > 0 {
		return 2
	}
	l, err := sockpath.Listen(*socket, 0o600)
	if agentlab.CodeOf(err) == agentlab.CodeExists { // another pane was faster
		return 0
	}
	if err != nil {
		return reportError(os.Stderr, err)
	}
	defer func() { _ = l.Close() }()
	signal.Notify(make(chan os.Signal, 1), os.Interrupt, syscall.SIGQUIT) // for the command
	p := &pane{}
	p.some = sync.NewCond(&p.mu)
	go p.serve(l)
	p.run()
	return 0
}

func (p *pane) serve(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer func() { _ = c.Close() }()
			var req paneRequest
			if json.NewDecoder(io.LimitReader(c, maxPaneRequest)).Decode(&req) != nil {
				return
			}
			if reply, ok := p.ask(req); ok {
				_ = json.NewEncoder(c).Encode(reply)
			}
		}()
	}
}

// ask accepts a request unless a command runs. It is not ok if the pane has ended.
func (p *pane) ask(req paneRequest) (reply paneReply, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.ended:
		return reply, false
	case p.busy || p.next != nil || p.shell != nil && len(req.Command) == 0:
		return paneReply{Running: true}, true
	}
	p.next = &req
	p.some.Signal()
	if shell := p.shell; shell != nil {
		_ = shell.Signal(syscall.SIGHUP)
		time.AfterFunc(shellEnds, func() { _ = shell.Kill() })
	}
	return reply, true
}

// run runs commands until a shell ends without a request for another one.
func (p *pane) run() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.next == nil {
		p.some.Wait()
	}
	for p.next != nil {
		req := *p.next
		p.next = nil
		if len(req.Command) > 0 {
			p.busy = true
			p.foreground(req.Dir, req.Command, func(*os.Process) {})
			p.busy = false
		}
		// The output of an agent that has ended can be read above the shell.
		p.foreground(req.Dir, []string{"bash", "--login"}, func(shell *os.Process) { p.shell = shell })
		p.shell = nil
	}
	p.ended = true
}

// foreground runs a program on the terminal, and unlocks p until it has ended.
func (p *pane) foreground(dir string, argv []string, started func(*os.Process)) {
	cmd := exec.CommandContext(context.Background(), argv[0], argv[1:]...)
	cmd.Dir, cmd.Stdin, cmd.Stdout, cmd.Stderr = dir, os.Stdin, os.Stdout, os.Stderr
	if in := int(os.Stdin.Fd()); term.IsTerminal(in) {
		// In the group of this process nothing can stop it (Ctrl-Z), as its parent is not
		// a shell. A shell that was killed may have left the terminal to its own group.
		cmd.SysProcAttr = &syscall.SysProcAttr{Foreground: true, Pgid: syscall.Getpgrp(), Ctty: in}
	}
	if err := cmd.Start(); err != nil {
		reportError(os.Stderr, err)
		return
	}
	started(cmd.Process)
	p.mu.Unlock()
	_ = cmd.Wait() // the shell that follows shows what happened
	p.mu.Lock()
}

// errNoPane is the error if no pane takes requests at a socket.
var errNoPane = errors.New("no pane")

// askPane sends a request to the pane of a socket. It waits for the pane to start.
func askPane(socket string, req paneRequest, wait time.Duration) (reply paneReply, err error) {
	err = errNoPane
	waitUntil(wait, func() bool {
		c, derr := sockpath.Dial(context.Background(), socket)
		if derr != nil {
			return false
		}
		defer func() { _ = c.Close() }()
		_ = c.SetDeadline(time.Now().Add(wait + time.Second))
		if json.NewEncoder(c).Encode(req) == nil && json.NewDecoder(io.LimitReader(c, 4<<10)).Decode(&reply) == nil {
			err = nil
		}
		return err == nil
	})
	return reply, err
}

// waitUntil calls done until it returns true, for at most limit. It reports the last
// result.
func waitUntil(limit time.Duration, done func() bool) bool {
	for end := time.Now().Add(limit); !done(); {
		if time.Now().After(end) {
			return false
		}
		time.Sleep(50 * time.Millisecond) // other processes start or end
	}
	return true
}

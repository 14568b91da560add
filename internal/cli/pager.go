package cli

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"os/signal"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/gitsafe"
)

// Page calls fn with a writer for a patch of a guest. On a terminal it is shown with
// colours and in the pager of git; colour turns them off. A reader that ends early, such
// as head or a pager, is no error.
func (a *App) Page(ctx context.Context, colour bool, fn func(w io.Writer) error) error {
	// With a handler, a write to a closed pipe returns an error. Without it, it would end
	// this process, which may have to stop a sandbox.
	pipe := make(chan os.Signal, 1)
	signal.Notify(pipe, unix.SIGPIPE)
	defer signal.Stop(pipe)
	out := &ShownOutput{W: a.Stdout}
	file, tty := work.TerminalOf(a.Stdout)
	if !tty {
		return out.Ended(fn(out))
	}
	finish := func() {}
	if command := pager(ctx); command != "" {
		w, wait, err := startPager(command, file)
		if err != nil {
			return err
		}
		out.W, finish = w, wait
	}
	var w io.Writer = out
	if colour && os.Getenv("NO_COLOR") == "" {
		w = &patchColours{w: out, bol: true}
	}
	err := fn(work.Sanitizer(w))
	finish()
	return out.Ended(err)
}

// pager returns the command that git would use, without the configuration of the
// repository; "" means none.
func pager(ctx context.Context) string {
	command, set := os.LookupEnv("GIT_PAGER")
	if !set {
		var err error
		command, err = gitsafe.Git(ctx, ".", "config", "--global", "--get", "core.pager")
		set = err == nil
	}
	if !set {
		command, set = os.LookupEnv("PAGER")
	}
	if _, err := exec.LookPath("less"); !set && err == nil {
		command = "less"
	}
	if command == "cat" || os.Getenv("TERM") == "dumb" && !set {
		return ""
	}
	return command
}

// startPager starts a pager. wait closes its input and waits until the user has ended it.
func startPager(command string, out *os.File) (w io.Writer, wait func(), err error) {
	cmd := exec.Command("sh", "-c", command) //nolint:noctx // the user's own; it outlives an interrupt, as that of git
	cmd.Stdout, cmd.Stderr = out, os.Stderr
	cmd.Env = os.Environ()
	for name, value := range map[string]string{"LESS": "FRX", "LV": "-c"} { // the defaults of git
		if _, set := os.LookupEnv(name); !set {
			cmd.Env = append(cmd.Env, name+"="+value)
		}
	}
	in, err := cmd.StdinPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return nil, nil, err
	}
	return in, func() { _, _ = in.Close(), cmd.Wait() }, nil
}

// ShownOutput notes that the reader of an output has ended.
type ShownOutput struct {
	W      io.Writer
	closed bool
}

func (o *ShownOutput) Write(p []byte) (int, error) {
	n, err := o.W.Write(p)
	o.closed = o.closed || errors.Is(err, unix.EPIPE)
	return n, err
}

// Ended returns err, unless it is the result of an output whose reader has ended.
func (o *ShownOutput) Ended(err error) error {
	if o.closed {
		return nil
	}
	return err
}

// patchColours colours the lines of a patch as git does. The patch has no control
// characters.
type patchColours struct {
	w      io.Writer
	bol    bool // at the begin of a line
	inHunk bool
	on     bool // a colour is set
}

func (c *patchColours) Write(p []byte) (int, error) {
	var out []byte
	for _, b := range p {
		if c.bol {
			colour := c.of(b)
			c.on = colour != ""
			out = append(out, colour...)
		}
		if c.bol = b == '\n'; c.bol && c.on {
			out = append(out, "\x1b[m"...)
		}
		out = append(out, b)
	}
	if _, err := c.w.Write(out); err != nil {
		return 0, err
	}
	return len(p), nil
}

// of returns the colour of a line by its first character: in a hunk, lines begin with a
// space, +, - or \.
func (c *patchColours) of(first byte) string {
	switch {
	case first == '@':
		c.inHunk = true
		return "\x1b[36m"
	case first == 'd':
		c.inHunk = false
	case c.inHunk && first == '+':
		return "\x1b[32m"
	case c.inHunk && first == '-':
		return "\x1b[31m"
	}
	if c.inHunk {
		return ""
	}
	return "\x1b[1m"
}

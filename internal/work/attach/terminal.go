// Package attach connects the terminal of the user with a process in a sandbox, and
// connects it again when the connection is lost.
package attach

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"io"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/bounded"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/guestrun"
)

// Limits on the attempts to reconnect a terminal.
const (
	reconnectEvery = time.Second
	reconnectMax   = 10 * time.Minute
)

// settledAfter is when a connection counts as made again. A guest that shuts down accepts
// connections and ends them, all of which are one loss for the user.
const settledAfter = 10 * time.Second

// Daemon is the daemon that an attached terminal can lose.
type Daemon interface {
	// StoppedByUser reports whether the user has stopped the daemon.
	StoppedByUser() bool
	// Restart starts the daemon. It returns nil for one that is started elsewhere.
	Restart(ctx context.Context) (*client.Client, error)
}

// Terminal is the terminal of the user, or the files in its place, for a process in a
// sandbox.
type Terminal struct {
	In       io.Reader
	Out, Err io.Writer
	UI       work.UI
	Daemon   Daemon
	Now      func() time.Time
}

// errDetached is the end of a wait by the detach key.
var errDetached = errors.New("detached")

// Open attaches to a terminal of a sandbox until the user detaches or the
// terminal ends. A lost connection is made again: the terminal keeps running in the
// sandbox. conn is the first connection; nil makes it.
func (t Terminal) Open(ctx context.Context, c *client.Client, sandbox string, open guestapi.ExecRequest, conn net.Conn) error {
	in := newRelay(t.In)
	defer NoticeLease(ctx, c, sandbox, t.Err)()
	agent := slices.Contains(open.Command, "--agent") // only it depends on the boot, see reopen
	boot := ""
	if agent {
		boot = bootID(ctx, c, sandbox)
	}
	for told := ""; ; conn = nil {
		var err error
		if conn == nil {
			conn, err = t.Connect(ctx, c, sandbox, open)
		}
		if err == nil {
			done, began := make(chan struct{}), t.Now()
			err = t.Run(ctx, conn, in.reader(done), true)
			close(done)
			if t.Now().Sub(began) >= settledAfter {
				told = ""
			}
		}
		if agentlab.CodeOf(err) != agentlab.CodeUnavailable || ctx.Err() != nil {
			return err
		}
		if why := t.lossReason(); why != told {
			t.UI.Progressf("%s", why)
			told = why
		}
		if err := t.awaitSandbox(ctx, c, sandbox, in); err != nil {
			if errors.Is(err, errDetached) {
				return nil
			}
			return err
		}
		if agent {
			now := bootID(ctx, c, sandbox)
			open.Command = reopen(open.Command, boot != "" && now != "" && now != boot)
		}
	}
}

// lossReason describes a lost connection for the user.
func (t Terminal) lossReason() string {
	if t.Daemon.StoppedByUser() {
		return "the daemon was stopped; the terminal keeps running in the sandbox, and is connected again when the daemon runs (Ctrl-C or Ctrl-] ends this)\n  → in another terminal: agentlab daemon start"
	}
	return "the connection to the sandbox was lost; connecting again (Ctrl-C or Ctrl-] ends this)"
}

// Connect runs the command of a terminal with the size of the user's.
func (t Terminal) Connect(ctx context.Context, c *client.Client, sandbox string, open guestapi.ExecRequest) (net.Conn, error) {
	open.Rows, open.Cols, open.Term = t.Size()
	return c.Exec(ctx, sandbox, open)
}

// bootID returns the identifier of the current boot of a guest; "" if it is unknown.
func bootID(ctx context.Context, c *client.Client, sandbox string) string {
	out := &bounded.Tail{Max: 64}
	if err := guestrun.Run(ctx, c, sandbox, guestapi.ExecRequest{Command: []string{"cat", "/proc/sys/kernel/random/boot_id"}, Dir: "/"}, nil, out); err != nil {
		return ""
	}
	return out.String()
}

// reopen returns the command of 'agentlab-agent open' that attaches again. An agent that
// the user has ended is not started again, but one that ended with its VM continues its
// conversation. Its arguments are not repeated: they may be a task.
func reopen(command []string, rebooted bool) []string {
	i := slices.Index(command, "--agent")
	switch {
	case i < 0:
		return command
	case !rebooted:
		return command[:i:i]
	}
	return append(command[:i+2:i+2], "--resume")
}

// awaitSandbox is WaitReachable with the keys of an attached terminal: Ctrl-C and the
// detach key end it. Other keys are dropped: the screen that they are for is not shown.
func (t Terminal) awaitSandbox(ctx context.Context, c *client.Client, sandbox string, in *relay) error {
	restore, err := t.rawMode(func() {})
	if err != nil {
		return err
	}
	defer restore()
	ctx, cancel := context.WithCancelCause(ctx)
	done := make(chan struct{})
	var keys sync.WaitGroup
	keys.Go(func() {
		buf := make([]byte, 1024)
		for r := in.reader(done); ; {
			n, err := r.Read(buf)
			if err != nil {
				return
			}
			switch i := bytes.IndexAny(buf[:n], "\x03\x1d"); {
			case i < 0:
			case buf[i] == detachKey:
				cancel(errDetached)
			default:
				cancel(context.Canceled)
			}
		}
	})
	defer keys.Wait()
	defer cancel(nil)
	defer close(done)
	err = t.WaitReachable(ctx, c, sandbox)
	if errors.Is(context.Cause(ctx), errDetached) {
		return errDetached
	}
	return err
}

// WaitReachable waits until a sandbox is up, as after a restart of the daemon or while
// it is suspended. It starts the daemon if necessary and if that was not selected
// explicitly. It fails if the sandbox has ended.
func (t Terminal) WaitReachable(ctx context.Context, c *client.Client, sandbox string) error {
	limit := time.NewTimer(reconnectMax)
	defer limit.Stop()
	tick := time.NewTicker(reconnectEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-limit.C:
			return agentlab.Errorf(agentlab.CodeTimeout, "the sandbox could not be reached for %v", reconnectMax).
				WithHint("see its state: agentlab ls, or agentlab sandbox show %s", sandbox)
		case <-tick.C:
		}
		sb, err := c.Sandbox(ctx, sandbox)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case agentlab.CodeOf(err) == agentlab.CodeUnavailable:
			now, err := t.Daemon.Restart(ctx)
			if err != nil {
				return cmp.Or(ctx.Err(), err)
			}
			if now != nil && now.Socket() != c.Socket() {
				return agentlab.Errorf(agentlab.CodeUnavailable, "the daemon runs on %s now", now.Socket()).WithHint("run the command again; the terminal keeps running in the sandbox")
			}
		case err != nil:
			return err
		case work.IsUp(sb):
			return nil
		case agentlab.SandboxState(sb.State).Final() || work.IsStopped(sb) && sb.Desired != string(agentlab.DesiredRunning) || sb.State == string(agentlab.SandboxFailed):
			return agentlab.Errorf(agentlab.CodeConflict, "sandbox %s is %s", sb.Name, sb.State).WithHint("continue it: agentlab start")
		}
	}
}

// relay reads from a file in the background, so that one reader after the other can
// have its input: a read of a terminal cannot be interrupted.
type relay struct {
	data chan []byte

	mu   sync.Mutex
	rest []byte
}

func newRelay(r io.Reader) *relay {
	in := &relay{data: make(chan []byte)}
	go func() {
		defer close(in.data)
		for {
			buf := make([]byte, 32<<10)
			n, err := r.Read(buf)
			if n > 0 {
				in.data <- buf[:n]
			}
			if err != nil {
				return
			}
		}
	}()
	return in
}

// reader returns a reader of the relay. When done is closed, its reads end with io.EOF,
// and the input is for the next reader.
func (r *relay) reader(done <-chan struct{}) io.Reader { return relayReader{r, done} }

type relayReader struct {
	*relay
	done <-chan struct{}
}

// Read implements io.Reader.
func (r relayReader) Read(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.rest) == 0 {
		select {
		case <-r.done:
			return 0, io.EOF
		case data, ok := <-r.data:
			if !ok {
				return 0, io.EOF
			}
			r.rest = data
		}
	}
	select {
	case <-r.done: // the next reader gets what came at the same time
		return 0, io.EOF
	default:
	}
	n := copy(p, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

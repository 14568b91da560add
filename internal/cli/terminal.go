package cli

import (
	"context"
	"io"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
)

// Limits on the attempts to reconnect a terminal.
const (
	reconnectEvery = time.Second
	reconnectMax   = 10 * time.Minute
)

// openTerminal attaches to a terminal of a sandbox until the user detaches or the
// terminal ends. A lost connection is made again: the terminal keeps running in the
// sandbox.
func (a *App) openTerminal(ctx context.Context, c *client.Client, sandbox string, open guestapi.ExecRequest) error {
	in := newRelay(a.Stdin)
	defer a.noticeLease(ctx, c, sandbox)()
	for {
		open.Rows, open.Cols, open.Term = a.windowSize()
		conn, err := c.Exec(ctx, sandbox, open)
		if err == nil {
			done := make(chan struct{})
			err = a.interact(ctx, conn, in.reader(done), true)
			close(done)
		}
		if agentlab.CodeOf(err) != agentlab.CodeUnavailable || ctx.Err() != nil {
			return err
		}
		a.progressf("\r\nthe connection to the sandbox was lost; connecting again")
		if err := a.waitReachable(ctx, c, sandbox); err != nil {
			return err
		}
		open.Command = open.Command[:attachOnly(open.Command)]
	}
}

// attachOnly returns how many words of a command of 'agentlab-agent open' attach
// without starting an agent.
func attachOnly(command []string) int {
	for i, w := range command {
		if w == "--agent" {
			return i
		}
	}
	return len(command)
}

// waitReachable waits until a sandbox is up, as after a restart of the daemon or while
// it is suspended. It fails if the sandbox has ended.
func (a *App) waitReachable(ctx context.Context, c *client.Client, sandbox string) error {
	ctx, cancel := context.WithTimeout(ctx, reconnectMax)
	defer cancel()
	tick := time.NewTicker(reconnectEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return agentlab.Errorf(agentlab.CodeTimeout, "the sandbox could not be reached for %v", reconnectMax).
				WithHint("see its state: agentlab sandbox show %s", sandbox)
		case <-tick.C:
		}
		sb, err := c.Sandbox(ctx, sandbox)
		switch {
		case agentlab.CodeOf(err) == agentlab.CodeUnavailable: // the daemon restarts
		case err != nil:
			return err
		case isUp(sb):
			return nil
		case agentlab.SandboxState(sb.State).Final() || isStopped(sb) || sb.State == string(agentlab.SandboxFailed):
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

package guestrun

import (
	"context"
	"errors"
	"io"
	"sync/atomic"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
)

// Silence limits how long a command of a guest may make no progress: without output, and
// without reading its input. It does not limit the time of a command as a whole.
type Silence struct {
	Quiet  time.Duration // after it, the guest is asked for a sign of life
	Answer time.Duration // limit of the time for that sign
	Most   time.Duration // limit of the time without progress, although the guest lives; 0 is none
}

// AnySilence has the limits of all commands.
var AnySilence = Silence{Quiet: 30 * time.Second, Answer: 2 * time.Minute}

// RepoSilence has the limits of commands for the repository of a session. Git says nothing
// while it packs, and a guest can be emulated.
var RepoSilence = Silence{Quiet: 30 * time.Second, Answer: 2 * time.Minute, Most: 20 * time.Minute}

// watch returns an error as soon as a command has made no progress for too long, and nil
// when ctx ends. moved changes with each progress. alive returns nil if the guest gives a
// sign of life.
func (s Silence) watch(ctx context.Context, sandbox string, moved *atomic.Int64, alive func(context.Context) error) error {
	tick := time.NewTicker(s.Quiet)
	defer tick.Stop()
	last, since := moved.Load(), time.Now()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		if now := moved.Load(); now != last {
			last, since = now, time.Now()
			continue
		}
		if s.Most > 0 && time.Since(since) >= s.Most {
			return s.fault(sandbox, "a command in the sandbox makes no progress", time.Since(since))
		}
		asked, cancel := context.WithTimeout(ctx, s.Answer)
		err := alive(asked)
		late := err != nil && errors.Is(asked.Err(), context.DeadlineExceeded)
		cancel()
		if late && moved.Load() == last {
			return s.fault(sandbox, "the sandbox does not answer", time.Since(since))
		}
	}
}

func (s Silence) fault(sandbox, what string, since time.Duration) error {
	return agentlab.Errorf(agentlab.CodeUnavailable, "%s: nothing for %s", what, since.Round(time.Second)).
		WithHint("see its console: agentlab sandbox logs %s; restart it: agentlab stop, then agentlab start; a sandbox without a session: agentlab sandbox stop %s, then agentlab sandbox start %s", sandbox, sandbox, sandbox)
}

// guestAlive runs a command that does nothing in a sandbox.
func guestAlive(ctx context.Context, c *client.Client, sandbox string) error {
	conn, err := c.Exec(ctx, sandbox, guestapi.ExecRequest{Command: []string{"true"}, Dir: "/"})
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	_, err = ReadOutput(conn, io.Discard, io.Discard)
	return err
}

// movingReader counts what is read.
type movingReader struct {
	r     io.Reader
	moved *atomic.Int64
}

func (m movingReader) Read(p []byte) (int, error) {
	n, err := m.r.Read(p)
	m.moved.Add(int64(n))
	return n, err
}

package vmdir

import (
	"context"
	"io"
	"net"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
)

// Source finds the sandboxes of a driver.
type Source interface {
	// Supervised returns the supervisor's view of a sandbox whose creation is complete.
	Supervised(ref backend.Ref) (supervisor.Dir, error)
	// Inspect is the method of backend.Driver.
	Inspect(ctx context.Context, ref backend.Ref) (backend.Instance, error)
}

// Guests implements the methods of backend.Driver, backend.Net, backend.Console and
// backend.Host that a supervisor does for its driver.
type Guests struct{ From Source }

// DialControl implements backend.Driver.
func (g Guests) DialControl(ctx context.Context, ref backend.Ref) (net.Conn, error) {
	return g.dial(ctx, ref, supervisor.Dir.DialControl)
}

// DialGuest implements backend.Driver.
func (g Guests) DialGuest(ctx context.Context, ref backend.Ref, port uint16) (net.Conn, error) {
	if port == 0 {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "port 0 cannot be dialled").WithField("port")
	}
	return g.dial(ctx, ref, func(s supervisor.Dir, ctx context.Context) (net.Conn, error) { return s.DialGuest(ctx, port) })
}

func (g Guests) dial(ctx context.Context, ref backend.Ref, open func(supervisor.Dir, context.Context) (net.Conn, error)) (net.Conn, error) {
	s, err := g.From.Supervised(ref)
	if err != nil {
		return nil, err
	}
	c, err := open(s, ctx)
	if err == nil {
		return c, nil
	}
	in, ierr := g.From.Inspect(ctx, ref)
	switch {
	case ierr != nil:
		return nil, ierr
	case in.Power != backend.PowerRunning:
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "sandbox %d is %s", s.VMID, in.Power).WithHint("start it with 'agentlab sandbox start %d'", s.VMID)
	}
	return nil, err
}

// ListenGuest implements backend.Driver.
func (g Guests) ListenGuest(_ context.Context, ref backend.Ref) (net.Listener, error) {
	s, err := g.From.Supervised(ref)
	if err != nil {
		return nil, err
	}
	return s.Listen()
}

// ConsoleLog implements backend.Console.
func (g Guests) ConsoleLog(ctx context.Context, ref backend.Ref, follow bool) (io.ReadCloser, error) {
	s, err := g.From.Supervised(ref)
	if err != nil {
		return nil, err
	}
	return s.Console(ctx, follow), nil
}

// EgressLog implements backend.Net.
func (g Guests) EgressLog(ctx context.Context, ref backend.Ref, after int64, limit int) ([]agentlab.EgressRecord, error) {
	s, err := g.From.Supervised(ref)
	if err != nil {
		return nil, err
	}
	return s.Egress(ctx, after, limit)
}

// RecordEgress implements backend.Net.
func (g Guests) RecordEgress(ctx context.Context, ref backend.Ref, r agentlab.EgressRecord) error {
	s, err := g.From.Supervised(ref)
	if err != nil {
		return err
	}
	return s.RecordEgress(ctx, r)
}

// Memory implements backend.Host.
func (g Guests) Memory(_ context.Context, ref backend.Ref) (backend.Memory, error) {
	s, err := g.From.Supervised(ref)
	if err != nil {
		return backend.Memory{}, err
	}
	return s.Memory()
}

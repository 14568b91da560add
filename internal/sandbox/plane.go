package sandbox

import (
	"context"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// plane is the open guest plane of one sandbox.
type plane struct {
	cancel context.CancelFunc
	done   chan struct{}
}

func (p *plane) close() {
	if p != nil {
		p.cancel()
		<-p.done
	}
}

// planePause is how long to wait before a guest plane that broke is opened
// again.
const planePause = time.Second

// openPlane makes sure that the guest plane of a sandbox is served. It is
// served until closePlane or the end of Run, and opened again when it breaks.
func (s *Service) openPlane(ctx context.Context, sb agentlab.Sandbox) error {
	if s.guests == nil {
		return nil
	}
	open := true
	s.with(sb.VMID, func(m *memory) { open = m.plane != nil })
	if open {
		return nil
	}
	l, err := s.cfg.Driver.ListenGuest(ctx, backend.RefOf(sb))
	if err != nil {
		return err
	}
	p := &plane{done: make(chan struct{})}
	began := make(chan struct{})
	ok := s.spawn(func(run context.Context) {
		defer close(p.done)
		run, p.cancel = context.WithCancel(run)
		defer p.cancel()
		close(began)
		err := s.guests.Serve(run, sb.VMID, l)
		_ = l.Close()
		if run.Err() == nil {
			s.planeBroke(run, sb, p, err)
		}
	})
	if !ok {
		return closeAfter(l.Close(), context.Canceled)
	}
	<-began
	s.with(sb.VMID, func(m *memory) { m.plane = p })
	return nil
}

// planeBroke has a guest plane opened again after a pause.
func (s *Service) planeBroke(ctx context.Context, sb agentlab.Sandbox, p *plane, err error) {
	s.log.Warn("guest plane broke", "vmid", sb.VMID, "err", err)
	t := time.NewTimer(planePause)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
	s.with(sb.VMID, func(m *memory) {
		if m.plane == p {
			m.plane = nil
		}
	})
	s.loop.Wake(sb.VMID)
}

func (s *Service) closePlane(vmid int) {
	var p *plane
	s.with(vmid, func(m *memory) { p, m.plane = m.plane, nil })
	p.close()
}

func closeAfter(closeErr, err error) error {
	if closeErr != nil {
		return closeErr
	}
	return err
}

package sandbox

import (
	"cmp"
	"context"
	"net"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// guestListener is the listener for the guest of one sandbox.
type guestListener struct{ stop func() }

func (p *guestListener) close() {
	if p != nil {
		p.stop()
	}
}

// relistenDelay is the delay before a failed guest listener is opened again.
const relistenDelay = time.Second

// openGuestListener ensures that the guest of a sandbox is served, until
// closeGuestListener or the end of Run. A failed listener is opened again.
func (s *Service) openGuestListener(ctx context.Context, sb agentlab.Sandbox) error {
	if s.cfg.Guests == nil || sb.Maintenance() {
		return nil
	}
	open := true
	s.withState(sb.VMID, func(m *runtimeState) { open = m.listener != nil })
	if open {
		return nil
	}
	l, err := s.On(sb).ListenGuest(ctx, backend.RefOf(sb))
	if err != nil {
		return err
	}
	p := &guestListener{}
	listen := s.listenActive
	if _, ok := l.(backend.PassiveListener); ok {
		listen = s.listenPassive
	}
	if !listen(sb.VMID, l, p) {
		return cmp.Or(l.Close(), context.Canceled)
	}
	s.withState(sb.VMID, func(m *runtimeState) { m.listener = p })
	return nil
}

// listenActive serves the connections that l accepts, and sets p.stop. It returns
// false if Run is not running.
func (s *Service) listenActive(vmid int, l net.Listener, p *guestListener) bool {
	done, began := make(chan struct{}), make(chan struct{})
	ok := s.spawn(func(run context.Context) {
		defer close(done)
		run, cancel := context.WithCancel(run)
		defer cancel()
		p.stop = func() { cancel(); <-done }
		close(began)
		err := s.cfg.Guests.Serve(run, vmid, l)
		_ = l.Close()
		if run.Err() == nil {
			s.guestListenerFailed(run, vmid, p, err)
		}
	})
	if ok {
		<-began
	}
	return ok
}

// listenPassive is listenActive without a goroutine.
func (s *Service) listenPassive(vmid int, l net.Listener, p *guestListener) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.run == nil || s.run.Err() != nil {
		return false
	}
	accept, stop := s.cfg.Guests.Handle(vmid)
	p.stop = func() { _ = l.Close(); stop() }
	l.(backend.PassiveListener).Handle(accept, func(err error) {
		stop()
		s.spawn(func(run context.Context) { s.guestListenerFailed(run, vmid, p, err) })
	})
	return true
}

// guestListenerFailed schedules the reopening of a guest listener.
func (s *Service) guestListenerFailed(ctx context.Context, vmid int, p *guestListener, err error) {
	s.log.Warn("the listener of a guest failed", "vmid", vmid, "err", err)
	select {
	case <-time.After(relistenDelay):
	case <-ctx.Done():
	}
	s.withState(vmid, func(m *runtimeState) {
		if m.listener == p {
			m.listener = nil
		}
	})
	s.loop.Wake(vmid)
}

// CloseGuestListener ends the service for the guest of a sandbox.
func (s *Core) CloseGuestListener(vmid int) {
	var p *guestListener
	s.withState(vmid, func(m *runtimeState) { p, m.listener = m.listener, nil })
	p.close()
}

// closeListeners closes the listeners of all guests.
func (s *Service) closeListeners() {
	s.mu.Lock()
	listeners := make([]*guestListener, 0, len(s.states))
	for _, m := range s.states {
		listeners = append(listeners, m.listener)
	}
	s.mu.Unlock()
	for _, l := range listeners {
		l.close()
	}
}

package devproxy

import (
	"context"
	"slices"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
)

// watcher follows the listeners of one running guest.
type watcher struct {
	project   string
	uid       string
	vmid      int
	cancel    context.CancelFunc
	listeners []guestapi.Listener // guarded by Service.mu, as project
	problem   string              // why they are not known
}

// watch starts a watcher for the sandbox of p, unless there is one. s.mu is locked.
func (s *Service) watch(ctx context.Context, p *project) {
	if w := s.watchers[p.sandbox.UID]; w != nil {
		w.project = p.id // a session can begin to use a sandbox
		return
	}
	if s.closed {
		return
	}
	ctx, cancel := context.WithCancel(ctx)
	w := &watcher{project: p.id, uid: p.sandbox.UID, vmid: p.sandbox.VMID, cancel: cancel}
	s.watchers[w.uid] = w
	s.wg.Go(func() {
		defer cancel()
		s.follow(ctx, w)
	})
}

// follow asks the guest until ctx ends. A guest that fails, or that answers at once each
// time, is asked less and less often.
func (s *Service) follow(ctx context.Context, w *watcher) {
	state, pause := "", minPause
	timer := time.NewTimer(s.cfg.First)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
		case <-ctx.Done():
			return
		}
		begun := time.Now()
		l, err := s.cfg.Sandboxes.Listeners(ctx, w.vmid, state, listWait)
		if ctx.Err() != nil {
			return
		}
		s.found(ctx, w, l, err)
		state = l.State
		switch {
		case err != nil:
			pause = min(2*pause, maxPause)
		case time.Since(begun) < quickAnswer:
			pause = min(pause*3/2, quickPause)
		default:
			pause = minPause
		}
		timer.Reset(pause)
	}
}

// found records the answer of a guest.
func (s *Service) found(ctx context.Context, w *watcher, l guestapi.Listeners, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.watchers[w.uid] != w || s.closed {
		return
	}
	if err != nil {
		if problem := agentlab.Reason(err.Error()); problem != w.problem {
			w.problem = problem
			s.log.Debug("the ports of a guest are not known", "vmid", w.vmid, "err", err)
		}
		return // it may be busy: what is known stays
	}
	w.problem = ""
	kept := l.Listeners[:min(len(l.Listeners), maxOfProject)]
	if len(kept) < len(l.Listeners) {
		w.problem = "only the lowest ports are served: the limit of a sandbox is reached"
	}
	for _, old := range w.listeners {
		if !slices.ContainsFunc(kept, func(l guestapi.Listener) bool { return l.Port == old.Port }) {
			s.seen[seenKey{w.project, old.Port}] = s.cfg.Clock()
		}
	}
	w.listeners = kept
	s.reconcile(ctx)
	s.Wake() // the file is written without the lock
}

// forget records that the guest of a watcher no longer listens. s.mu is locked.
func (s *Service) forget(w *watcher) {
	for _, l := range w.listeners {
		s.seen[seenKey{w.project, l.Port}] = s.cfg.Clock()
	}
	w.listeners = nil
}

// listenersOf returns what listens in the guest of p. s.mu is locked.
func (s *Service) listenersOf(p *project) []guestapi.Listener {
	if w := s.watchers[p.sandbox.UID]; p.exists && w != nil {
		return w.listeners
	}
	return nil
}

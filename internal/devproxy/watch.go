package devproxy

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/reconcile"
)

// watcher follows the listeners of one running guest. Its fields but uid and vmid are
// guarded by Service.mu.
//
// There may be thousands. The guests of the maxHeld watchers that have changed last wait
// with their answers until something changes; the others answer at once, crowdRate of them
// in a second. No goroutine waits between two questions.
type watcher struct {
	project   string
	uid       string
	vmid      int
	listeners []guestapi.Listener
	problem   string // why they are not known

	changed time.Time                 // when it was found, or its listeners have changed
	held    bool                      // it is among the maxHeld watchers that changed last
	state   string                    // of the last answer
	pause   time.Duration             // until the next question, unless the crowd is large
	planned bool                      // the first question was planned
	next    reconcile.Entry[*watcher] // of the next question
	cancel  context.CancelFunc        // ends the current question; nil if there is none
}

// watch starts a watcher for the sandbox of p, unless there is one. s.mu is locked.
func (s *Service) watch(p *project) {
	if w := s.watchers[p.sandbox.UID]; w != nil {
		w.project = p.id // a session can begin to use a sandbox
		return
	}
	if !s.closed {
		w := &watcher{project: p.id, uid: p.sandbox.UID, vmid: p.sandbox.VMID, changed: s.cfg.Clock(), pause: minPause}
		w.next.Value = w
		s.watchers[w.uid] = w
	}
}

// plan selects the watchers that are held, and plans the first questions of new ones. s.mu
// is locked.
func (s *Service) plan(ctx context.Context) {
	all := slices.SortedFunc(maps.Values(s.watchers), func(a, b *watcher) int {
		return cmp.Or(b.changed.Compare(a.changed), cmp.Compare(b.vmid, a.vmid))
	})
	for i, w := range all {
		was := w.held
		w.held = i < s.maxHeld
		switch {
		case !w.planned:
			w.planned = true
			s.later(ctx, w, s.cfg.First+time.Second*time.Duration(max(0, i+1-s.maxHeld))/crowdRate)
		case w.held && !was && w.next.Queued():
			s.later(ctx, w, minPause)
		case !w.held && was && w.cancel != nil:
			w.cancel() // another one is held instead
		}
	}
}

// later asks the guest of w after a pause. s.mu is locked.
func (s *Service) later(ctx context.Context, w *watcher, pause time.Duration) {
	s.questions.Set(&w.next, time.Now().Add(pause))
	if s.questions.First() == &w.next {
		s.wait(ctx)
	}
}

// wait waits for the first question with the timer of all. s.mu is locked.
func (s *Service) wait(ctx context.Context) {
	first := s.questions.First()
	if first == nil {
		return
	}
	if s.timer == nil {
		s.timer = time.AfterFunc(time.Until(first.At()), func() { s.askDue(ctx) })
		return
	}
	s.timer.Reset(time.Until(first.At()))
}

// askDue asks the guests whose time has come.
func (s *Service) askDue(ctx context.Context) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for e, now := s.questions.First(), time.Now(); e != nil && !e.At().After(now); e = s.questions.First() {
		s.questions.Remove(e)
		if !s.closed {
			s.wg.Go(func() { s.ask(ctx, e.Value) })
		}
	}
	s.wait(ctx)
}

// ask asks a guest, and plans its next question. A guest that fails, or that answers at
// once each time, is asked less and less often.
func (s *Service) ask(parent context.Context, w *watcher) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || s.watchers[w.uid] != w {
		return
	}
	ctx, cancel := context.WithCancel(parent)
	defer cancel()
	w.cancel = cancel
	state, wait := w.state, time.Duration(0)
	if w.held && s.holding < s.maxHeld {
		wait = listWait
		s.holding++
		defer func() { s.holding-- }()
	}
	begun := time.Now()
	s.mu.Unlock()
	l, err := s.cfg.Sandboxes.Listeners(ctx, w.vmid, state, wait)
	s.mu.Lock()
	w.cancel = nil
	if s.closed || s.watchers[w.uid] != w {
		return
	}
	interrupted := ctx.Err() != nil // by plan
	if !interrupted {
		s.found(parent, w, l, err)
		w.state = l.State
	}
	switch {
	case interrupted:
		w.pause = minPause
	case err != nil:
		w.pause = min(2*w.pause, maxPause)
	case w.held && time.Since(begun) < quickAnswer:
		w.pause = min(w.pause*3/2, quickPause)
	default:
		w.pause = minPause
	}
	pause := w.pause
	if !w.held {
		pause = max(pause, time.Second*time.Duration(len(s.watchers))/crowdRate)
	}
	s.later(parent, w, pause)
}

// end ends a watcher. s.mu is locked.
func (s *Service) end(w *watcher) {
	s.questions.Remove(&w.next)
	if w.cancel != nil {
		w.cancel()
	}
}

// found records the answer of a guest. s.mu is locked.
func (s *Service) found(ctx context.Context, w *watcher, l guestapi.Listeners, err error) {
	if err != nil {
		if problem := agentlab.Reason(err.Error()); problem != w.problem {
			w.problem = problem
			s.log.Debug("the ports of a guest are not known", "vmid", w.vmid, "err", err)
		}
		return // it may be busy: what is known stays
	}
	problem, kept := "", l.Listeners[:min(len(l.Listeners), maxOfProject)]
	if len(kept) < len(l.Listeners) {
		problem = "only the lowest ports are served: the limit of a sandbox is reached"
	}
	w.problem = problem
	if slices.Equal(w.listeners, kept) {
		return
	}
	for _, old := range w.listeners {
		if !slices.ContainsFunc(kept, func(l guestapi.Listener) bool { return l.Port == old.Port }) {
			s.seen[seenKey{w.project, old.Port}] = s.cfg.Clock()
		}
	}
	w.listeners, w.changed = slices.Clone(kept), s.cfg.Clock()
	s.reconcile(ctx)
	s.kick() // the file is written without the lock
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

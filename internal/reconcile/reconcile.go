// Package reconcile is the loop of the services: it runs one idempotent step
// per key, never two at once for one key, when the key is woken, at the time
// that the last step requested, and with growing pauses after a failure.
//
// Keys can be in lanes. Each lane has its own workers, so that the steps of a lane that
// hang delay no step of another one.
//
// The loop has no important state. The rows that a step reads define the work;
// after a restart the owner wakes every key once and the steps continue from
// there.
package reconcile

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"
)

// ErrInterrupted is the cause of the context of a step that Interrupt
// cancelled. The step runs again and reads the change.
var ErrInterrupted = errors.New("interrupted: what was asked has changed")

// Config is the configuration of a Loop. Step is required.
type Config[K comparable] struct {
	// Step brings key closer to its desired state. It returns the time
	// until it must run again (0: not before it is woken), or an error to
	// run again after a pause.
	Step func(ctx context.Context, key K) (time.Duration, error)

	// Failed is called for each failed step, with the number of consecutive
	// failures; nil is allowed. It is not called for steps that Interrupt or
	// the end of the context of Run has cancelled.
	Failed func(key K, attempt int, err error)

	Workers    int           // steps at the same time in each lane; default 32
	MinBackoff time.Duration // pause after the first failure; default 200 ms
	MaxBackoff time.Duration // longest pause; default 30 s
}

// LogFailed returns a Failed that logs failed steps of what, with the key as the
// attribute named key: the first and every tenth consecutive failure as a warning, the
// others at debug level.
func LogFailed[K any](log *slog.Logger, what, key string) func(K, int, error) {
	return func(k K, attempt int, err error) {
		level := slog.LevelDebug
		if attempt == 1 || attempt%10 == 0 {
			level = slog.LevelWarn
		}
		log.Log(context.Background(), level, what+" step failed, will try again", key, k, "attempt", attempt, "err", err)
	}
}

// Loop runs steps. Its methods are safe for concurrent use.
type Loop[K comparable] struct {
	cfg  Config[K]
	kick chan struct{}

	mu      sync.Mutex
	entries map[K]*entry[K]
	lanes   map[K]string // of the keys that are not in lane ""
	queues  map[string]*lane[K]
	timers  Queue[*entry[K]]
}

// lane is the work of one lane.
type lane[K comparable] struct {
	ready   []*entry[K] // in the order in which they became ready
	running int
}

// entry is one key with something to do, now or later.
type entry[K comparable] struct {
	key      K
	attempts int // consecutive failures
	queued   bool
	running  bool
	dirty    bool // woken while running
	cut      bool // interrupted while running
	cancel   context.CancelCauseFunc
	next     Entry[*entry[K]] // in timers
	since    time.Time        // when it became ready to run; of a queued entry
}

// New returns a Loop that does nothing before Run.
func New[K comparable](cfg Config[K]) *Loop[K] {
	if cfg.Workers <= 0 {
		cfg.Workers = 32
	}
	if cfg.MinBackoff <= 0 {
		cfg.MinBackoff = 200 * time.Millisecond
	}
	if cfg.MaxBackoff <= 0 {
		cfg.MaxBackoff = 30 * time.Second
	}
	return &Loop[K]{cfg: cfg, kick: make(chan struct{}, 1), entries: map[K]*entry[K]{}, lanes: map[K]string{}, queues: map[string]*lane[K]{}}
}

// Assign puts key into a lane, from its next step on, until Forget. It returns false if key
// is in that lane already. Keys start in lane "". A step that finds its key in the wrong lane
// assigns it, wakes it and returns.
func (l *Loop[K]) Assign(key K, lane string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.lanes[key] == lane {
		return false
	}
	l.lanes[key] = lane
	return true
}

// Forget puts key into lane "" again. The owner calls it when the key no longer exists.
func (l *Loop[K]) Forget(key K) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.lanes, key)
}

// Wake runs key's step soon; if it is running, once more afterwards.
func (l *Loop[K]) Wake(key K) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.entry(key)
	if e.running {
		e.dirty = true
		return
	}
	l.enqueue(e)
}

// Interrupt cancels a running step of key, with ErrInterrupted as the cause,
// and then does the same as Wake.
func (l *Loop[K]) Interrupt(key K) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.entry(key)
	if e.running {
		e.dirty, e.cut = true, true
		e.cancel(ErrInterrupted)
		return
	}
	l.enqueue(e)
}

// Stats is what a Loop has to do at one moment.
type Stats struct {
	Ready   int           // keys whose step can run and waits for a worker
	Running int           // keys whose step runs
	Delayed int           // keys whose step runs later, also after a failure
	Failing int           // keys whose last step failed
	Lag     time.Duration // how long the first of the ready keys of a lane has waited, the longest; 0 if there is none
}

// Stats returns what the loop has to do now. Its cost grows with the number of
// keys that have something to do.
func (l *Loop[K]) Stats() Stats {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := Stats{Delayed: l.timers.Len()}
	for _, q := range l.queues {
		s.Ready += len(q.ready)
		s.Running += q.running
		if len(q.ready) > 0 {
			s.Lag = max(s.Lag, time.Since(q.ready[0].since))
		}
	}
	for _, e := range l.entries {
		if e.attempts > 0 {
			s.Failing++
		}
	}
	return s
}

// Run runs steps until ctx ends, then waits for running ones. It may be called
// once.
func (l *Loop[K]) Run(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		next := l.dispatch(ctx, &wg)
		timer.Reset(next)
		select {
		case <-ctx.Done():
			return
		case <-l.kick:
		case <-timer.C:
		}
	}
}

// dispatch starts ready steps and returns the time until the next one is
// ready.
func (l *Loop[K]) dispatch(ctx context.Context, wg *sync.WaitGroup) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	for t := l.timers.First(); t != nil && !t.At().After(now); t = l.timers.First() {
		l.enqueue(t.Value)
	}
	for name, q := range l.queues {
		for len(q.ready) > 0 && q.running < l.cfg.Workers && ctx.Err() == nil {
			e := q.ready[0]
			q.ready[0] = nil
			q.ready = q.ready[1:]
			e.queued, e.running = false, true
			q.running++
			sctx, cancel := context.WithCancelCause(ctx)
			e.cancel = cancel
			wg.Go(func() { l.step(sctx, e, q) })
		}
		if len(q.ready) == 0 && q.running == 0 {
			delete(l.queues, name)
		}
	}
	if t := l.timers.First(); t != nil {
		return t.At().Sub(now)
	}
	return time.Hour
}

func (l *Loop[K]) step(ctx context.Context, e *entry[K], of *lane[K]) {
	after, err := l.cfg.Step(ctx, e.key)
	ended := ctx.Err() != nil
	e.cancel(nil)

	l.mu.Lock()
	failed := err != nil && !e.cut
	if failed {
		e.attempts++
		after = l.backoff(e.attempts)
	} else if err == nil {
		e.attempts = 0
	}
	attempt := e.attempts
	l.mu.Unlock()
	if failed && !ended && l.cfg.Failed != nil {
		l.cfg.Failed(e.key, attempt, err)
	}

	l.mu.Lock()
	defer l.mu.Unlock()
	of.running--
	e.running, e.cut, e.cancel = false, false, nil
	switch {
	case e.dirty:
		e.dirty = false
		l.enqueue(e)
	case after > 0 && !e.queued:
		l.timers.Set(&e.next, time.Now().Add(after))
	case !e.queued:
		delete(l.entries, e.key)
	}
	l.signal()
}

// backoff returns the pause after n consecutive failures: doubled each time,
// up to the maximum, minus a random part of up to a quarter, so that many keys
// do not run again at once.
func (l *Loop[K]) backoff(n int) time.Duration {
	d := l.cfg.MinBackoff << min(n-1, 20)
	if d <= 0 || d > l.cfg.MaxBackoff {
		d = l.cfg.MaxBackoff
	}
	return d - rand.N(d/4+1)
}

func (l *Loop[K]) entry(key K) *entry[K] {
	e := l.entries[key]
	if e == nil {
		e = &entry[K]{key: key}
		e.next.Value = e
		l.entries[key] = e
	}
	return e
}

func (l *Loop[K]) enqueue(e *entry[K]) {
	l.timers.Remove(&e.next)
	if !e.queued {
		e.queued, e.since = true, time.Now()
		name := l.lanes[e.key]
		if l.queues[name] == nil {
			l.queues[name] = &lane[K]{}
		}
		q := l.queues[name]
		q.ready = append(q.ready, e)
	}
	l.signal()
}

func (l *Loop[K]) signal() {
	select {
	case l.kick <- struct{}{}:
	default:
	}
}

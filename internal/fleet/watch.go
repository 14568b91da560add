package fleet

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// Observer observes the calls of drivers; *metrics.Set implements it.
type Observer interface {
	// Backends is called once, with the names of all backends.
	Backends(names []string)

	// BackendCalled observes one call of a method of the backend with that name: how long
	// it took, and its error.
	BackendCalled(name string, took time.Duration, err error)
}

// downAfter is how many lists in a row a backend may fail to return until it is down. One
// that it does not return in time is enough.
const downAfter = 2

// Longest durations of calls. A driver that hangs returns when the context of its call
// ends (package backend), so that no call holds a worker without limit.
const (
	askLimit    = 3 * time.Minute // of a call that only reads
	changeLimit = 15 * time.Minute
	copyLimit   = 24 * time.Hour // of a call that copies or deletes a disk or memory of any size
)

// watch bounds the calls of a backend, and knows whether it answers. The lists of all that a
// backend has decide that: services read them at intervals, and they do not depend on one
// VM, which a guest may have broken.
type watch struct {
	name     string
	observer Observer // nil means none

	mu     sync.Mutex
	failed int       // lists in a row that it did not return
	since  time.Time // the first of them
	last   error     // of the last of them
}

// down returns nil if the backend answers, as far as is known. Otherwise the error has code
// unavailable and says since when it does not, and why.
func (w *watch) down() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.failed < downAfter {
		return nil
	}
	return agentlab.Errorf(agentlab.CodeUnavailable, "backend %s has not answered since %s: %w", w.name, w.since.UTC().Format("2006-01-02 15:04:05 UTC"), w.last).
		WithHint("see 'agentlab doctor'; what is on the backend continues when it answers again")
}

// listed records the result of a list.
func (w *watch) listed(begin time.Time, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err == nil {
		w.failed, w.last = 0, nil
		return
	}
	if w.failed == 0 {
		w.since = begin
	}
	w.failed++
	if time.Since(begin) >= askLimit {
		w.failed = max(w.failed, downAfter)
	}
	w.last = err
}

// bound calls a method with a context that ends after limit.
func bound[T any](ctx context.Context, w *watch, method string, limit time.Duration, late agentlab.Code, call func(context.Context) (T, error)) (T, error) {
	begin := time.Now()
	inner, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	out, err := call(inner)
	if err != nil && inner.Err() != nil && ctx.Err() == nil {
		err = agentlab.Errorf(late, "backend %s did not answer within %s (%s): %w", w.name, limit, method, err)
	}
	if w.observer != nil && ctx.Err() == nil {
		w.observer.BackendCalled(w.name, time.Since(begin), err)
	}
	return out, err
}

// list calls a method that returns all objects of a kind. It is called although the backend
// is down: its answer ends that.
func list[T any](ctx context.Context, w *watch, method string, call func(context.Context) (T, error)) (T, error) {
	begin := time.Now()
	out, err := bound(ctx, w, method, askLimit, agentlab.CodeUnavailable, call)
	if ctx.Err() == nil {
		w.listed(begin, err)
	}
	return out, err
}

// ask calls a method that changes nothing, unless the backend is down.
func ask[T any](ctx context.Context, w *watch, method string, call func(context.Context) (T, error)) (T, error) {
	if err := w.down(); err != nil {
		var none T
		return none, err
	}
	return bound(ctx, w, method, askLimit, agentlab.CodeUnavailable, call)
}

// check is ask for a method that returns only an error.
func check(ctx context.Context, w *watch, method string, call func(context.Context) error) error {
	_, err := ask(ctx, w, method, func(ctx context.Context) (struct{}, error) { return struct{}{}, call(ctx) })
	return err
}

// change calls a method that changes something, unless the backend is down.
func change(ctx context.Context, w *watch, method string, limit time.Duration, call func(context.Context) error) error {
	if err := w.down(); err != nil {
		return err
	}
	return curb(ctx, w, method, limit, call)
}

// curb calls a method that limits what a guest can do, or ends it. It is called although the
// backend is down: the part that this sandbox needs may work.
func curb(ctx context.Context, w *watch, method string, limit time.Duration, call func(context.Context) error) error {
	_, err := bound(ctx, w, method, limit, agentlab.CodeUnknownOutcome, func(ctx context.Context) (struct{}, error) { return struct{}{}, call(ctx) })
	return err
}

// copying is change for a method that copies, and returns the result.
func copying[T any](ctx context.Context, w *watch, method string, call func(context.Context) (T, error)) (out T, _ error) {
	err := change(ctx, w, method, copyLimit, func(ctx context.Context) (err error) {
		out, err = call(ctx)
		return err
	})
	return out, err
}

// Finding returns a finding if the backend does not answer.
func (b *Backend) Finding() (backend.Finding, bool) {
	err := b.Down()
	if err == nil {
		return backend.Finding{}, false
	}
	return backend.Finding{
		Name: "answers", Level: backend.LevelError, Detail: fmt.Sprint(err),
		Remedy: "repair the backend, or the connection to it; its sandboxes continue when it answers",
	}, true
}

// Down returns nil if the backend answers, as far as is known. Otherwise the error has code
// unavailable and says since when it does not, and why.
func (b *Backend) Down() error {
	if b.watch == nil {
		return nil
	}
	return b.watch.down()
}

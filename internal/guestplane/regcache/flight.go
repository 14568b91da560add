package regcache

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strconv"
	"sync"

	"github.com/agentlab-vm/agentlab/internal/guestplane/outside"
)

// flight is one download of an object that will be stored. Guests that want the same
// object share it: they read from its file while it is written.
type flight struct {
	cancel context.CancelFunc
	most   int64 // maximum size of the content

	mu      sync.Mutex
	changed chan struct{} // closed at the next change
	readers int           // -1: the last one has left
	draft   *draft        // nil until the answer is known
	size    int64         // of the content; -1: not known
	written int64
	ended   bool
	err     error // why it is not complete, if it has ended
}

// errDirect is the error of a download that cannot be stored or shared. Each guest
// continues it with a download of its own.
var errDirect = errors.New("the object cannot be stored")

// fly joins the download of an object, or starts one for a guest. The caller must leave
// it.
func (s *Service) fly(g *outside.Guest, t *target) (f *flight, joined bool) {
	full := string(t.kind) + "/" + t.name() + " " + t.url.String() + " " + t.digest.String()
	s.mu.Lock()
	defer s.mu.Unlock()
	if f = s.flights[full]; f != nil && f.join() {
		return f, true
	}
	ctx, cancel := context.WithCancel(context.Background())
	f = &flight{cancel: cancel, most: s.cfg.Limits.Object, changed: make(chan struct{}), readers: 1}
	s.flights[full] = f
	s.running.Go(func() {
		defer cancel()
		err := s.download(ctx, g, t, f)
		if err != nil && !errors.Is(err, errDirect) && ctx.Err() == nil {
			s.log.Warn("a download of the registry cache failed", "kind", t.kind, "url", t.url.String(), "err", err)
		}
		s.mu.Lock()
		if s.flights[full] == f {
			delete(s.flights, full)
		}
		s.mu.Unlock()
		f.update(func() { f.ended, f.err = true, err })
	})
	return f, false
}

// join adds a reader. It returns false if the last one has left.
func (f *flight) join() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.readers > 0 {
		f.readers++
	}
	return f.readers > 0
}

// leave removes a reader. Without readers the download is cancelled.
func (f *flight) leave() {
	f.update(func() {
		if f.readers--; f.readers == 0 {
			f.readers = -1
			f.cancel()
		}
	})
}

// update changes the state. It closes the file if neither the download nor a reader
// uses it.
func (f *flight) update(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
	close(f.changed)
	f.changed = make(chan struct{})
	if f.ended && f.readers < 0 && f.draft != nil {
		_ = f.draft.file.Close()
	}
}

// wait waits until ready, which is called with the lock, returns true. It returns the
// error of the download.
func (f *flight) wait(ctx context.Context, ready func() bool) error {
	for {
		f.mu.Lock()
		ok, err, changed := ready(), f.err, f.changed
		f.mu.Unlock()
		if ok || err != nil {
			return err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// send sends a download to a guest whose policy allows all servers that it came from.
func (f *flight) send(ctx context.Context, g *outside.Guest, t *target, w *writer) error {
	if err := f.wait(ctx, func() bool { return f.draft != nil }); err != nil {
		return err
	}
	if err := permitVia(ctx, g, t, f.draft.meta.Via); err != nil {
		return err
	}
	w.describe(t, f.draft.meta)
	if f.size >= 0 {
		w.Header().Set("Content-Length", strconv.FormatInt(f.size, 10))
	}
	for {
		var more int64
		err := f.wait(ctx, func() bool {
			more = f.written - w.sent
			return more > 0 || f.ended
		})
		if err == nil && more > 0 {
			_, err = io.Copy(struct{ io.Writer }{w}, io.NewSectionReader(f.draft.file, f.draft.off+w.sent, more))
		}
		if err != nil || more == 0 {
			return err
		}
	}
}

// download performs a flight.
func (s *Service) download(ctx context.Context, g *outside.Guest, t *target, f *flight) error {
	select {
	case s.slots <- struct{}{}:
		defer func() { <-s.slots }()
	case <-ctx.Done():
		return ctx.Err()
	}
	resp, via, err := s.fetch(ctx, g, t, http.MethodGet, http.Header{"Accept-Encoding": {"identity"}}) // the digest is of the file without an encoding
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.ContentLength > s.cfg.Limits.Object {
		return errDirect
	}
	d, err := s.store.create(metaOf(t, resp, via))
	if err != nil {
		s.log.Warn("an object of the registry cache is not stored", "err", err)
		return errDirect
	}
	f.update(func() { f.draft, f.size = d, resp.ContentLength })
	body := io.TeeReader(resp.Body, counter{s})
	if _, err = io.Copy(f, &verifier{r: body, sum: t.digest.hash(), want: t.digest}); err != nil {
		d.drop()
		return err
	}
	d.size = f.written
	if err := d.keep(t.kind, t.name()); err != nil { // the readers have it, and the next request downloads it again
		s.log.Warn("an object of the registry cache is not stored", "err", err)
	}
	return nil
}

// Write implements io.Writer. It appends to the draft.
func (f *flight) Write(p []byte) (int, error) {
	if f.written+int64(len(p)) > f.most || f.draft.st.space.Keep() != nil {
		return 0, errDirect
	}
	if _, err := f.draft.file.WriteAt(p, f.draft.off+f.written); err != nil {
		return 0, errDirect
	}
	f.update(func() { f.written += int64(len(p)) })
	return len(p), nil
}

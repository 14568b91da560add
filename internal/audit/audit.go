// Package audit keeps the record of what guests wanted from the network.
//
// Enforcers decide and write a bounded log of their own; this service takes
// the log of each sandbox over into the database, where it outlives the
// sandbox. It reads by cursor, and cursor and records are one transaction: a
// crash anywhere, or a log that is read twice, neither loses nor repeats one.
// It never stands between a guest and the network, nor does it hold up a
// sandbox's end for longer than Limits.Drain.
//
// What comes from an enforcer holds text that a guest chose. It is checked
// and made plain before it is stored (see clean).
package audit

import (
	"cmp"
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// Store is what the service needs of the database. The semantics are those of
// package store.
type Store interface {
	Sandboxes(ctx context.Context, f agentlab.SandboxFilter) ([]agentlab.Sandbox, error)
	Job(ctx context.Context, id string) (agentlab.Job, error)
	EgressCursor(ctx context.Context, vmid int, uid string) (int64, error)
	AddEgress(ctx context.Context, recs []agentlab.EgressEntry, limit int) (int, error)
	Egress(ctx context.Context, f agentlab.EgressFilter) ([]agentlab.EgressEntry, error)
	EgressSummary(ctx context.Context, f agentlab.EgressFilter, targets int) (agentlab.EgressSummary, error)
}

// Limits bound the work. Zero fields take the default.
type Limits struct {
	Rows    int           // entries per sandbox of what was allowed, and as many of what was refused; default 5000
	Every   time.Duration // between two looks at a sandbox's log; default 1 s
	Idle    time.Duration // the same for one whose log does not grow; default 8 s
	Watched time.Duration // the same for one that is followed; default 300 ms
	Call    time.Duration // for one look; default 5 s
	Refresh time.Duration // for the look that a list begins with; default 2 s
	Drain   time.Duration // for what is left when a sandbox is destroyed; default 5 s
}

func (l Limits) withDefaults() Limits {
	def := func(d *time.Duration, v time.Duration) {
		if *d <= 0 {
			*d = v
		}
	}
	if l.Rows < 2 {
		l.Rows = 5000
	}
	def(&l.Every, time.Second)
	def(&l.Idle, 8*time.Second)
	def(&l.Watched, 300*time.Millisecond)
	def(&l.Call, 5*time.Second)
	def(&l.Refresh, 2*time.Second)
	def(&l.Drain, 5*time.Second)
	return l
}

// Redactor removes secrets from text, because a program may ask for a name that
// contains one; *bootstrap.Service implements it.
type Redactor interface {
	// RedactFunc is for the secrets of a job, or of the sandbox with that UID
	// that has no job.
	RedactFunc(ctx context.Context, id string) func(text string) string
}

// Config is what a Service needs.
type Config struct {
	Store    Store
	Log      backend.EgressLogger // nil: the backend records nothing
	Limits   Limits
	Redactor Redactor         // nil: nothing is redacted
	Clock    func() time.Time // nil means time.Now
	Logger   *slog.Logger     // nil means none
}

// Service is the audit service. Its methods may be called from any goroutine.
type Service struct {
	cfg   Config
	lim   Limits
	clock func() time.Time
	log   *slog.Logger
	wake  chan struct{}

	mu       sync.Mutex
	sources  map[int]*source
	changed  chan struct{}                   // closed at the next commit
	watchers map[*agentlab.EgressFilter]bool // what is followed
}

// source is the log of one sandbox. Nothing in it matters: a new process
// reads the cursor from the database.
type source struct {
	readLock chan struct{} // holds a value while the log is being read

	// Below the service's lock.
	sb       agentlab.Sandbox
	due      time.Time
	pause    time.Duration // grows while nothing comes
	failures int

	// Below readLock.
	cursor int64
	known  bool // cursor was read
}

// New returns a Service; Run makes it work.
func New(cfg Config) *Service {
	s := &Service{
		cfg: cfg, lim: cfg.Limits.withDefaults(), clock: cfg.Clock, log: cfg.Logger,
		wake: make(chan struct{}, 1), sources: map[int]*source{}, watchers: map[*agentlab.EgressFilter]bool{}, changed: make(chan struct{}),
	}
	if s.clock == nil {
		s.clock = time.Now
	}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	return s
}

// Run takes logs over until ctx ends.
func (s *Service) Run(ctx context.Context) error {
	if s.cfg.Log == nil {
		<-ctx.Done()
		return nil
	}
	rows, err := s.cfg.Store.Sandboxes(ctx, agentlab.SandboxFilter{})
	if err != nil {
		return ignoreCanceled(ctx, err)
	}
	for _, sb := range rows {
		s.SandboxChanged(sb)
	}
	for {
		due, next := s.due()
		s.read(ctx, due)
		t := time.NewTimer(next)
		select {
		case <-t.C:
		case <-s.wake:
		case <-ctx.Done():
			t.Stop()
			return nil
		}
		t.Stop()
	}
}

// ignoreCanceled returns err, or nil when ctx has ended: that is no error of Run.
func ignoreCanceled(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		err = nil
	}
	return err
}

// SandboxChanged handles a sandbox that is new or has changed. The daemon calls
// it after the commit.
func (s *Service) SandboxChanged(sb agentlab.Sandbox) {
	if s.cfg.Log == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	src := s.sources[sb.VMID]
	switch {
	case sb.State == agentlab.SandboxDestroyed:
		delete(s.sources, sb.VMID)
		return
	case sb.State == agentlab.SandboxRequested || sb.State == agentlab.SandboxProvisioning:
		return // there is no log yet
	case src == nil || src.sb.UID != sb.UID:
		src = &source{readLock: make(chan struct{}, 1)}
		s.sources[sb.VMID] = src
	case src.sb.State == sb.State:
		src.sb = sb
		return
	}
	src.sb, src.due, src.pause = sb, time.Time{}, 0
	s.wakeRun()
}

// wakeRun makes Run look at once.
func (s *Service) wakeRun() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// Watch makes the service look more often at the sandboxes that f selects,
// until stop is called.
func (s *Service) Watch(f agentlab.EgressFilter) (stop func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.watchers[&f] = true
	for _, src := range s.sources {
		if src.in(f) {
			src.due, src.pause = time.Time{}, 0
		}
	}
	s.wakeRun()
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.watchers, &f)
	}
}

// in reports whether f selects records of the source.
func (src *source) in(f agentlab.EgressFilter) bool {
	return (f.VMID == 0 || f.VMID == src.sb.VMID) && (f.JobID == "" || f.JobID == src.sb.JobID)
}

// Changed returns a channel that is closed when entries come that are not in
// the record yet.
func (s *Service) Changed() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.changed
}

// due returns the sources to be read now, and how long until the next one is.
func (s *Service) due() (now []*source, next time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.clock()
	next = s.lim.Idle
	for _, src := range s.sources {
		if wait := src.due.Sub(t); wait > 0 {
			next = min(next, wait)
			continue
		}
		now = append(now, src)
		next = min(next, s.interval(src))
		src.due = t.Add(s.interval(src))
	}
	return now, next
}

func (s *Service) interval(src *source) time.Duration {
	for f := range s.watchers {
		if src.in(*f) {
			return s.lim.Watched
		}
	}
	return max(src.pause, s.lim.Every)
}

// Drain takes over what is left of a sandbox's log. Its VM should be off. It
// returns after Limits.Drain at the latest; an error says that something may
// be left.
func (s *Service) Drain(ctx context.Context, sb agentlab.Sandbox) error {
	if s.cfg.Log == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, s.lim.Drain)
	defer cancel()
	s.mu.Lock()
	src := s.sources[sb.VMID]
	if src == nil || src.sb.UID != sb.UID {
		src = &source{readLock: make(chan struct{}, 1), sb: sb}
	}
	s.mu.Unlock()
	for {
		full, err := s.readOne(ctx, src)
		if err != nil || !full {
			return err
		}
	}
}

// List lists entries by rising id, with what has happened just now.
func (s *Service) List(ctx context.Context, f agentlab.EgressFilter) ([]agentlab.EgressEntry, error) {
	if f.Tail || f.AfterID == 0 {
		s.refresh(ctx, f)
	}
	return s.cfg.Store.Egress(ctx, f)
}

// Summary sums up what f selects, with what has happened just now; at most
// targets refused ones are named.
func (s *Service) Summary(ctx context.Context, f agentlab.EgressFilter, targets int) (agentlab.EgressSummary, error) {
	s.refresh(ctx, f)
	return s.cfg.Store.EgressSummary(ctx, f, targets)
}

// refresh reads the logs that f is about. What fails or takes long is left to
// Run.
func (s *Service) refresh(ctx context.Context, f agentlab.EgressFilter) {
	ctx, cancel := context.WithTimeout(ctx, s.lim.Refresh)
	defer cancel()
	s.mu.Lock()
	var about []*source
	for _, src := range s.sources {
		if src.in(f) {
			about = append(about, src)
		}
	}
	s.mu.Unlock()
	s.read(ctx, about)
}

// parallel is how many logs are read at the same time.
const parallel = 8

// read reads some logs once.
func (s *Service) read(ctx context.Context, sources []*source) {
	var wg sync.WaitGroup
	slots := make(chan struct{}, parallel)
	for _, src := range sources {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			full, err := s.readOne(ctx, src)
			s.recordResult(ctx, src, full, err)
		})
	}
	wg.Wait()
}

// recordResult notes how a look went, for the next one.
func (s *Service) recordResult(ctx context.Context, src *source, full bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case err != nil:
		if ctx.Err() != nil || agentlab.CodeOf(err) == agentlab.CodeNotFound {
			break
		}
		src.pause = s.lim.Idle
		if src.failures++; src.failures == 1 || src.failures%100 == 0 {
			s.log.Warn("what a sandbox does on the network is not recorded at the moment", "vmid", src.sb.VMID, "attempt", src.failures, "err", err)
		}
		return
	case full:
		src.failures, src.due = 0, time.Time{}
		s.wakeRun()
		return
	}
	src.failures = 0
	if !src.sb.State.HasVM() && ctx.Err() == nil { // nothing more will come
		if s.sources[src.sb.VMID] == src {
			delete(s.sources, src.sb.VMID)
		}
	}
}

// page is how many records are read at a time.
const page = 500

// readOne reads one page of one log. full tells that there may be more.
func (s *Service) readOne(ctx context.Context, src *source) (full bool, err error) {
	select {
	case src.readLock <- struct{}{}:
		defer func() { <-src.readLock }()
	case <-ctx.Done():
		return false, ctx.Err()
	}
	s.mu.Lock()
	sb := src.sb
	s.mu.Unlock()
	if !src.known {
		if src.cursor, err = s.cfg.Store.EgressCursor(ctx, sb.VMID, sb.UID); err != nil {
			return false, err
		}
		src.known = true
	}
	call, cancel := context.WithTimeout(ctx, s.lim.Call)
	recs, err := s.cfg.Log.EgressLog(call, backend.RefOf(sb), src.cursor, page)
	cancel()
	if err != nil {
		return false, err
	}
	entries := s.entries(ctx, sb, src.cursor, recs)
	added, err := s.cfg.Store.AddEgress(ctx, entries, s.lim.Rows)
	if err != nil {
		return false, err
	}
	if len(entries) > 0 {
		src.cursor = entries[len(entries)-1].Seq
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if added > 0 {
		src.pause = 0
		close(s.changed)
		s.changed = make(chan struct{})
	} else {
		src.pause = min(max(2*src.pause, s.lim.Every), s.lim.Idle)
	}
	return len(entries) > 0 && len(recs) >= page, nil
}

// entries makes records fit to be stored. What is not in order is left out.
func (s *Service) entries(ctx context.Context, sb agentlab.Sandbox, after int64, recs []agentlab.EgressRecord) []agentlab.EgressEntry {
	if len(recs) == 0 {
		return nil
	}
	var ended time.Time // of the job; what a kept sandbox does later is not its doing
	if sb.JobID != "" {
		if j, err := s.cfg.Store.Job(ctx, sb.JobID); err == nil && j.Status.Final() {
			ended = j.FinishedAt
		}
	}
	redact := func(text string) string { return text }
	if s.cfg.Redactor != nil {
		redact = s.cfg.Redactor.RedactFunc(ctx, cmp.Or(sb.JobID, sb.UID))
	}
	now := s.clock()
	out := make([]agentlab.EgressEntry, 0, len(recs))
	for _, r := range recs {
		if r.Seq <= after {
			continue
		}
		after = r.Seq
		r.Name, r.Error = redact(r.Name), redact(r.Error)
		e := agentlab.EgressEntry{UID: sb.UID, JobID: sb.JobID, EgressRecord: clean(r, sb.VMID, now)}
		if !ended.IsZero() && e.Time.After(ended) {
			e.JobID = ""
		}
		out = append(out, e)
	}
	return slices.Clip(out)
}

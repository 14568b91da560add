// Package audit stores the egress decisions about guests.
//
// Enforcers decide and write a log of limited size; this service copies the
// log of each sandbox to the database, where it is kept after the sandbox is
// destroyed. It reads by cursor, and cursor and records are written in one
// transaction, so that no record is lost or duplicated after a crash or a
// repeated read. It never delays a guest's traffic, and delays the end of a
// sandbox by at most Limits.Drain.
//
// Records of an enforcer contain text from a guest. The text is checked and
// sanitised before it is stored (see clean).
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
	"github.com/agentlab-vm/agentlab/internal/lock"
	"github.com/agentlab-vm/agentlab/internal/reconcile"
)

// Store is the part of the database that the service uses. Its semantics are
// those of package store.
type Store interface {
	Sandboxes(ctx context.Context, f agentlab.SandboxFilter) ([]agentlab.Sandbox, error)
	Job(ctx context.Context, id string) (agentlab.Job, error)
	EgressCursor(ctx context.Context, vmid int, uid string) (int64, error)
	AddEgress(ctx context.Context, recs []agentlab.EgressEntry, limit int) (int, error)
	Egress(ctx context.Context, f agentlab.EgressFilter) ([]agentlab.EgressEntry, error)
	EgressSummary(ctx context.Context, f agentlab.EgressFilter, targets int) (agentlab.EgressSummary, error)
	// Subscribe calls fn after each commit.
	Subscribe(fn func(agentlab.Commit))
}

// Limits are the limits on the work. Zero means the default.
type Limits struct {
	Rows    int           // entries per sandbox of allowed decisions, and as many of denied ones; default 5000
	Every   time.Duration // interval of reads of a sandbox's log; default 1 s
	Idle    time.Duration // the same for a log that does not grow, unless there are more than idleRate for each second of it; default 8 s
	Watched time.Duration // the same for one that is followed; default 300 ms
	Call    time.Duration // time limit of one read; default 5 s
	Refresh time.Duration // time limit of the read before a list; default 2 s
	Drain   time.Duration // time limit of the last read before a sandbox is destroyed; default 5 s
}

func (l Limits) withDefaults() Limits {
	if l.Rows < 2 {
		l.Rows = 5000
	}
	l.Every = cmp.Or(l.Every, time.Second)
	l.Idle = cmp.Or(l.Idle, 8*time.Second)
	l.Watched = cmp.Or(l.Watched, 300*time.Millisecond)
	l.Call = cmp.Or(l.Call, 5*time.Second)
	l.Refresh = cmp.Or(l.Refresh, 2*time.Second)
	l.Drain = cmp.Or(l.Drain, 5*time.Second)
	return l
}

// Redactor removes secrets from text, because a program may ask for a name that
// contains one; *bootstrap.Service implements it.
type Redactor interface {
	// RedactFunc returns a function that redacts the secrets of a job, or of
	// a sandbox without a job, by its UID.
	RedactFunc(ctx context.Context, id string) func(text string) string
}

// Log has the egress logs of the backends; *fleet.Fleet implements it.
type Log interface {
	// Logs reports whether the backend with that name has egress logs.
	Logs(backend string) bool
	// EgressLog reads the log of a sandbox; see backend.Net.
	EgressLog(ctx context.Context, backend string, ref backend.Ref, after int64, limit int) ([]agentlab.EgressRecord, error)
}

// Config is the configuration of a Service.
type Config struct {
	Store    Store
	Log      Log
	Limits   Limits
	Redactor Redactor         // nil means that nothing is redacted
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
	reads lock.Keyed[*source] // held while a log is being read

	mu       sync.Mutex
	sources  map[int]*source
	queue    reconcile.Queue[*source]        // all sources, by the time of the next read
	changed  chan struct{}                   // closed after the next commit
	watchers map[*agentlab.EgressFilter]bool // filters of following clients
}

// source is the log of one sandbox. Nothing in it must survive: a new process
// reads the cursor from the database.
type source struct {
	// Guarded by the service's lock.
	sb       subject
	next     reconcile.Entry[*source]
	pause    time.Duration // grows while there are no new records
	failures int

	// Guarded by its key of Service.reads.
	cursor int64
	known  bool // cursor was read
}

// subject is what the service must know of a sandbox. There are thousands.
type subject struct {
	on    string // its backend
	ref   backend.Ref
	vmid  int
	jobID string
	state agentlab.SandboxState
}

func subjectOf(sb agentlab.Sandbox) subject {
	return subject{on: sb.Backend, ref: backend.RefOf(sb), vmid: sb.VMID, jobID: sb.JobID, state: sb.State}
}

// New returns a Service. Call Run to start it.
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
	cfg.Store.Subscribe(s.Committed)
	return s
}

// Run copies logs until ctx ends.
func (s *Service) Run(ctx context.Context) error {
	for f := (agentlab.SandboxFilter{Limit: page}); ; {
		rows, err := s.cfg.Store.Sandboxes(ctx, f)
		if err != nil {
			return ignoreCanceled(ctx, err)
		}
		for _, sb := range rows {
			s.sandboxChanged(sb)
			f.AfterVMID = sb.VMID
		}
		if len(rows) < page {
			break
		}
	}
	for {
		due, next := s.due()
		s.read(ctx, due)
		select {
		case <-time.After(next):
		case <-s.wake:
		case <-ctx.Done():
			return nil
		}
	}
}

// ignoreCanceled returns err, or nil if ctx has ended, because that is not an
// error of Run.
func ignoreCanceled(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		err = nil
	}
	return err
}

// Committed handles the sandboxes of a commit. The store calls it.
func (s *Service) Committed(c agentlab.Commit) {
	for _, sb := range c.Sandboxes {
		s.sandboxChanged(sb)
	}
}

// sandboxChanged handles a sandbox that is new or has changed.
func (s *Service) sandboxChanged(sb agentlab.Sandbox) {
	if !s.cfg.Log.Logs(sb.Backend) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	src := s.sources[sb.VMID]
	switch {
	case sb.State == agentlab.SandboxDestroyed:
		s.remove(src)
		return
	case sb.Pooled() || sb.State == agentlab.SandboxRequested || sb.State == agentlab.SandboxProvisioning:
		return // there is no log yet
	case src == nil || src.sb.ref.UID != sb.UID:
		s.remove(src)
		src = &source{}
		src.next.Value = src
		s.sources[sb.VMID] = src
	case src.sb.state == sb.State:
		src.sb = subjectOf(sb)
		return
	}
	src.sb = subjectOf(sb)
	s.readSoon(src)
	s.wakeRun()
}

// readSoon makes Run read a log when it is awake. The caller holds mu.
func (s *Service) readSoon(src *source) {
	src.pause = 0
	s.queue.Set(&src.next, time.Time{})
}

// remove forgets a source; nil is none. The caller holds mu.
func (s *Service) remove(src *source) {
	if src != nil && s.sources[src.sb.vmid] == src {
		delete(s.sources, src.sb.vmid)
		s.queue.Remove(&src.next)
	}
}

// wakeRun makes Run read the log at once.
func (s *Service) wakeRun() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// Watch makes the service read the logs of the sandboxes that f selects more
// often, until stop is called.
func (s *Service) Watch(f agentlab.EgressFilter) (stop func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.watchers[&f] = true
	for _, src := range s.sources {
		if src.in(f) {
			s.readSoon(src)
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
	return (f.VMID == 0 || f.VMID == src.sb.vmid) && (f.JobID == "" || f.JobID == src.sb.jobID)
}

// Changed returns a channel that is closed after the next entries are stored.
func (s *Service) Changed() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.changed
}

// readPause is the minimum time between two reads of logs, unless a sandbox changes: of
// thousands, one is due at nearly any time.
const readPause = 100 * time.Millisecond

// idleRate is how many logs that do not grow are read in a second, if there are thousands.
const idleRate = 50

// idle returns the interval of reads of a log that does not grow. The caller holds mu.
func (s *Service) idle() time.Duration {
	return max(s.lim.Idle, time.Duration(len(s.sources))*time.Second/idleRate)
}

// due returns the sources to read now, and the time until the next one is due, but at
// least readPause, and longer if there are thousands.
func (s *Service) due() (now []*source, next time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.clock()
	first := s.queue.First()
	for ; first != nil && !first.At().After(t); first = s.queue.First() {
		src := first.Value
		now = append(now, src)
		s.queue.Set(first, t.Add(max(s.interval(src), time.Millisecond)))
	}
	next = s.lim.Idle
	if first != nil {
		next = min(next, first.At().Sub(t))
	}
	return now, max(next, readPause, time.Duration(len(s.sources))*readPause/1000)
}

func (s *Service) interval(src *source) time.Duration {
	for f := range s.watchers {
		if src.in(*f) {
			return s.lim.Watched
		}
	}
	return max(src.pause, s.lim.Every)
}

// Drain copies the rest of a sandbox's log. Its VM should be off. It returns
// after Limits.Drain at the latest; after an error some records may be
// missing.
func (s *Service) Drain(ctx context.Context, sb agentlab.Sandbox) error {
	if !s.cfg.Log.Logs(sb.Backend) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, s.lim.Drain)
	defer cancel()
	s.mu.Lock()
	src := s.sources[sb.VMID]
	if src == nil || src.sb.ref.UID != sb.UID {
		src = &source{sb: subjectOf(sb)}
	}
	s.mu.Unlock()
	for {
		full, err := s.readOne(ctx, src)
		if err != nil || !full {
			return err
		}
	}
}

// List lists entries in ascending order of ID. It reads the logs first.
func (s *Service) List(ctx context.Context, f agentlab.EgressFilter) ([]agentlab.EgressEntry, error) {
	if f.Tail || f.AfterID == 0 {
		s.refresh(ctx, f)
	}
	return s.cfg.Store.Egress(ctx, f)
}

// Summary summarises the entries that f selects, with at most targets refused
// targets. It reads the logs first.
func (s *Service) Summary(ctx context.Context, f agentlab.EgressFilter, targets int) (agentlab.EgressSummary, error) {
	s.refresh(ctx, f)
	return s.cfg.Store.EgressSummary(ctx, f, targets)
}

// refresh reads the logs that f selects. Run reads those that fail or take
// long.
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

// recordResult stores the result of a read, for the next one.
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
			s.log.Warn("the network log of a sandbox is currently not recorded", "vmid", src.sb.vmid, "attempt", src.failures, "err", err)
		}
		return
	case full:
		src.failures = 0
		if s.sources[src.sb.vmid] == src {
			s.queue.Set(&src.next, time.Time{})
			s.wakeRun()
		}
		return
	}
	src.failures = 0
	if !src.sb.state.HasVM() && ctx.Err() == nil { // there will be no more records
		s.remove(src)
	}
}

// page is how many records, and rows of sandboxes, are read at a time.
const page = 500

// readOne reads one page of one log. full means that there may be more.
func (s *Service) readOne(ctx context.Context, src *source) (full bool, err error) {
	unlock, err := s.reads.Lock(ctx, src)
	if err != nil {
		return false, err
	}
	defer unlock()
	s.mu.Lock()
	sb := src.sb
	s.mu.Unlock()
	if !src.known {
		if src.cursor, err = s.cfg.Store.EgressCursor(ctx, sb.vmid, sb.ref.UID); err != nil {
			return false, err
		}
		src.known = true
	}
	call, cancel := context.WithTimeout(ctx, s.lim.Call)
	recs, err := s.cfg.Log.EgressLog(call, sb.on, sb.ref, src.cursor, page)
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
		src.pause = min(max(2*src.pause, s.lim.Every), s.idle())
	}
	return len(entries) > 0 && len(recs) >= page, nil
}

// entries converts records to entries. Records that are out of order are
// dropped.
func (s *Service) entries(ctx context.Context, sb subject, after int64, recs []agentlab.EgressRecord) []agentlab.EgressEntry {
	if len(recs) == 0 {
		return nil
	}
	var ended time.Time // of the job; later decisions of a kept sandbox do not belong to it
	if sb.jobID != "" {
		if j, err := s.cfg.Store.Job(ctx, sb.jobID); err == nil && j.Status.Final() {
			ended = j.FinishedAt
		}
	}
	redact := func(text string) string { return text }
	if s.cfg.Redactor != nil {
		redact = s.cfg.Redactor.RedactFunc(ctx, cmp.Or(sb.jobID, sb.ref.UID))
	}
	now := s.clock()
	out := make([]agentlab.EgressEntry, 0, len(recs))
	for _, r := range recs {
		if r.Seq <= after {
			continue
		}
		after = r.Seq
		r.Name, r.Error = redact(r.Name), redact(r.Error)
		e := agentlab.EgressEntry{UID: sb.ref.UID, JobID: sb.jobID, EgressRecord: clean(r, sb.vmid, now)}
		if !ended.IsZero() && e.Time.After(ended) {
			e.JobID = ""
		}
		out = append(out, e)
	}
	return slices.Clip(out)
}

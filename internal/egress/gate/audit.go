package gate

import (
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/agentlab-vm/agentlab"
)

const (
	auditWindow = time.Second
	// maxOpenRecords limits the different decisions of one window, and
	// auditQueue the records that wait for Audit.
	maxOpenRecords, auditQueue = 512, 1024
)

// recorder passes decisions to Config.Audit without delaying the data path.
// The first of equal decisions is passed on at once, so that a crash does not
// lose it; those that follow within a second become one record with their
// count. Records above the limits are dropped and counted in the next record's
// Dropped.
type recorder struct {
	now   func() time.Time
	limit *rate.Limiter

	mu      sync.Mutex
	open    map[agentlab.EgressRecord]*repeats // by the decision only
	dropped int
	ticking bool
	closed  bool
	queue   chan agentlab.EgressRecord
	done    chan struct{}
}

// Recorder records decisions that are made outside of a Gate, as a Gate does.
type Recorder struct{ r *recorder }

// NewRecorder returns a Recorder that passes records to emit, one at a time, in a
// separate goroutine. Close ends it.
func NewRecorder(emit func(agentlab.EgressRecord)) *Recorder {
	return &Recorder{newRecorder(emit, time.Now, Limits{}.withDefaults().AuditRate)}
}

// Record records a decision. Time, Last and Count are set here.
func (r *Recorder) Record(d agentlab.EgressRecord) { r.r.record(d) }

// Close passes on the remaining records and waits for it.
func (r *Recorder) Close() { r.r.close() }

// repeats counts the decisions of a window after its first.
type repeats struct {
	first, last time.Time
	count       int
}

func newRecorder(emit func(agentlab.EgressRecord), now func() time.Time, perSecond int) *recorder {
	r := &recorder{
		now: now, limit: rate.NewLimiter(rate.Limit(perSecond), 5*perSecond),
		open:  map[agentlab.EgressRecord]*repeats{},
		queue: make(chan agentlab.EgressRecord, auditQueue), done: make(chan struct{}),
	}
	if emit == nil {
		r.closed = true
		close(r.done)
		return r
	}
	go func() {
		defer close(r.done)
		for rec := range r.queue {
			emit(rec)
		}
	}()
	return r
}

func (r *recorder) record(key agentlab.EgressRecord) {
	now := r.now().UTC()
	key.Seq, key.Time, key.Last, key.Count, key.Dropped = 0, time.Time{}, time.Time{}, 0, 0
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return
	}
	if again := r.open[key]; again != nil {
		if again.count == 0 {
			again.first = now
		}
		again.last = now
		again.count++
		return
	}
	if len(r.open) >= maxOpenRecords || !r.put(now, key, repeats{now, now, 1}) {
		r.dropped++
		return
	}
	r.open[key] = &repeats{}
	if !r.ticking {
		r.ticking = true
		time.AfterFunc(auditWindow, r.tick)
	}
}

// put queues one record; false means that the queue is full.
func (r *recorder) put(now time.Time, key agentlab.EgressRecord, n repeats) bool {
	if !r.limit.AllowN(now, 1) {
		return false
	}
	key.Time, key.Last, key.Count, key.Dropped = n.first, n.last, n.count, r.dropped
	select {
	case r.queue <- key:
		r.dropped = 0
		return true
	default:
		return false
	}
}

// tick ends a window.
func (r *recorder) tick() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return
	}
	r.flush()
	r.ticking = len(r.open) > 0
	if r.ticking {
		time.AfterFunc(auditWindow, r.tick)
	}
}

func (r *recorder) flush() {
	now := r.now().UTC()
	for key, n := range r.open {
		if n.count == 0 {
			delete(r.open, key)
			continue
		}
		if !r.put(now, key, *n) {
			r.dropped += n.count
		}
		n.count = 0
	}
}

// close queues the remaining records and waits until all were passed on.
func (r *recorder) close() {
	r.mu.Lock()
	if !r.closed {
		r.closed = true
		r.flush()
		close(r.queue)
	}
	r.mu.Unlock()
	<-r.done
}

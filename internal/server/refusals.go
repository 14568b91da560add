package server

import (
	"net/http"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// How many refused calls the log tells of: so many at once, and then one each
// refusalEvery. Callers over TCP and on the unix socket count apart. The log
// has a bounded size, and a refused caller should not push the lines of others
// out of it.
const (
	refusalBurst = 50
	refusalEvery = 5 * time.Second
	refusalPath  = 200 // bytes of a path
)

// refusals counts the lines about refused calls.
type refusals struct {
	mu      sync.Mutex
	spent   float64
	at      time.Time
	dropped int
}

// pass tells whether there is room for a line now, and how many there was none
// for since the last one.
func (q *refusals) pass(now time.Time) (dropped int, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.spent = max(0, q.spent-max(0, now.Sub(q.at).Seconds())/refusalEvery.Seconds())
	q.at = now
	if q.spent+1 > refusalBurst {
		q.dropped++
		return 0, false
	}
	q.spent++
	dropped, q.dropped = q.dropped, 0
	return dropped, true
}

// logRefusal tells of a call that was refused.
func (s *Server) logRefusal(r *http.Request, err error) {
	who := callerOf(r.Context())
	lines := &s.refusedAfar
	if who.local {
		lines = &s.refusedHere
	}
	dropped, ok := lines.pass(time.Now())
	if !ok {
		return
	}
	args := []any{"method", agentlab.Cut(r.Method, 20), "path", agentlab.Cut(r.URL.Path, refusalPath), "err", err, "from", who.where}
	if dropped > 0 {
		args = append(args, "dropped_before", dropped)
	}
	s.log.Warn("refused", args...)
}

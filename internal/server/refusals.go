package server

import (
	"net/http"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// Lines about refused calls in the log: so many at once, then one each
// refusalEvery. Callers over TCP and on the unix socket count apart. The size of
// the log is bounded: a refused caller must not push out the lines of others.
const (
	refusalBurst = 50
	refusalEvery = 5 * time.Second
	refusalPath  = 200 // bytes of a path
)

// logRefusal logs a refused call.
func (s *Server) logRefusal(r *http.Request, err error) {
	who := callerOf(r.Context())
	log := s.refusedAfar
	if who.local {
		log = s.refusedHere
	}
	log.Warn("refused", "method", agentlab.Cut(r.Method, 20), "path", agentlab.Cut(r.URL.Path, refusalPath), "err", err, "from", who.where)
}

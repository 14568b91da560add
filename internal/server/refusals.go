package server

import (
	"net/http"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// Limits on log lines about refused calls: this many at once, then one per
// refusalEvery. Callers over TCP and on the unix socket are counted separately.
// The size of the log is limited: a refused caller must not displace the lines
// of others.
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

package server

import (
	"net/http"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// Limits on log lines about refused calls: this many at once, then one per
// rejectionInterval. Callers over TCP and on the unix socket are counted separately.
// The size of the log is limited: a refused caller must not displace the lines
// of others.
const (
	rejectionBurst    = 50
	rejectionInterval = 5 * time.Second
	maxRejectedPath   = 200 // bytes of a path
)

// logRejection logs a refused call.
func (s *Server) logRejection(r *http.Request, err error) {
	who := callerOf(r.Context())
	log := s.remoteRejections
	if who.local {
		log = s.localRejections
	}
	log.Warn("refused", "method", agentlab.Cut(r.Method, 20), "path", agentlab.Cut(r.URL.Path, maxRejectedPath), "err", err, "from", who.source)
}

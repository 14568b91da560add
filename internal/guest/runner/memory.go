package runner

import (
	"syscall"

	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/guest/slice"
)

// noteKills returns how many processes the kernel has ended because memory was used
// up, nil if there are none. New ones get a line in the job's log.
func (r *Runner) noteKills() *guestapi.MemoryKills {
	k := slice.ReadKills()
	if k.Total() == 0 {
		return nil
	}
	r.killsMu.Lock()
	isNew := k.Total() > r.kills
	r.kills = max(r.kills, k.Total())
	r.killsMu.Unlock()
	if isNew {
		r.logf("%s", k)
	}
	return &k
}

// killsText returns the probable reason for a program that ended with an exit code, "" if
// memory is not the reason.
func killsText(code int) string {
	k := slice.ReadKills()
	if code != 128+int(syscall.SIGKILL) || k.Total() == 0 {
		return ""
	}
	return "; " + k.String()
}

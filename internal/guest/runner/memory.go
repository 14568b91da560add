package runner

import (
	"syscall"

	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/guest/slice"
)

// readKills returns how many processes the kernel has ended since the job began,
// because memory was used up. A sandbox that is a copy has those of its source, too: the
// number at the beginning is a fact of the job.
func (r *Runner) readKills() guestapi.MemoryKills {
	now := slice.ReadKills(r.cfg.Cgroups)
	var before guestapi.MemoryKills
	if ok, err := r.dir.load(fileKills, &before); !ok || err != nil {
		return guestapi.MemoryKills{}
	}
	return guestapi.MemoryKills{Nested: max(0, now.Nested-before.Nested), Other: max(0, now.Other-before.Other)}
}

// noteKills returns the kills of the job, nil if there are none. New ones get a line in
// its log.
func (r *Runner) noteKills() *guestapi.MemoryKills {
	k := r.readKills()
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
func (r *Runner) killsText(code int) string {
	if code != 128+int(syscall.SIGKILL) {
		return ""
	}
	if k := r.readKills(); k.Total() > 0 {
		return "; " + k.String()
	}
	return ""
}

package fake

import (
	"net/http"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
)

// Files on a volume that make its guest behave like a hostile one.
const (
	neverFreezes = volumePath + "never-freezes"
	thawsEarly   = volumePath + "thaws-early"
)

func (g *guest) freeze(w http.ResponseWriter, r *http.Request) {
	req, ok := request[guestapi.FreezeRequest](w, r)
	if !ok {
		return
	}
	never := false
	if !g.in.h.volumeFiles(g.in.rec.Spec.UID, func(v *volume) { _, never = v.Files[neverFreezes] }) || never {
		refuse(w, http.StatusConflict, agentlab.CodeConflict, "the file system of the workspace cannot be frozen")
		return
	}
	g.setFrozen(g.in.h.cfg.Clock().Add(time.Duration(req.Seconds) * time.Second))
	reply(w, struct{}{})
}

func (g *guest) thaw(w http.ResponseWriter, _ *http.Request) {
	early := false
	g.in.h.volumeFiles(g.in.rec.Spec.UID, func(v *volume) { _, early = v.Files[thawsEarly] })
	held := g.setFrozen(time.Time{}).After(g.in.h.cfg.Clock())
	reply(w, guestapi.Thawed{Held: held && !early})
}

// setFrozen freezes the workspace until a time, and returns until when it was frozen.
func (g *guest) setFrozen(until time.Time) (before time.Time) {
	g.mu.Lock()
	defer g.mu.Unlock()
	before, g.frozen = g.frozen, until
	return before
}

// isFrozen reports whether the workspace is frozen. A process that writes to it then
// fails; in another guest it waits.
func (g *guest) isFrozen() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.frozen.After(g.in.h.cfg.Clock())
}

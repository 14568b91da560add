package guestplane

import (
	"context"
	"net/http"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/guestcheck"
)

// Leases knows the leases of sandboxes; *sandbox.Service implements it.
type Leases interface {
	// Lease returns when the lease of a sandbox ends.
	Lease(ctx context.Context, vmid int) (time.Time, error)
	// RenewFromGuest makes the lease of a sandbox longer, if its profile allows that
	// to its guest, and returns its end. A ttl of 0 is that of the profile. Codes:
	// denied, invalid, conflict.
	RenewFromGuest(ctx context.Context, vmid int, ttl time.Duration) (time.Time, error)
}

// maxLeaseBody bounds a LeaseRenew, in bytes.
const maxLeaseBody = 4 << 10

func (g *guest) lease(w http.ResponseWriter, r *http.Request, _ string) {
	end, err := g.s.cfg.Leases.Lease(r.Context(), g.vmid)
	g.writeLease(w, r, end, err)
}

func (g *guest) renewLease(w http.ResponseWriter, r *http.Request, _ string) {
	p, err := readAll(r.Body, maxLeaseBody)
	var want guestapi.LeaseRenew
	if err == nil && len(p) > 0 {
		err = guestcheck.Decode(p, &want)
	}
	if most := int(agentlab.MaxTTL / time.Minute); err == nil && (want.Minutes < 0 || want.Minutes > most) {
		err = agentlab.Errorf(agentlab.CodeInvalid, "%d is not between 0 and %d", want.Minutes, most).WithField("minutes")
	}
	var end time.Time
	if err == nil {
		end, err = g.s.cfg.Leases.RenewFromGuest(r.Context(), g.vmid, time.Duration(want.Minutes)*time.Minute)
	}
	g.writeLease(w, r, end, err)
}

func (g *guest) writeLease(w http.ResponseWriter, r *http.Request, end time.Time, err error) {
	if err != nil {
		g.fail(w, r, err)
		return
	}
	writeJSON(w, http.StatusOK, guestapi.Lease{ExpiresAt: end.UTC()})
}

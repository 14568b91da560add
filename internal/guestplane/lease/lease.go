// Package lease is the guest service by which a guest reads and renews the lease of its
// sandbox.
package lease

import (
	"context"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/guestcheck"
	"github.com/agentlab-vm/agentlab/internal/guestplane"
)

// Leases knows the leases of sandboxes; *sandbox.Service implements it.
type Leases interface {
	// Lease returns when the lease of a sandbox ends.
	Lease(ctx context.Context, vmid int) (time.Time, error)
	// RenewFromGuest makes the lease of a sandbox longer, if its profile allows that
	// to its guest, and returns its end. With a ttl of 0 it uses the ttl of the profile. Codes:
	// denied, invalid, conflict.
	RenewFromGuest(ctx context.Context, vmid int, ttl time.Duration) (time.Time, error)
}

// maxBody bounds a LeaseRenew, in bytes.
const maxBody = 4 << 10

// Service returns the guest service.
func Service(leases Leases) guestplane.Service {
	s := service{leases}
	return guestplane.Service{Name: "lease", Routes: []guestplane.Route{
		{Method: "POST", Path: guestapi.PathLease, Token: guestplane.Messenger, Body: maxBody, Serve: s.renew},
		{Method: "GET", Path: guestapi.PathLease, Token: guestplane.Messenger, Serve: s.lease},
	}}
}

type service struct{ leases Leases }

func (s service) lease(c *guestplane.Call) (any, error) {
	return answer(s.leases.Lease(c.Context(), c.VMID))
}

func (s service) renew(c *guestplane.Call) (any, error) {
	p, err := c.Read()
	var want guestapi.LeaseRenew
	if err == nil && len(p) > 0 {
		err = guestcheck.Decode(p, &want)
	}
	if most := int(agentlab.MaxTTL / time.Minute); err == nil && (want.Minutes < 0 || want.Minutes > most) {
		err = agentlab.Errorf(agentlab.CodeInvalid, "%d is not between 0 and %d", want.Minutes, most).WithField("minutes")
	}
	if err != nil {
		return nil, err
	}
	return answer(s.leases.RenewFromGuest(c.Context(), c.VMID, time.Duration(want.Minutes)*time.Minute))
}

func answer(end time.Time, err error) (any, error) {
	return guestapi.Lease{ExpiresAt: end.UTC()}, err
}

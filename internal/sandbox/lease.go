package sandbox

import (
	"context"
	"net"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/stream"
)

// leaseWarnings are how long before the end of a lease an event warns, the
// longest first.
var leaseWarnings = []time.Duration{15 * time.Minute, 5 * time.Minute}

// attachedTTL is how much longer a lease becomes that would end soon while a
// terminal is attached.
const attachedTTL = time.Hour

// watchLease renews a lease that ends soon if a terminal is attached, and else
// warns. renewed means that the row has changed.
func (s *Service) watchLease(ctx context.Context, sb agentlab.Sandbox) (renewed bool, err error) {
	attached, now := false, s.clock()
	s.withState(sb.VMID, func(m *runtimeState) {
		m.seeLease(sb, now)
		attached = m.terminals > 0
	})
	if sb.LeaseExpiresAt.Sub(now) > leaseWarnings[0] {
		return false, nil
	}
	if attached {
		end := sb.LeaseExpiresAt
		sb, err = s.extendLease(ctx, sb.VMID, attachedTTL, "renewed, because a terminal is attached")
		if err != nil || sb.LeaseExpiresAt.After(end) {
			return err == nil, err
		}
	}
	s.warnOfEnd(ctx, sb)
	return false, nil
}

// extendLease lets a lease end ttl from now, and at most Limits.MaxTTL after the
// sandbox was created. It never shortens a lease.
func (s *Service) extendLease(ctx context.Context, vmid int, ttl time.Duration, what string) (agentlab.Sandbox, error) {
	return s.Update(ctx, vmid, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
		end := s.clock().UTC().Add(ttl)
		if last := sb.CreatedAt.Add(s.lim.MaxTTL); end.After(last) {
			end = last
		}
		if sb.Desired != agentlab.DesiredRunning || !sb.State.HasVM() || !end.After(sb.LeaseExpiresAt) {
			return nil, nil
		}
		sb.LeaseExpiresAt = end
		return []agentlab.Event{leaseEvent(*sb, what)}, nil
	})
}

// minRenewal is by how much a guest must make its lease longer, so that it does not
// write an event with each call.
const minRenewal = time.Minute

// Lease returns when the lease of a sandbox ends. Code: not_found.
func (s *Service) Lease(ctx context.Context, vmid int) (time.Time, error) {
	sb, err := s.cfg.Store.Sandbox(ctx, vmid)
	return sb.LeaseExpiresAt, err
}

// RenewFromGuest makes the lease of a sandbox end ttl from now for its guest, if its
// profile allows that, and returns the end. A ttl of 0 is that of the profile. It never
// makes a lease shorter, and none longer than Limits.MaxTTL after the sandbox was
// created. Codes: not_found, denied, invalid, conflict.
func (s *Service) RenewFromGuest(ctx context.Context, vmid int, ttl time.Duration) (time.Time, error) {
	sb, err := s.cfg.Store.Sandbox(ctx, vmid)
	if err != nil {
		return time.Time{}, err
	}
	prof, err := s.cfg.Profiles.Use(sb.Profile)
	switch {
	case err != nil:
		return time.Time{}, err
	case !prof.GuestRenew:
		return time.Time{}, agentlab.Errorf(agentlab.CodeDenied, "the profile %s does not allow sandboxes to renew their leases (behavior.guest_lease_renew)", prof.Name)
	}
	if ttl, err = s.TTL(ttl, prof.TTL); err != nil {
		return time.Time{}, err
	}
	end := sb.LeaseExpiresAt
	if s.clock().Add(ttl).Sub(end) < minRenewal {
		return end, nil
	}
	if sb, err = s.extendLease(ctx, vmid, ttl, "renewed by its guest"); err != nil {
		return time.Time{}, err
	}
	if sb.Desired != agentlab.DesiredRunning {
		return time.Time{}, Conflict(sb, "and its lease cannot be renewed", "")
	}
	return sb.LeaseExpiresAt, nil
}

// leaseWarning returns the last warning that is due when a lease ends in left; 0
// means none.
func leaseWarning(left time.Duration) (due time.Duration) {
	for _, w := range leaseWarnings {
		if left <= w {
			due = w
		}
	}
	return due
}

// warnOfEnd writes an event when a warning about the end of a lease is due. A
// warning that was due when this process first saw the end is not given: the lease
// is that short, or an earlier process has given it.
func (s *Service) warnOfEnd(ctx context.Context, sb agentlab.Sandbox) {
	left, give := sb.LeaseExpiresAt.Sub(s.clock()), false
	s.withState(sb.VMID, func(m *runtimeState) {
		give = m.mustWarn(left)
		m.warned = leaseWarning(left)
	})
	if !give {
		return
	}
	minutes := int((left + time.Minute - 1) / time.Minute)
	e := NewEvent(agentlab.EventSandboxLease, sb, map[string]any{"lease_expires_at": sb.LeaseExpiresAt.UTC().Format(time.RFC3339), "minutes_left": minutes},
		"lease of sandbox %s ends in %d minutes", sb.Name, minutes)
	if err := s.cfg.Store.AppendEvents(ctx, e); err != nil {
		s.log.Warn("the event about the end of a lease was not stored", "vmid", sb.VMID, "err", err)
	}
}

// seeLease notes the end of a lease: the warnings of another end do not count.
func (m *runtimeState) seeLease(sb agentlab.Sandbox, now time.Time) {
	if !m.leaseEnd.Equal(sb.LeaseExpiresAt) {
		m.leaseEnd, m.warned = sb.LeaseExpiresAt, leaseWarning(sb.LeaseExpiresAt.Sub(now))
	}
}

// mustWarn reports whether a warning has not been given that is due when the lease ends
// in left.
func (m *runtimeState) mustWarn(left time.Duration) bool {
	due := leaseWarning(left)
	return due != 0 && (m.warned == 0 || due < m.warned)
}

// untilLease returns the time until the next warning about the end of the lease, or
// until its end.
func (s *Service) untilLease(sb agentlab.Sandbox) time.Duration {
	if !s.leaseCounts(sb) {
		return s.idleLimit()
	}
	left := sb.LeaseExpiresAt.Sub(s.clock())
	next := left
	for _, w := range leaseWarnings {
		if left > w {
			next = min(next, left-w)
		}
	}
	return min(max(next, time.Millisecond), s.idleLimit())
}

// idleLimit returns the maximum time between two steps of a settled sandbox.
func (s *Core) idleLimit() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return max(MaxIdle, time.Duration(len(s.states))*time.Second/idleStepRate)
}

// sshPort is the port of the SSH server of a guest.
const sshPort = 22

// terminal is the connection of a terminal that is attached to a sandbox. Its lease
// is renewed while the connection is open.
type terminal struct {
	net.Conn
	closed func()
}

// hold counts conn as a terminal of the sandbox until it is closed.
func (s *Service) hold(sb agentlab.Sandbox, conn net.Conn) net.Conn {
	count := func(n int) {
		s.withState(sb.VMID, func(m *runtimeState) {
			if m.uid == sb.UID {
				m.terminals += n
			}
		})
	}
	count(1)
	s.loop.Wake(sb.VMID) // its lease may end soon
	return &terminal{Conn: conn, closed: sync.OnceFunc(func() { count(-1) })}
}

// Close implements net.Conn.
func (t *terminal) Close() error {
	t.closed()
	return t.Conn.Close()
}

// CloseWrite passes on the half close, which embedding hides.
func (t *terminal) CloseWrite() error { return stream.CloseWrite(t.Conn) }

// leaseGrace is how long after the end of a lease the backend powers the VM
// off by itself. While this service runs, it acts first: it ends jobs and asks
// guests to power off, which takes less time.
const leaseGrace = 2 * time.Minute

// setDeadline sends the end of the lease of a sandbox to the backend, unless the
// backend already has it. The lease then also ends while no daemon runs.
func (s *Service) setDeadline(ctx context.Context, sb agentlab.Sandbox) error {
	b := s.On(sb)
	if b.Power == nil || !b.Can().Deadlines {
		return nil
	}
	known := false
	s.withState(sb.VMID, func(m *runtimeState) { known = m.lease.Equal(sb.LeaseExpiresAt) })
	if known {
		return nil
	}
	left := max(sb.LeaseExpiresAt.Sub(s.clock()), 0) + leaseGrace
	err := b.Power.SetDeadline(ctx, backend.RefOf(sb), backend.Deadline{Lease: sb.LeaseExpiresAt, Left: left})
	if agentlab.CodeOf(err) == agentlab.CodeUnsupported {
		s.log.Warn("the lease of a sandbox is not enforced while no daemon runs", "vmid", sb.VMID, "err", err)
		err = nil
	}
	if err == nil {
		s.withState(sb.VMID, func(m *runtimeState) { m.lease = sb.LeaseExpiresAt })
	}
	return err
}

// expired handles a VM that its backend powered off because its lease ended.
// The lease counts as ended, whatever the daemon's clock says.
func (s *Service) expired(ctx context.Context, sb agentlab.Sandbox) error {
	now := s.clock().UTC()
	_, err := s.Update(ctx, sb.VMID, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
		if now.Before(sb.LeaseExpiresAt) {
			sb.LeaseExpiresAt = now
		}
		return nil, nil
	})
	return err
}

// leaseReason is why a sandbox is TIMEOUT.
func (s *Service) leaseReason(ctx context.Context, sb agentlab.Sandbox) string {
	const reason = "its lease ended"
	b := s.On(sb)
	if !b.Can().Deadlines || !sb.State.HasVM() {
		return reason
	}
	if in, err := b.Inspect(ctx, backend.RefOf(sb)); err == nil && in.Expired {
		return reason + "; it was powered off by its supervisor, because agentlabd did not end it"
	}
	return reason
}

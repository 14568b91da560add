package sandbox

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"net"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/control"
)

// ImageResolved reports whether the row has an image reference name@digest;
// before, it has the requested name.
func ImageResolved(sb agentlab.Sandbox) bool { return strings.Contains(sb.Image, "@") }

// provision creates image, disk and VM of a sandbox and starts it.
func (s *Service) provision(ctx context.Context, sb agentlab.Sandbox) (time.Duration, bool, error) {
	if !ImageResolved(sb) {
		return s.resolveImage(ctx, sb)
	}
	if sb.From.Snapshot != "" {
		switch ready, refusal, err := s.snaps.OriginReady(ctx, sb); {
		case refusal != nil:
			return 0, false, s.MarkFailed(ctx, sb, "it could not be created: %w", refusal)
		case err != nil || !ready:
			return 0, true, err
		}
	}
	wait, refusal, err := s.tryPowerOn(ctx, sb)
	switch {
	case wait || err != nil:
		return 0, true, err
	case refusal != nil:
		return 0, false, s.MarkFailed(ctx, sb, "it could not be created: %w", refusal)
	}
	return 0, false, s.Transition(ctx, sb, agentlab.SandboxBooting, "")
}

// tryPowerOn runs powerOn if a slot for booting is free. wait means that the
// step ends here. It runs again when a slot is free, or after a pause if err
// may be temporary. A refusal is permanent.
func (s *Service) tryPowerOn(ctx context.Context, sb agentlab.Sandbox) (wait bool, refusal, err error) {
	isCopy := s.copies(ctx, sb)
	if sb.Pooled() { // without a slot
		if s.boots.busy(sb.Backend) {
			s.pool.Drop(ctx, sb.VMID, "another sandbox starts")
			return true, nil, nil
		}
	} else {
		s.pool.GiveWay(ctx, sb)
		if !s.acquireSlots(sb, isCopy) {
			return true, nil, nil
		}
	}
	s.TriedFor(sb.VMID)
	err = s.powerOn(ctx, sb)
	if err == nil {
		s.vmStarted(sb.VMID, isCopy)
		return false, nil, nil
	}
	s.ReleaseSlots(sb.VMID) // another sandbox may succeed
	if ctx.Err() != nil || (backend.IsTransient(err) && s.TriedFor(sb.VMID) < s.lim.ProvisionTimeout) {
		return true, nil, err
	}
	return false, err, nil
}

// powerOn creates the VM as far as it is missing, opens the guest plane, and
// starts the VM. Each of these may already be done.
func (s *Service) powerOn(ctx context.Context, sb agentlab.Sandbox) error {
	if err := s.Room(); err != nil { // there may be space later
		return agentlab.Errorf(agentlab.CodeUnavailable, "%w", err)
	}
	if sb.NetworkPending { // an existing VM has the old policy
		err := s.updateNetwork(ctx, sb)
		if err != nil && agentlab.CodeOf(err) != agentlab.CodeNotFound {
			return err
		}
	}
	if err := s.On(sb).Create(ctx, SpecOf(sb)); err != nil {
		return err
	}
	if sb.NetworkPending {
		if err := s.networkApplied(ctx, sb); err != nil {
			return err
		}
	}
	if !sb.Pooled() {
		if err := s.openGuestListener(ctx, sb); err != nil {
			return err
		}
	}
	if err := s.setDeadline(ctx, sb); err != nil {
		return err
	}
	if err := s.workspaces.AttachVolume(ctx, sb); err != nil {
		return err
	}
	return s.On(sb).Start(ctx, backend.RefOf(sb))
}

// boot waits for the guest of a started sandbox, or starts the sandbox.
func (s *Service) boot(ctx context.Context, sb agentlab.Sandbox) (time.Duration, bool, error) {
	if !s.Inspected(sb.VMID) {
		if done, err := s.ensureStarted(ctx, sb); done || err != nil {
			return 0, done, err
		}
	}
	limit, waited, _ := s.patience(sb.VMID)
	actx, cancel := context.WithTimeout(ctx, max(limit-waited, questionTimeout))
	err := s.answer(actx, sb)
	cancel()
	if err == nil {
		s.ReleaseSlots(sb.VMID)
		return 0, false, nil
	}
	if ctx.Err() != nil {
		return 0, true, err
	}
	if refused, ok := errors.AsType[Permanent](err); ok {
		return 0, false, s.MarkFailed(ctx, sb, "%w", refused.Err)
	}
	s.withState(sb.VMID, func(m *runtimeState) {
		m.inspected = m.inspected && s.clock().Sub(m.looked) < lookEvery
	})
	limit, waited, isCopy := s.patience(sb.VMID)
	if waited < limit {
		return bootPause(waited), true, nil
	}
	if isCopy {
		if err := s.hurryCopies(ctx, sb); err != nil {
			return 0, true, err
		}
	}
	return 0, false, s.Fail(ctx, sb, unbootable, "its guest did not answer within %s: %w", limit, err)
}

// answer makes a sandbox whose guest answers READY, or POOLED.
func (s *Service) answer(ctx context.Context, sb agentlab.Sandbox) error {
	if sb.Pooled() {
		return s.pool.Ready(ctx, sb)
	}
	if err := s.openGuestListener(ctx, sb); err != nil {
		return err
	}
	if err := s.workspaces.Mount(ctx, sb); err != nil { // first: the identity starts its job
		return err
	}
	health, err := s.ensureIdentity(ctx, sb)
	if err != nil {
		return err
	}
	if err := s.noteNested(ctx, sb, agentlab.NestedState(health.Nested)); err != nil {
		return err
	}
	return s.ready(ctx, sb)
}

// lookEvery is the interval of the checks that the VM of a guest that does not
// answer yet still runs.
const lookEvery = time.Second

// bootPause returns the pause before the next request to a booting guest.
func bootPause(waited time.Duration) time.Duration {
	switch {
	case waited < 5*time.Second:
		return 20 * time.Millisecond
	case waited < 30*time.Second:
		return 100 * time.Millisecond
	}
	return 500 * time.Millisecond
}

// ensureStarted ensures that the VM of a BOOTING sandbox runs, and starts it
// if it never ran in this boot. done means that nothing more can be done now.
// Without done and without an error the VM runs or the row has changed.
func (s *Service) ensureStarted(ctx context.Context, sb agentlab.Sandbox) (done bool, err error) {
	in, err := s.On(sb).Inspect(ctx, backend.RefOf(sb))
	absent := agentlab.CodeOf(err) == agentlab.CodeNotFound
	if err != nil && !absent {
		return true, err
	}
	ran := false
	s.withState(sb.VMID, func(m *runtimeState) { ran = !m.running.IsZero() })
	why := ""
	switch {
	case in.Expired && ran:
		if err := s.expired(ctx, sb); err != nil {
			return true, err
		}
		s.loop.Wake(sb.VMID) // for the next step
		return true, nil
	case absent && (ran || !sb.BootedAt.IsZero()):
		why = "its VM was not found on the backend"
	case in.Power == backend.PowerCrashed && ran: // before that, a start may have been interrupted
		why = "its VM crashed while it booted: " + in.Reason
	case in.Power == backend.PowerStopped && ran:
		why = "its guest powered off while it booted"
	case in.Power == backend.PowerRunning:
		s.markVMRunning(sb.VMID)
		return false, nil
	case in.Power == backend.PowerSuspended: // it was in the warm pool
		if err := s.resume(ctx, sb); err != nil {
			return true, err
		}
		s.markVMRunning(sb.VMID)
		return false, nil
	}
	if why == "" {
		wait, refusal, err := s.tryPowerOn(ctx, sb)
		switch {
		case wait || err != nil:
			return true, err
		case refusal == nil:
			s.markVMRunning(sb.VMID)
			return false, nil
		}
		why = "it could not be started: " + refusal.Error()
	}
	if err := s.Fail(ctx, sb, unbootable, "%s", why); err != nil {
		return true, err
	}
	s.loop.Wake(sb.VMID) // for the next step
	return true, nil
}

// markVMRunning records that the VM of a BOOTING sandbox was found running.
func (s *Service) markVMRunning(vmid int) {
	s.withState(vmid, func(m *runtimeState) {
		now := s.clock()
		if m.running.IsZero() {
			m.running = now
		}
		m.looked, m.inspected, m.needsInspect = now, true, false
	})
}

// Control returns a client of the control server in the guest of a sandbox.
func (s *Core) Control(sb agentlab.Sandbox) *control.Client {
	return control.New(func(ctx context.Context) (net.Conn, error) {
		conn, err := s.On(sb).DialControl(ctx, backend.RefOf(sb))
		return conn, s.OfSession(ctx, sb, err)
	})
}

// Asking records that the step of a sandbox waits for its guest, or saves it, until
// the returned function is called. A change of the network policy interrupts such
// a step (policyChanged), because a hostile guest does not answer.
func (s *Core) Asking(vmid int) (answered func()) {
	s.withState(vmid, func(m *runtimeState) {
		m.asking = true
		if m.newPolicy {
			s.loop.Interrupt(vmid)
		}
	})
	return func() { s.withState(vmid, func(m *runtimeState) { m.asking = false }) }
}

// Health asks the guest of a sandbox how far it has booted.
func (s *Core) Health(ctx context.Context, sb agentlab.Sandbox) (guestapi.Health, error) {
	defer s.Asking(sb.VMID)()
	return s.Control(sb).Health(ctx)
}

// ensureIdentity sends the guest its identity, unless it has it already: from
// an earlier process, or from an attempt whose answer was lost.
func (s *Service) ensureIdentity(ctx context.Context, sb agentlab.Sandbox) (health guestapi.Health, err error) {
	blank := false
	s.withState(sb.VMID, func(m *runtimeState) { blank = m.blank })
	if !blank {
		if health, err = s.Health(ctx, sb); err != nil {
			return health, err
		}
		if health.Identity == sb.UID {
			s.cfg.Bootstrap.Sent(sb.UID)
			return health, nil
		}
	}
	var doc *guestapi.Bootstrap
	if s.cfg.Guests != nil && !sb.Maintenance() {
		if doc, err = s.cfg.Bootstrap.Document(ctx, sb); err != nil {
			return health, err
		}
	}
	return s.sendIdentity(ctx, sb, doc)
}

// sendIdentity sends the guest its identity, with the current time, and the
// document with which its runner fetches its job and secrets; nil means none.
func (s *Service) sendIdentity(ctx context.Context, sb agentlab.Sandbox, doc *guestapi.Bootstrap) (guestapi.Health, error) {
	id := guestapi.Identity{
		UID: sb.UID, Hostname: sb.Name, Time: s.clock().UTC(), Entropy: make([]byte, 64),
		Network: s.On(sb).Info().GuestNetwork, Bootstrap: doc, RootBytes: int64(sb.Resources.RootSizeGB) << 30,
	}
	if sb.Resources.Nested.Wanted() {
		id.Nested = string(sb.Resources.Nested)
	}
	_, _ = rand.Read(id.Entropy) // never fails
	defer s.Asking(sb.VMID)()
	guest := control.New(func(ctx context.Context) (net.Conn, error) {
		c, err := s.On(sb).DialControl(ctx, backend.RefOf(sb))
		if err == nil {
			s.withState(sb.VMID, func(m *runtimeState) { m.blank = false })
		}
		return c, err
	})
	health, err := guest.SetIdentity(ctx, id)
	if err == nil && doc != nil {
		s.cfg.Bootstrap.Sent(sb.UID)
	}
	return health, err
}

// Limits of ensureDelivered. They bound the time for which a guest that does
// not answer occupies a worker.
const (
	deliveryTimeout = 15 * time.Second // for both calls to a guest
	questionTimeout = 2 * time.Second  // for the first one
	silencePause    = 5 * time.Second  // after a call without an answer; doubled each time
	maxSilencePause = time.Minute
)

// ensureDelivered sends the guest another document if it did not get the
// answer for the last one. It returns the time until the next check, 0 for
// none. It is not an error if the guest does not answer.
func (s *Service) ensureDelivered(ctx context.Context, sb agentlab.Sandbox) (again time.Duration, err error) {
	if s.cfg.Guests == nil || sb.Maintenance() {
		return 0, nil
	}
	s.withState(sb.VMID, func(m *runtimeState) { again = m.askAt.Sub(s.clock()) })
	if again > 0 {
		return again, nil
	}
	dctx, cancel := context.WithTimeout(ctx, deliveryTimeout)
	defer cancel()
	var silence error
	doc, again, err := s.cfg.Bootstrap.Reissue(dctx, sb, func(ctx context.Context) (h guestapi.Health, err error) {
		ctx, cancel := context.WithTimeout(ctx, questionTimeout)
		defer cancel()
		h, silence = s.Health(ctx, sb)
		return h, silence
	})
	if err == nil && doc != nil {
		_, silence = s.sendIdentity(dctx, sb, doc)
	}
	if err != nil || ctx.Err() != nil {
		return again, err
	}
	s.withState(sb.VMID, func(m *runtimeState) {
		if silence == nil {
			m.silent = 0
			return
		}
		pause := min(silencePause<<min(m.silent, 10), maxSilencePause)
		m.silent, m.askAt = m.silent+1, s.clock().Add(pause)
		again = max(again, pause)
		s.log.Debug("a guest does not answer whether it has its job and secrets", "vmid", sb.VMID, "pause", pause, "err", silence)
	})
	return again, nil
}

// ready changes a sandbox to READY.
func (s *Service) ready(ctx context.Context, sb agentlab.Sandbox) error {
	in, err := s.On(sb).Inspect(ctx, backend.RefOf(sb))
	if err != nil {
		return err
	}
	begun, err := s.startBegun(ctx, sb)
	if err != nil {
		return err
	}
	_, err = s.Update(ctx, sb.VMID, func(now *agentlab.Sandbox) ([]agentlab.Event, error) {
		if now.State != sb.State || now.Desired != sb.Desired {
			return nil, nil
		}
		now.State, now.Reason, now.IP, now.Handle, now.Unbootable = agentlab.SandboxReady, "", in.IP, in.Ref.Handle, false
		if !now.BootedAt.IsZero() {
			return []agentlab.Event{StateEvent(*now, sb.State)}, nil
		}
		now.BootedAt = s.clock().UTC()
		now.Start = startKind(*now, in)
		return []agentlab.Event{startedEvent(*now, sb.State, begun)}, nil
	})
	if err == nil {
		s.pool.Quiet(ctx)
		s.withState(sb.VMID, func(m *runtimeState) {
			m.inspected = m.state == agentlab.SandboxReady && in.Power == backend.PowerRunning
		})
	}
	return err
}

// startBegun returns when the start of a sandbox began: when it was requested, or when
// it got the lease of its workspace, for which it may have waited for hours.
func (s *Service) startBegun(ctx context.Context, sb agentlab.Sandbox) (time.Time, error) {
	if sb.Workspace == "" || !sb.BootedAt.IsZero() {
		return sb.CreatedAt, nil
	}
	at, err := s.workspaces.AcquiredAt(ctx, sb)
	if at.After(sb.CreatedAt) {
		return at, err
	}
	return sb.CreatedAt, err
}

// startKind returns how the first guest of a sandbox was started.
func startKind(sb agentlab.Sandbox, in backend.Instance) agentlab.StartKind {
	switch {
	case sb.Start != "":
		return sb.Start
	case !in.Copied:
		return agentlab.StartBoot
	case sb.From.Snapshot != "":
		return agentlab.StartSnapshot
	}
	return agentlab.StartTemplate
}

// stepPooled is stepOnce for a sandbox of the pool.
func (s *Service) stepPooled(ctx context.Context, sb agentlab.Sandbox) (again time.Duration, done bool, err error) {
	switch {
	case sb.Desired == agentlab.DesiredDestroyed:
		return 0, false, s.destroy(ctx, sb)
	case !s.clock().Before(sb.LeaseExpiresAt):
		s.pool.Drop(ctx, sb.VMID, "it has waited for "+agentlab.FormatTTL(sb.LeaseExpiresAt.Sub(sb.CreatedAt)))
		return time.Second, true, nil // if the row could not be changed
	case sb.State != agentlab.SandboxPooled:
		return s.driveRunning(ctx, sb)
	case s.Inspected(sb.VMID):
		return 0, true, nil
	}
	in, err := s.On(sb).Inspect(ctx, backend.RefOf(sb))
	if err != nil && agentlab.CodeOf(err) != agentlab.CodeNotFound {
		return 0, true, err
	}
	if err != nil || in.Power != s.pooledPower(sb) {
		return 0, false, s.MarkFailed(ctx, sb, "its VM has ended (%s) while it waited in the warm pool: %s", cmp.Or(in.Power, "gone"), in.Reason)
	}
	s.setInspected(sb.VMID)
	return 0, true, nil
}

// pooledPower is the power state of a POOLED sandbox.
func (s *Service) pooledPower(sb agentlab.Sandbox) backend.PowerState {
	if s.On(sb).Power != nil {
		return backend.PowerSuspended
	}
	return backend.PowerRunning
}

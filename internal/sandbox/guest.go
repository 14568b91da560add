package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"time"

	"golang.org/x/time/rate"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/bounded"
)

// live returns a sandbox, if its guest can be reached.
func (s *Core) live(ctx context.Context, vmid int) (agentlab.Sandbox, error) {
	sb, err := s.cfg.Store.Sandbox(ctx, vmid)
	if err != nil {
		return agentlab.Sandbox{}, err
	}
	if err := s.Reachable(sb); err != nil {
		return sb, err
	}
	if sb.Pooled() {
		return sb, Conflict(sb, "and belongs to the warm pool", "create a sandbox, which may get it: agentlab sandbox new")
	}
	switch sb.State {
	case agentlab.SandboxReady, agentlab.SandboxRunning, agentlab.SandboxCompleted:
		return sb, nil
	case agentlab.SandboxRequested, agentlab.SandboxProvisioning, agentlab.SandboxBooting:
		return sb, Conflict(sb, "and does not answer yet", "wait until it is READY")
	case agentlab.SandboxSuspended:
		err = Conflict(sb, "and does not run", "agentlab sandbox resume %d", vmid)
	case agentlab.SandboxStopped:
		err = Conflict(sb, "and does not run", "agentlab sandbox start %d", vmid)
	default:
		err = Conflict(sb, "and does not run", "see the reason: agentlab sandbox show %[1]d; destroy it: agentlab sandbox destroy %[1]d", vmid)
	}
	return sb, s.OfSession(ctx, sb, err)
}

// OfSession replaces the hint of an error, which names a command that runs the sandbox
// again, if the sandbox is the current one of a session: that has a command of its own.
func (s *Core) OfSession(ctx context.Context, sb agentlab.Sandbox, err error) error {
	e, ok := errors.AsType[*agentlab.Error](err)
	if !ok || e.Hint == "" {
		return err
	}
	all, lerr := s.cfg.Sessions.Sessions(ctx)
	if lerr != nil {
		return err // with the hint for any sandbox
	}
	for _, v := range all {
		if v.VMID != sb.VMID || v.UID != sb.UID {
			continue
		}
		why := ""
		if sb.State == agentlab.SandboxFailed {
			why = fmt.Sprintf("see the reason: agentlab sandbox show %d; ", sb.VMID)
		}
		return e.WithHint("%s", why+startSession(v))
	}
	return err
}

// startSession is the hint that names the commands which start a session.
func startSession(v agentlab.Session) string {
	return "start its session: agentlab start in its repository, or agentlab session resume " + v.Name
}

// seenLive is live for questions that are asked again and again, of thousands of guests:
// it reads no row. The sandbox has only what its guest is reached with.
func (s *Service) seenLive(vmid int) (sb agentlab.Sandbox, ok bool) {
	s.withState(vmid, func(m *runtimeState) {
		switch m.state {
		case agentlab.SandboxReady, agentlab.SandboxRunning, agentlab.SandboxCompleted:
			ok = s.missing(m.backend) == ""
		}
		sb = agentlab.Sandbox{VMID: vmid, UID: m.uid, Handle: m.handle, Backend: m.backend}
	})
	return sb, ok
}

// Exec starts a command in the guest. The connection carries frames of package
// stream; closing it ends the command. Codes: not_found, conflict if the
// sandbox does not run, and those of the guest.
func (s *Service) Exec(ctx context.Context, vmid int, r guestapi.ExecRequest) (net.Conn, error) {
	sb, err := s.live(ctx, vmid)
	if err != nil {
		return nil, err
	}
	conn, err := s.Control(sb).Exec(ctx, r)
	if err != nil || !r.TTY {
		return conn, err
	}
	return s.hold(sb, conn), nil
}

// Attach attaches to a named terminal of the guest. The connection carries
// frames of package stream; closing it does not end the terminal.
func (s *Service) Attach(ctx context.Context, vmid int, r guestapi.AttachRequest) (net.Conn, error) {
	sb, err := s.live(ctx, vmid)
	if err != nil {
		return nil, err
	}
	conn, err := s.Control(sb).Attach(ctx, r)
	if err != nil {
		return nil, err
	}
	return s.hold(sb, conn), nil
}

// SSHKey authorises an ephemeral key in the guest.
func (s *Service) SSHKey(ctx context.Context, vmid int, r guestapi.SSHKeyRequest) (guestapi.SSHKeyResponse, error) {
	sb, err := s.live(ctx, vmid)
	if err != nil {
		return guestapi.SSHKeyResponse{}, err
	}
	return s.Control(sb).SSHKey(ctx, r)
}

// Listeners returns the TCP ports on which processes of the guest listen. It returns
// when they are not those of state, or after wait. Codes: not_found, conflict if the
// sandbox does not run, and those of the guest.
func (s *Service) Listeners(ctx context.Context, vmid int, state string, wait time.Duration) (guestapi.Listeners, error) {
	sb, ok := s.seenLive(vmid)
	if !ok {
		var err error
		if sb, err = s.live(ctx, vmid); err != nil {
			return guestapi.Listeners{}, err
		}
	}
	return s.Control(sb).Listeners(ctx, state, wait)
}

// DialLocal opens a TCP stream to a port of the guest through its control server, which
// also reaches ports that are bound to its loopback only.
func (s *Service) DialLocal(ctx context.Context, vmid int, port uint16) (net.Conn, error) {
	sb, err := s.live(ctx, vmid)
	if err != nil {
		return nil, err
	}
	return s.Control(sb).DialPort(ctx, port)
}

// DialGuest opens a TCP stream to a port of the guest, also to one that is bound to its
// loopback only. A stream to its SSH server counts as a terminal.
func (s *Service) DialGuest(ctx context.Context, vmid int, port uint16) (net.Conn, error) {
	sb, err := s.live(ctx, vmid)
	if err != nil {
		return nil, err
	}
	conn, err := s.On(sb).DialGuest(ctx, backend.RefOf(sb), port)
	switch {
	case err != nil && port != sshPort && agentlab.CodeOf(err) == agentlab.CodeUnavailable:
		if local, lerr := s.Control(sb).DialPort(ctx, port); lerr == nil {
			return local, nil
		}
		return nil, s.OfSession(ctx, sb, err)
	case err != nil || port != sshPort:
		return conn, s.OfSession(ctx, sb, err)
	}
	return s.hold(sb, conn), nil
}

// How many bytes of a console log are saved and read, and how long that may
// take.
const (
	saveBytes   = 256 << 10
	lookBytes   = 64 << 20
	saveTimeout = 10 * time.Second
)

// ConsoleArtifact is the path of the artifact that saveConsole stores.
const ConsoleArtifact = "console.log"

// saveConsole stores the end of the console log of a failed sandbox as an
// artifact of its job, before the sandbox is destroyed. It is called once,
// with a short time limit, because the log is only for users.
func (s *Service) saveConsole(ctx context.Context, sb agentlab.Sandbox) {
	save := false
	s.withState(sb.VMID, func(m *runtimeState) { save, m.save = m.save, false })
	if !save || sb.JobID == "" || s.cfg.Artifacts == nil {
		return
	}
	sctx, cancel := context.WithTimeout(ctx, saveTimeout)
	defer cancel()
	rc, err := s.ConsoleLog(sctx, sb.VMID, false)
	if err == nil {
		defer rc.Close()
		end := bounded.Tail{Max: saveBytes}
		if _, err = io.Copy(&end, io.LimitReader(rc, lookBytes)); err == nil && end.String() != "" {
			err = s.putConsole(sctx, sb.JobID, strings.NewReader(end.String()))
		}
	}
	if err != nil && ctx.Err() != nil { // the step was interrupted and will run again
		s.withState(sb.VMID, func(m *runtimeState) { m.save = true })
		return
	}
	if err != nil && agentlab.CodeOf(err) != agentlab.CodeUnsupported {
		s.log.Warn("the console log of a failed sandbox was not saved", "vmid", sb.VMID, "err", err)
	}
}

func (s *Service) putConsole(ctx context.Context, jobID string, console io.Reader) error {
	r, err := s.cfg.Bootstrap.Redactor(ctx, jobID)
	if err == nil {
		_, err = s.cfg.Artifacts.Put(ctx, jobID, ConsoleArtifact, r.Reader(console))
	}
	return err
}

// ConsoleLog reads the console output of the VM. Codes: not_found if the
// sandbox is destroyed, unsupported if the backend has no console log.
func (s *Service) ConsoleLog(ctx context.Context, vmid int, follow bool) (io.ReadCloser, error) {
	sb, err := s.cfg.Store.Sandbox(ctx, vmid)
	if err != nil {
		return nil, err
	}
	if err := s.Reachable(sb); err != nil {
		return nil, err
	}
	b := s.On(sb)
	switch {
	case b.Console == nil:
		return nil, b.Without("has no console log").WithHint("%s", b.Info().ConsoleHint)
	case sb.State == agentlab.SandboxDestroyed:
		return nil, agentlab.Errorf(agentlab.CodeNotFound, "sandbox %s (%d) is destroyed, and its console log with it", sb.Name, vmid)
	case sb.State == agentlab.SandboxRequested:
		return nil, Conflict(sb, "and has no console yet", "wait until it boots")
	}
	return b.Console.ConsoleLog(ctx, backend.RefOf(sb), follow)
}

// Memory returns the host's memory that a sandbox occupies. ok is false if it has
// no process, or the backend does not know.
func (s *Service) Memory(ctx context.Context, sb agentlab.Sandbox) (m backend.Memory, ok bool) {
	host := s.On(sb).Host
	if host == nil || !sb.State.HasVM() {
		return m, false
	}
	m, err := host.Memory(ctx, backend.RefOf(sb))
	return m, err == nil
}

// vmDown handles a VM that should run but does not: a guest that powered itself
// off is STOPPED, anything else FAILED. A kept sandbox survives a restart of its
// host: it is STOPPED, and started again if its desired state is running. So is a
// sandbox whose guest rebooted while no job ran.
func (s *Service) vmDown(ctx context.Context, sb agentlab.Sandbox, in backend.Instance, why string) error {
	if in.Expired {
		return s.expired(ctx, sb)
	}
	desired := agentlab.DesiredStopped
	var rebooted *rate.Limiter
	switch {
	case !sb.State.CanBecome(agentlab.SandboxStopped):
		return s.MarkFailed(ctx, sb, "%s", why)
	case in.HostRestarted && sb.Keepalive && sb.Desired == agentlab.DesiredRunning:
		desired, why = agentlab.DesiredRunning, why+"; it is started again"
	case in.HostRestarted && sb.Keepalive:
		why += "; its memory contents are lost"
	case in.HostRestarted:
		return s.MarkFailed(ctx, sb, "%s; a sandbox without keepalive is not started again", why)
	case in.GuestRebooted && sb.State != agentlab.SandboxRunning && sb.Desired == agentlab.DesiredRunning:
		rebooted = s.rebootLimit(sb.VMID)
		if rebooted.TokensAt(s.clock()) < 1 {
			why = "the guest rebooted itself too often; it is not started again"
			break
		}
		desired, why = agentlab.DesiredRunning, "the guest rebooted itself; it is started again"
	case in.Power != backend.PowerStopped:
		return s.MarkFailed(ctx, sb, "%s", why)
	}
	s.CloseGuestListener(sb.VMID)
	_, err := s.Update(ctx, sb.VMID, func(now *agentlab.Sandbox) ([]agentlab.Event, error) {
		if now.State != sb.State || now.Desired != sb.Desired {
			return nil, nil
		}
		now.State, now.Desired, now.Reason, now.IP = agentlab.SandboxStopped, desired, why, ""
		return []agentlab.Event{StateEvent(*now, sb.State)}, nil
	})
	if err == nil && rebooted != nil { // an error is tried again
		rebooted.AllowN(s.clock(), 1)
	}
	return err
}

// Limits on the reboots of a guest. A start has a slot for booting, which a hostile
// guest holds for BootTimeout.
const (
	maxReboots  = 5 // at once
	rebootEvery = 30 * time.Minute
)

// rebootLimit returns the limit on the reboots of a guest.
func (s *Service) rebootLimit(vmid int) (limit *rate.Limiter) {
	s.withState(vmid, func(m *runtimeState) {
		if m.reboots == nil {
			m.reboots = rate.NewLimiter(rate.Every(rebootEvery), maxReboots)
		}
		limit = m.reboots
	})
	return limit
}

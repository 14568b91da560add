package sandbox

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// A sandbox whose job ended with work that is not stored is kept for Limits.Salvage:
// without power, without a workspace, and not counted in the number of sandboxes. Its
// row says so before its VM is stopped. The job service extracts the work from a copy
// of its disk, which SaveForSalvage requests.

// salvageable reports whether the disk of a sandbox may be kept for the work of its
// job. A job on a workspace has its work there.
func (s *Core) salvageable(sb agentlab.Sandbox) bool {
	return s.lim.Salvage > 0 && s.cfg.Jobs != nil && sb.JobID != "" && sb.Workspace == "" && !sb.BootedAt.IsZero() && !sb.Salvage &&
		sb.State != agentlab.SandboxDestroyed && sb.Desired != agentlab.DesiredDestroyed && s.diskBytes(sb) <= s.lim.SalvageBytes
}

// hasWork reports whether a sandbox must be kept when it would be destroyed.
func (s *Service) hasWork(ctx context.Context, sb agentlab.Sandbox) (bool, error) {
	if !s.salvageable(sb) {
		return false, nil
	}
	return s.cfg.Jobs.Unshipped(ctx, sb.JobID)
}

// unknownDisk is the size that a disk counts with if its size is not known: it is that of
// a template on another machine, or of an image that was deleted. If such disks counted as
// nothing, no limit would apply to them. Disks of templates are usually smaller.
const unknownDisk = 32 << 30

// diskBytes returns the full size of the disk of a sandbox; unknownDisk if it is not known.
func (s *Core) diskBytes(sb agentlab.Sandbox) int64 {
	if sb.Resources.RootSizeGB > 0 {
		return int64(sb.Resources.RootSizeGB) << 30
	}
	if sizer, ok := s.On(sb).Images.(DiskSizer); ok {
		return cmp.Or(sizer.DiskBytes(sb.Image), unknownDisk)
	}
	return unknownDisk
}

// keep makes a sandbox one that is kept for the work of its job.
func (s *Service) keep(sb *agentlab.Sandbox) agentlab.Event {
	sb.Salvage, sb.Keepalive, sb.Restoring, sb.Desired = true, false, "", agentlab.DesiredStopped
	sb.LeaseExpiresAt = s.clock().UTC().Add(s.lim.Salvage)
	return leaseEvent(*sb, "is changed: its disk is kept for work of "+sb.JobID+" that is not stored ('agentlab job salvage "+sb.JobID+"')")
}

// salvageWait is how much longer a disk is kept whose work is being extracted at the
// end of its time.
const salvageWait = 10 * time.Minute

// salvaging reports whether a job extracts the work on the disk of a kept sandbox.
func (s *Core) salvaging(ctx context.Context, sb agentlab.Sandbox) (bool, error) {
	if !sb.Salvage || s.cfg.Jobs == nil {
		return false, nil
	}
	return s.cfg.Jobs.Salvaging(ctx, sb.JobID)
}

// SalvageEnded is called after the end of a job that extracted the work of another:
// the disk may be deleted again.
func (s *Service) SalvageEnded() { s.spawn(s.boundSalvage) }

// OnlyKept is the error for what would change the disk of a kept sandbox.
func OnlyKept(sb agentlab.Sandbox) error {
	return Conflict(sb, "and only kept for the work of its job", "extract it: agentlab job salvage %s", sb.JobID)
}

// boundSalvage requests the destruction of the sandboxes that were kept first, if
// the disks of all kept ones exceed their limit, except of one whose work is being
// extracted: SalvageEnded runs it again.
func (s *Core) boundSalvage(ctx context.Context) {
	list, err := s.cfg.Store.Sandboxes(ctx, agentlab.SandboxFilter{})
	list = slices.DeleteFunc(list, func(sb agentlab.Sandbox) bool { return !sb.Salvage || sb.Desired == agentlab.DesiredDestroyed })
	slices.SortFunc(list, func(a, b agentlab.Sandbox) int {
		return cmp.Or(b.LeaseExpiresAt.Compare(a.LeaseExpiresAt), cmp.Compare(b.VMID, a.VMID))
	})
	var sum int64
	for _, sb := range list {
		if sum += s.diskBytes(sb); sum <= s.lim.SalvageBytes {
			continue
		}
		if busy, busyErr := s.salvaging(ctx, sb); busy || busyErr != nil {
			err = errors.Join(err, busyErr)
			continue
		}
		_, dropErr := s.RequestChange(ctx, sb.VMID, s.loop.Interrupt, func(now *agentlab.Sandbox) ([]agentlab.Event, error) {
			if now.UID != sb.UID || !now.Salvage || now.Desired == agentlab.DesiredDestroyed {
				return nil, nil
			}
			now.Desired = agentlab.DesiredDestroyed
			return []agentlab.Event{leaseEvent(*now, "is cut: newer disks that are kept need the space (limits.salvage_gb); "+lostWork(*now))}, nil
		})
		err = errors.Join(err, dropErr)
	}
	if err != nil && ctx.Err() == nil {
		s.log.Warn("the disks of ended jobs that are kept may exceed their limit", "err", err)
	}
}

// lostWork names what is deleted with the disk of a kept sandbox.
func lostWork(sb agentlab.Sandbox) string {
	return "work of " + sb.JobID + " that is not stored is deleted"
}

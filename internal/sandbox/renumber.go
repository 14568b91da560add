package sandbox

import (
	"context"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// takenError is the answer of a Create that found something else where the
// sandbox was to be.
type takenError struct{ error }

func (e *takenError) Unwrap() error { return e.error }

// renumber gives a sandbox another number whose own was taken by somebody else
// on the backend, after it was allocated. What may have been made under the
// old one with our mark is removed first. The step of the new number goes on.
func (s *Service) renumber(ctx context.Context, sb agentlab.Sandbox, taken error) (time.Duration, bool, error) {
	s.closeGuestListener(sb.VMID)
	dctx, cancel := context.WithTimeout(ctx, destroyTimeout)
	defer cancel()
	if err := s.cfg.Driver.Destroy(dctx, backend.RefOf(sb)); err != nil {
		return 0, true, err
	}
	room, err := s.allocation(ctx)
	if err != nil {
		return 0, true, err
	}
	room.Taken = append(room.Taken, sb.VMID)
	now, err := s.cfg.Store.RenumberSandbox(ctx, sb.VMID, sb.UID, room)
	switch agentlab.CodeOf(err) {
	case "":
	case agentlab.CodeLimit:
		return 0, false, s.markFailed(ctx, sb, "it could not be made: %w (%w)", taken, err)
	case agentlab.CodeNotFound, agentlab.CodeConflict:
		return 0, false, nil // something else became of it meanwhile: look again
	default:
		return 0, true, err
	}
	s.log.Warn("a sandbox got another number", "old", sb.VMID, "vmid", now.VMID, "uid", sb.UID, "err", taken)
	s.withState(sb.VMID, (*runtimeState).notifyWaiters)
	s.forget(sb.VMID)
	s.track(now)
	s.loop.Wake(now.VMID)
	return 0, true, nil
}

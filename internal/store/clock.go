package store

import (
	"context"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// ClockJumped moves end times by shift, so that the remaining times are the
// same as before the host's clock jumped: leases of sandboxes, deadlines of
// jobs, the tokens of their guests, and the waits for workspaces. The times of the
// creation and the boot of sandboxes move too, because limits count from them. API
// tokens keep their times. fact is the new value of FactClock.
func (s *Store) ClockJumped(ctx context.Context, shift time.Duration, fact string, evs ...agentlab.Event) error {
	return s.write(ctx, func(w *tx) error {
		for _, move := range []func(*tx, time.Duration) error{moveLeases, moveDeadlines, moveTokens, moveGrants, moveWaits} {
			if shift == 0 {
				break
			}
			if err := move(w, shift); err != nil {
				return err
			}
		}
		if err := setFact(w, FactClock, fact); err != nil {
			return err
		}
		return w.emit(evs)
	})
}

func moveLeases(w *tx, shift time.Duration) error {
	return updateAll(w, sandboxes, "WHERE state <> 'DESTROYED'", func(sb *agentlab.Sandbox) {
		sb.LeaseExpiresAt, sb.CreatedAt = sb.LeaseExpiresAt.Add(shift), sb.CreatedAt.Add(shift)
		if !sb.BootedAt.IsZero() {
			sb.BootedAt = sb.BootedAt.Add(shift)
		}
		w.done.Sandboxes = append(w.done.Sandboxes, *sb)
	})
}

func moveDeadlines(w *tx, shift time.Duration) error {
	return updateAll(w, jobs, "WHERE status IN ('QUEUED', 'RUNNING') AND deadline_at <> ''", func(j *agentlab.Job) { j.DeadlineAt = j.DeadlineAt.Add(shift) })
}

func moveTokens(w *tx, shift time.Duration) error {
	return updateAll(w, tokens, "WHERE consumed_at = ''", func(t *agentlab.BootstrapToken) { t.ExpiresAt = t.ExpiresAt.Add(shift) })
}

func moveGrants(w *tx, shift time.Duration) error {
	return updateAll(w, grants, "", func(g *agentlab.Grant) { g.ExpiresAt = g.ExpiresAt.Add(shift) })
}

func moveWaits(w *tx, shift time.Duration) error {
	return updateAll(w, workspaceLeases, "", func(l *agentlab.WorkspaceLease) {
		l.RequestedAt, l.WaitUntil = l.RequestedAt.Add(shift), l.WaitUntil.Add(shift)
		if l.Acquired() {
			l.AcquiredAt = l.AcquiredAt.Add(shift)
		}
	})
}

func updateAll[T any](w *tx, t *table[T], where string, move func(*T)) error {
	rows, err := t.query(w.ctx, w, where)
	if err != nil {
		return err
	}
	for i := range rows {
		move(&rows[i])
		if err := t.update(w, &rows[i]); err != nil {
			return err
		}
	}
	return nil
}

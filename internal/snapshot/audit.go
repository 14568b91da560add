package snapshot

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/fleet"
)

const (
	// auditEvery is the time between two comparisons of the snapshots on
	// the backend with the rows.
	auditEvery = time.Hour
	// forkSnapshotAge is when a snapshot for a fork that has no row is deleted.
	forkSnapshotAge = 24 * time.Hour
)

// lostSnapshot is a snapshot on the backend that has no row, because the database
// was lost or restored from a backup.
type lostSnapshot struct {
	backend.Snapshot
	backend string    // its name
	found   time.Time // when this process first found it
}

// audit finds the snapshots on a backend that have no row. One for a
// fork is temporary, which its UID shows: it gets a row again, so that it is deleted
// like all others, if it is old and saved of one of our sandboxes. All others are
// reported and stay.
func (s *Service) audit(ctx context.Context, b *fleet.Backend) error {
	before, err := s.store.Snapshots(ctx, agentlab.SnapshotFilter{})
	if err != nil {
		return err
	}
	all, err := b.Snapshots.Snapshots(ctx)
	if err != nil {
		return err
	}
	known := s.lost()
	lost := map[string]lostSnapshot{}
	for _, n := range all {
		// A row is written before its snapshot is saved, and removed after it was
		// deleted.
		_, err := s.store.Snapshot(ctx, n.Ref.UID)
		if err == nil || slices.ContainsFunc(before, func(row agentlab.Snapshot) bool { return row.UID == n.Ref.UID }) {
			continue
		}
		if agentlab.CodeOf(err) != agentlab.CodeNotFound {
			return err
		}
		one, reported := known[n.Ref.UID]
		if !reported {
			one = lostSnapshot{n, b.Name(), s.core.Now()}
		}
		adopted, err := s.adoptFork(ctx, one)
		if err == nil && !adopted {
			lost[n.Ref.UID] = one
			if !reported {
				err = s.reportLost(ctx, one)
			}
		}
		if err != nil {
			return err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	others := maps.Clone(s.lostSnapshots)
	maps.DeleteFunc(others, func(_ string, n lostSnapshot) bool { return n.backend == b.Name() })
	maps.Copy(lost, others)
	s.lostSnapshots = lost
	return nil
}

// adoptFork gives an old snapshot for a fork a row in state DELETING.
func (s *Service) adoptFork(ctx context.Context, n lostSnapshot) (bool, error) {
	since := n.Saved
	if since.IsZero() {
		since = n.found
	}
	if !agentlab.IsForkUID(n.Ref.UID) || s.core.Now().Sub(since) < forkSnapshotAge {
		return false, nil
	}
	sb, ours, err := s.core.Owner(ctx, n.Ref.Of.UID)
	if err != nil || !ours {
		return false, err
	}
	s.log.Warn("deleting a snapshot for a fork that is not in the database", "vmid", sb.VMID, "snapshot", n.Ref.UID)
	snap := snapshotOf(sb)
	snap.UID, snap.Kind, snap.State = n.Ref.UID, agentlab.SnapshotFork, agentlab.SnapshotDeleting
	if _, err := s.store.AllocateFork(ctx, snap, nil, agentlab.Allocation{}, nil); err != nil {
		return false, err
	}
	s.changed(sb.VMID)
	return true, nil
}

func (s *Service) reportLost(ctx context.Context, n lostSnapshot) error {
	s.log.Warn("the backend has a snapshot that is not in the database; it is not changed", "snapshot", n.Ref.UID, "sandbox", n.Ref.Of.UID)
	return s.store.AppendEvents(ctx, agentlab.NewEvent(agentlab.EventDrift, map[string]any{"uid": n.Ref.UID, "snapshot": true, "destroyed": false},
		"the backend has the snapshot %s, which is not in the database; it is not changed", n.Ref.UID))
}

func (s *Service) lost() map[string]lostSnapshot {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lostSnapshots
}

// Findings reports the snapshots without a row.
func (s *Service) Findings() []backend.Finding {
	lost := s.lost()
	if len(lost) == 0 {
		return nil
	}
	return []backend.Finding{{
		Name: "orphaned snapshots", Level: backend.LevelWarn,
		Detail: fmt.Sprintf("the backend has %s that %s not in the database, for example %s",
			agentlab.Plural(len(lost), "snapshot"), map[bool]string{true: "is", false: "are"}[len(lost) == 1], slices.Min(slices.Collect(maps.Keys(lost)))),
		Remedy: "restore a backup of the database that has them (agentlab db list), or delete them on the backend; a directory snapshots/UID in the state directory is one",
	}}
}

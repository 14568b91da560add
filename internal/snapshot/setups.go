package snapshot

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// A snapshot after setup is a fork of SaveForAttempts that stays, with a key of all
// that a later job must share. It was saved of a sandbox that had received no secrets.
// The snapshots are a cache: bounded, the least recently used are deleted first, and
// they may be deleted at any time.

// CanKeepSetups returns an error with code unsupported if there are no snapshots after
// setup on a backend.
func (s *Service) CanKeepSetups(on string) error {
	if s.cfg.SetupBytes <= 0 {
		return agentlab.Errorf(agentlab.CodeUnsupported, "snapshots after setup are off (limits.setup_cache_gb)")
	}
	return s.CanFork(on)
}

// Setups lists the snapshots after setup, the last used first.
func (s *Service) Setups(ctx context.Context) ([]agentlab.Snapshot, error) {
	list, err := s.store.Snapshots(ctx, agentlab.SnapshotFilter{})
	list = slices.DeleteFunc(list, func(n agentlab.Snapshot) bool { return n.Setup.Key == "" })
	slices.SortStableFunc(list, func(a, b agentlab.Snapshot) int {
		return cmp.Or(b.UsedAt.Compare(a.UsedAt), b.CreatedAt.Compare(a.CreatedAt))
	})
	return list, err
}

// FindSetup returns the snapshot on a backend with the first of the keys that has one for
// an image, given by its name, and records that it is used; ok is false if none has.
func (s *Service) FindSetup(ctx context.Context, on, image string, keys ...string) (snap agentlab.Snapshot, ok bool, err error) {
	list, err := s.Setups(ctx)
	if err != nil || len(list) == 0 {
		return snap, false, err
	}
	current, err := s.fleet.Of(on).Images.Current(ctx, image)
	if err != nil {
		return snap, false, nil //nolint:nilerr // an image that is not built has no snapshot
	}
	for _, key := range keys {
		for _, n := range list {
			if n.Setup.Key != key || n.State != agentlab.SnapshotReady || n.Image != current || n.Backend != on {
				continue
			}
			n, err = s.store.UpdateSnapshot(ctx, n.UID, s.cfg.Quota, func(n *agentlab.Snapshot) ([]agentlab.Event, error) {
				n.UsedAt = s.core.Now().UTC()
				return nil, nil
			})
			return n, err == nil && n.State == agentlab.SnapshotReady, err
		}
	}
	return snap, false, nil
}

// DeleteSetups requests the deletion of the snapshot after setup whose UID begins with
// prefix, or of all for "", and returns them. Codes: not_found; invalid if several UIDs
// begin with it.
func (s *Service) DeleteSetups(ctx context.Context, prefix string) ([]agentlab.Snapshot, error) {
	list, err := s.Setups(ctx)
	if err != nil {
		return nil, err
	}
	list = slices.DeleteFunc(list, func(n agentlab.Snapshot) bool { return n.State == agentlab.SnapshotDeleting })
	if prefix != "" {
		list = slices.DeleteFunc(list, func(n agentlab.Snapshot) bool { return !strings.HasPrefix(n.UID, prefix) })
		switch {
		case len(list) == 0:
			return nil, agentlab.Errorf(agentlab.CodeNotFound, "there is no snapshot after setup %q", prefix).WithHint("see 'agentlab setup list'")
		case len(list) > 1:
			return nil, agentlab.Errorf(agentlab.CodeInvalid, "%d snapshots after setup begin with %q", len(list), prefix).WithHint("use more characters of the ID")
		}
	}
	for i, n := range list {
		if list[i], err = s.deleteSnapshot(ctx, n, ""); err != nil && agentlab.CodeOf(err) != agentlab.CodeNotFound {
			return nil, err
		}
	}
	return list, nil
}

// trimSetups requests the deletion of the snapshots after setup that newer ones replace,
// and of as many of the least recently used as exceed the limit.
func (s *Service) trimSetups(ctx context.Context) error {
	list, err := s.Setups(ctx)
	if err != nil {
		return err
	}
	newest := map[string]time.Time{}
	for _, n := range list {
		if n.State == agentlab.SnapshotReady && n.SavedAt.After(newest[n.Setup.Key]) {
			newest[n.Setup.Key] = n.SavedAt
		}
	}
	var bytes int64
	for _, n := range list {
		if n.State != agentlab.SnapshotReady {
			continue
		}
		if !n.SavedAt.Before(newest[n.Setup.Key]) && bytes+n.Bytes <= s.cfg.SetupBytes {
			bytes += n.Bytes
			continue
		}
		if _, err := s.deleteSnapshot(ctx, n, ""); err != nil && agentlab.CodeOf(err) != agentlab.CodeNotFound {
			return err
		}
	}
	return nil
}

// expireSetups requests the deletion of the snapshots after setup that were not used
// since a time, and of those for attempts that are as old: the process that needed them
// was killed between two steps.
func (s *Service) expireSetups(ctx context.Context, before time.Time) (n int, err error) {
	list, err := s.store.Snapshots(ctx, agentlab.SnapshotFilter{})
	for _, snap := range list {
		used := cmp.Or(snap.UsedAt, snap.SavedAt)
		if snap.Kind != agentlab.SnapshotFork || !snap.Keep || snap.State != agentlab.SnapshotReady || !used.Before(before) {
			continue
		}
		if _, err := s.deleteSnapshot(ctx, snap, ""); err != nil {
			return n, err
		}
		n++
	}
	return n, err
}

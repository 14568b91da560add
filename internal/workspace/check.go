package workspace

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/fleet"
)

// audited is the result of an audit of a backend.
type audited struct {
	failed  int                       // workspaces that are FAILED
	usage   map[string]int64          // bytes of volumes, by UID
	unknown map[string]backend.Volume // volumes without a row, by UID
}

// auditLoop compares a backend with the rows at intervals, to find volumes that were
// changed by others, and how much space they occupy.
func (s *Service) auditLoop(ctx context.Context, b *fleet.Backend) {
	t := time.NewTicker(s.cfg.Limits.AuditEvery)
	defer t.Stop()
	for {
		s.endStaleLeases(ctx, b)
		if err := s.audit(ctx, b); err != nil && ctx.Err() == nil {
			s.log.Warn("the volumes on a backend could not be compared with the database", "backend", b.Name(), "err", err)
		}
		select {
		case <-t.C:
		case <-ctx.Done():
			return
		}
	}
}

// comparison is the volumes of backends and the rows of their workspaces.
type comparison struct {
	rows    []agentlab.Workspace
	volumes map[string]backend.Volume // by UID
	unknown map[string]backend.Volume // those without a row
	users   map[string]bool           // UIDs of the sandboxes that have leases
}

// compare reads the rows, leases and volumes of backends that have volumes. A row is written before its volume is created
// and removed after it is deleted, so that a volume without a row, before and after the
// list was read, belongs to none. The same is true of leases and attached volumes.
func (s *Service) compare(ctx context.Context, backends ...*fleet.Backend) (comparison, error) {
	c := comparison{volumes: map[string]backend.Volume{}, users: map[string]bool{}}
	before, err := s.cfg.Store.Workspaces(ctx)
	if err == nil {
		err = s.addUsers(ctx, c.users)
	}
	if err != nil {
		return c, err
	}
	for _, b := range backends {
		list, err := b.Volumes.ListVolumes(ctx)
		if err != nil {
			return c, err
		}
		for _, vol := range list {
			c.volumes[vol.Ref.UID] = vol
		}
	}
	if c.rows, err = s.cfg.Store.Workspaces(ctx); err == nil {
		err = s.addUsers(ctx, c.users)
	}
	if err != nil {
		return c, err
	}
	c.unknown = maps.Clone(c.volumes)
	for _, v := range slices.Concat(before, c.rows) {
		delete(c.unknown, v.UID)
	}
	c.rows = slices.DeleteFunc(c.rows, func(v agentlab.Workspace) bool {
		return !slices.ContainsFunc(backends, func(b *fleet.Backend) bool { return b.Name() == v.Backend })
	})
	return c, nil
}

// addUsers adds the UIDs of the sandboxes that have leases to users.
func (s *Service) addUsers(ctx context.Context, users map[string]bool) error {
	leases, err := s.cfg.Leases.WorkspaceLeases(ctx, "")
	for _, l := range leases {
		users[l.UID] = true
	}
	return err
}

// audit runs the steps of the workspaces of a backend whose volumes differ from their rows,
// and reports volumes without a row once.
func (s *Service) audit(ctx context.Context, b *fleet.Backend) error {
	c, err := s.compare(ctx, b)
	if err != nil {
		return err
	}
	now := audited{usage: map[string]int64{}, unknown: c.unknown}
	for _, v := range c.rows {
		vol, there := c.volumes[v.UID]
		now.usage[v.UID] = vol.Bytes
		whole := there && !vol.Partial
		if v.State == agentlab.WorkspaceReady && (!whole || vol.SizeGB != v.SizeGB) || v.State == agentlab.WorkspaceFailed && whole {
			s.loop.Wake(v.ID)
		}
		if v.State == agentlab.WorkspaceFailed {
			now.failed++
		}
	}
	s.mu.Lock()
	reported := s.audited[b.Name()].unknown
	s.audited[b.Name()] = now
	s.mu.Unlock()
	for uid := range c.unknown {
		if _, ok := reported[uid]; ok {
			continue
		}
		s.log.Warn("the backend has a volume that is not in the database; it is not changed", "volume", uid)
		err = cmp.Or(err, s.cfg.Store.AppendEvents(ctx, agentlab.NewEvent(agentlab.EventDrift, map[string]any{"uid": uid, "volume": true, "destroyed": false},
			"the backend has the volume %s, which is not in the database; it is not changed", uid)))
	}
	return err
}

// Check compares a workspace, or all for "", with the backend now. It returns a
// finding for each difference, or one with LevelOK for a workspace without any, and
// runs the steps that change the rows. Codes: not_found, conflict, unsupported.
func (s *Service) Check(ctx context.Context, idOrName string) ([]backend.Finding, error) {
	begin := time.Now()
	out, err := s.check(ctx, idOrName)
	if s.cfg.Metrics != nil {
		s.cfg.Metrics.Checked(time.Since(begin), err)
	}
	return out, err
}

func (s *Service) check(ctx context.Context, idOrName string) ([]backend.Finding, error) {
	backends := s.having()
	if len(backends) == 0 {
		return nil, s.cfg.Fleet.Default().Without("has no workspaces")
	}
	var one agentlab.Workspace
	if idOrName != "" {
		var err error
		if one, err = s.getReachable(ctx, idOrName); err != nil {
			return nil, err
		}
		backends = []*fleet.Backend{s.cfg.Fleet.Of(one.Backend)}
	}
	c, err := s.compare(ctx, backends...)
	if err != nil {
		return nil, err
	}
	if one.ID != "" {
		c.rows, c.unknown = []agentlab.Workspace{one}, nil
	}
	saved := map[string]backend.VolumeSnapshot{}
	for _, b := range backends {
		list, err := b.Volumes.VolumeSnapshots(ctx)
		if err != nil {
			return nil, err
		}
		for _, n := range list {
			saved[n.Ref.UID] = n
		}
	}
	var out []backend.Finding
	for _, v := range c.rows {
		found, err := s.checkOne(ctx, v, c, saved)
		if err != nil {
			return nil, err
		}
		out = append(out, found...)
		s.loop.Wake(v.ID)
	}
	for _, uid := range slices.Sorted(maps.Keys(c.unknown)) {
		out = append(out, unknownFinding(uid, c.unknown[uid]))
	}
	return out, nil
}

func (s *Service) checkOne(ctx context.Context, v agentlab.Workspace, c comparison, saved map[string]backend.VolumeSnapshot) ([]backend.Finding, error) {
	name := fmt.Sprintf("workspace %s (%s)", v.Name, v.ID)
	var out []backend.Finding
	warn := func(remedy, format string, args ...any) {
		out = append(out, backend.Finding{Name: name, Level: backend.LevelWarn, Detail: fmt.Sprintf(format, args...), Remedy: remedy})
	}
	snapshots, err := s.cfg.Store.WorkspaceSnapshots(ctx, v.ID)
	if err != nil {
		return nil, err
	}
	vol, there := c.volumes[v.UID]
	switch {
	case v.State != agentlab.WorkspaceReady && v.State != agentlab.WorkspaceFailed && v.State != agentlab.WorkspaceTrashed:
		detail := "is " + string(v.State)
		if v.Reason != "" {
			detail += ": " + v.Reason
		}
		return append(out, backend.Finding{Name: name, Level: backend.LevelOK, Detail: detail}), nil
	case !there && v.State == agentlab.WorkspaceFailed && v.ReadyAt.IsZero():
		warn(fmt.Sprintf("it has no content; delete it, and create it again: agentlab workspace delete %s", v.ID), "it was not created: %s", v.Reason)
	case !there:
		warn(fmt.Sprintf("if the storage is offline, bring it back; otherwise its content is lost: agentlab workspace delete %s", v.ID), "its volume is missing on the backend")
	case vol.Partial:
		warn(fmt.Sprintf("restore a snapshot (agentlab workspace snapshot restore %s --name NAME), or delete it: agentlab workspace delete %[1]s", v.ID), "its volume is partial: %s", vol.Reason)
	case vol.SizeGB != v.SizeGB:
		warn("none is needed: the row gets the size of the volume", "its volume has %d GiB, its row %d GiB", vol.SizeGB, v.SizeGB)
	}
	if uid := vol.AttachedTo.UID; uid != "" && !c.users[uid] {
		warn(fmt.Sprintf("find the VM with 'agentlab sandbox list --orphans'; if it is not needed: agentlab sandbox destroy --orphan %s", uid),
			"its volume is attached to the sandbox with the UID %s, which does not have its lease", uid)
	}
	for _, n := range snapshots {
		if on, ok := saved[n.UID]; n.State == agentlab.WorkspaceSnapshotReady && (!ok || on.Partial) {
			warn(fmt.Sprintf("delete it: agentlab workspace snapshot delete %s --name %s", v.ID, n.Name), "its snapshot %s is missing or partial on the backend", n.Name)
		}
	}
	for _, uid := range slices.Sorted(maps.Keys(saved)) {
		known := slices.ContainsFunc(snapshots, func(n agentlab.WorkspaceSnapshot) bool { return n.UID == uid })
		if saved[uid].Ref.Of.UID == v.UID && !known {
			warn("restore a backup of the database that has it (agentlab db list), or delete it on the backend", "the backend has the snapshot %s, which is not in the database", uid)
		}
	}
	if len(out) == 0 {
		out = append(out, backend.Finding{Name: name, Level: backend.LevelOK, Detail: fmt.Sprintf("%d GiB, %s", v.SizeGB, agentlab.Plural(len(snapshots), "snapshot"))})
	}
	return out, nil
}

func unknownFinding(uid string, vol backend.Volume) backend.Finding {
	what := fmt.Sprintf("a volume of %d GiB", vol.SizeGB)
	if vol.Partial {
		what = "a partial volume (" + vol.Reason + ")"
	}
	return backend.Finding{
		Name: "volume " + uid, Level: backend.LevelWarn,
		Detail: "the backend has " + what + " that is not in the database; it is not changed",
		Remedy: "restore a backup of the database that has it (agentlab db list), or delete it on the backend",
	}
}

// Findings reports the workspaces and volumes that need attention, as of the last
// audit.
func (s *Service) Findings() (out []backend.Finding) {
	s.mu.Lock()
	defer s.mu.Unlock()
	failed, unknown := 0, map[string]backend.Volume{}
	for _, a := range s.audited {
		failed += a.failed
		maps.Copy(unknown, a.unknown)
	}
	if failed > 0 {
		out = append(out, backend.Finding{
			Name: "failed workspaces", Level: backend.LevelWarn,
			Detail: fmt.Sprintf("%s FAILED", agentlab.Plural(failed, "workspace")), Remedy: "see the reasons: agentlab workspace check",
		})
	}
	if len(unknown) > 0 {
		uid := slices.Min(slices.Collect(maps.Keys(unknown)))
		f := unknownFinding(uid, unknown[uid])
		f.Name = "orphaned volumes"
		f.Detail = fmt.Sprintf("the backend has %s without a row in the database, for example %s", agentlab.Plural(len(unknown), "volume"), uid)
		out = append(out, f)
	}
	return out
}

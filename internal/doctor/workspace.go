package doctor

import (
	"context"
	"encoding/json"
	"slices"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// workspace collects a workspace, its volume, and the sandbox that has the volume.
func (b *collector) workspace(ctx context.Context, id string) error {
	v, err := b.cfg.Rows.Workspace(ctx, id)
	if err == nil {
		b.aboutWorkspace(ctx, v)
	}
	return err
}

// session collects a session with its history, its workspace, and its last job and
// sandbox.
func (b *collector) session(ctx context.Context, id string) error {
	v, err := b.cfg.Rows.Session(ctx, id)
	if err != nil {
		return err
	}
	a := b.archive
	a.doc("session/session.json", v)
	history, err := b.cfg.Rows.SessionHistory(ctx, v.ID)
	slices.Reverse(history) // the newest last
	addRows(a, "session/history.jsonl", newestRows, history, err)
	events, err := b.eventsOf(ctx, "session", v.ID, agentlab.EventSession)
	addRows(a, "session/events.jsonl", newestRows, eventLines(events), err)
	has := ""
	if w, err := b.cfg.Rows.Workspace(ctx, v.WorkspaceID); err != nil {
		a.fail("workspace/workspace.json", err)
	} else {
		has = b.aboutWorkspace(ctx, w)
	}
	if len(history) == 0 {
		return nil
	}
	last := history[len(history)-1]
	if has == "" {
		b.sandboxWith(ctx, last.UID)
	}
	if last.JobID == "" {
		return nil
	}
	if j, err := b.cfg.Rows.Job(ctx, last.JobID); err != nil {
		a.fail("job/job.json", err)
	} else {
		b.aboutJob(ctx, "job/", j)
	}
	return nil
}

// aboutWorkspace returns the UID of the sandbox that has the volume, which it
// collects too; "" if there is none.
func (b *collector) aboutWorkspace(ctx context.Context, v agentlab.Workspace) (uid string) {
	a := b.archive
	a.doc("workspace/workspace.json", v)
	snapshots, err := b.cfg.Rows.WorkspaceSnapshots(ctx, v.ID)
	addRows(a, "workspace/snapshots.jsonl", newestRows, snapshots, err)
	events, err := b.eventsOf(ctx, "workspace", v.ID, agentlab.EventWorkspaceState, agentlab.EventWorkspaceSnapshot, agentlab.EventWorkspaceLease)
	addRows(a, "workspace/events.jsonl", newestRows, eventLines(events), err)
	attached := backend.Ref{}
	b.try(ctx, "workspace/volume.json", func(ctx context.Context) error {
		volumes, err := b.cfg.Fleet.Of(v.Backend).NeedVolumes()
		if err != nil {
			return err
		}
		volume, err := volumes.InspectVolume(ctx, backend.VolumeRefOf(v))
		if err == nil {
			attached = volume.AttachedTo
			a.doc("workspace/volume.json", volume)
		}
		return err
	})
	if attached.UID != "" {
		b.sandboxWith(ctx, attached.UID)
	}
	return attached.UID
}

// sandboxWith collects the sandbox with that UID, which has the volume.
func (b *collector) sandboxWith(ctx context.Context, uid string) {
	sb, err := b.cfg.Rows.SandboxByUID(ctx, uid)
	if err != nil {
		b.archive.fail("sandbox/sandbox.json", err)
		return
	}
	b.aboutSandbox(ctx, "sandbox/", sb)
}

// eventsOf returns the events of some kinds whose data has an ID under a key, among
// the newest of these kinds: events have no column for it.
func (b *collector) eventsOf(ctx context.Context, key, id string, kinds ...string) ([]agentlab.Event, error) {
	all, err := b.cfg.Rows.Events(ctx, agentlab.EventFilter{Kinds: kinds, Limit: maxEventsOf, Tail: true})
	return slices.DeleteFunc(all, func(e agentlab.Event) bool {
		var data map[string]any
		return json.Unmarshal([]byte(e.Data), &data) != nil || data[key] != id
	}), err
}

// maxEventsOf is how many events of all workspaces, or sessions, are read.
const maxEventsOf = 10 * maxRows

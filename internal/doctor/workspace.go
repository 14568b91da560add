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
	if err != nil {
		return err
	}
	a := b.archive
	a.doc("workspace/workspace.json", v)
	snapshots, err := b.cfg.Rows.WorkspaceSnapshots(ctx, v.ID)
	addRows(a, "workspace/snapshots.jsonl", newestRows, snapshots, err)
	events, err := b.workspaceEvents(ctx, v.ID)
	addRows(a, "workspace/events.jsonl", newestRows, eventLines(events), err)
	attached := backend.Ref{}
	b.try(ctx, "workspace/volume.json", func(ctx context.Context) error {
		driver, ok := b.cfg.Driver.(backend.Volumes)
		if !ok || v.Backend != b.cfg.Driver.Info().Name {
			return agentlab.Errorf(agentlab.CodeUnsupported, "the workspace is on backend %s", v.Backend)
		}
		volume, err := driver.InspectVolume(ctx, backend.VolumeRef{UID: v.UID, Handle: v.Handle})
		if err == nil {
			attached = volume.AttachedTo
			a.doc("workspace/volume.json", volume)
		}
		return err
	})
	if attached.UID != "" {
		b.sandboxWith(ctx, attached.UID)
	}
	return nil
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

// workspaceEvents returns the events of a workspace among the newest of all
// workspaces: events have no column for a workspace.
func (b *collector) workspaceEvents(ctx context.Context, id string) ([]agentlab.Event, error) {
	all, err := b.cfg.Rows.Events(ctx, agentlab.EventFilter{
		Kinds: []string{agentlab.EventWorkspaceState, agentlab.EventWorkspaceSnapshot}, Limit: maxWorkspaceEvents, Tail: true,
	})
	return slices.DeleteFunc(all, func(e agentlab.Event) bool {
		var data struct {
			Workspace string `json:"workspace"`
		}
		return json.Unmarshal([]byte(e.Data), &data) != nil || data.Workspace != id
	}), err
}

// maxWorkspaceEvents is how many events of all workspaces are read.
const maxWorkspaceEvents = 10 * maxRows

package cli

import (
	"context"
	"errors"
	"fmt"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/work"
)

func (a *App) listOrphans(ctx context.Context, c *client.Client) error {
	list, err := c.Orphans(ctx)
	if err != nil {
		return err
	}
	return a.emit(list, func() error {
		t := newTable(a.Stdout, "VMID", "UID", "NAME", "POWER", "REASON")
		for _, o := range list.Items {
			t.row(o.VMID, agentlab.WithoutControls(o.UID), orDash(agentlab.WithoutControls(o.Name)), o.Power, orDash(agentlab.WithoutControls(o.Reason)))
		}
		return t.flush()
	})
}

// destroyOrphans destroys orphans, each after confirmation.
func (a *App) destroyOrphans(ctx context.Context, c *client.Client, ids []string, yes, force bool) error {
	var failed error
	for _, id := range ids {
		err := a.destroyOrphan(ctx, c, id, yes, force)
		if err != nil && len(ids) == 1 {
			return err
		}
		if err != nil {
			a.printError(err)
			failed = errors.Join(failed, work.ExitStatus(exitFailure))
		}
	}
	return failed
}

func (a *App) destroyOrphan(ctx context.Context, c *client.Client, id string, yes, force bool) error {
	if !yes && !a.Confirm(fmt.Sprintf("Destroy the orphan %s, a VM that belongs to no sandbox, with its disk?", agentlab.WithoutControls(id))) {
		return work.UsageErrorf("orphan %s not destroyed: not confirmed", agentlab.WithoutControls(id)).
			WithHint("destroy it without confirmation: agentlab sandbox destroy --orphan --yes %s", agentlab.WithoutControls(id))
	}
	o, err := c.DestroyOrphan(ctx, id)
	switch {
	case force && agentlab.CodeOf(err) == agentlab.CodeNotFound:
		return nil
	case err != nil:
		return err
	}
	return a.done(o, "orphan %d (%s) destroyed", o.VMID, agentlab.WithoutControls(o.UID))
}

package sandboxcmd

import (
	"context"
	"errors"
	"fmt"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/work"
)

func listOrphans(ctx context.Context, a *cli.App, c *client.Client) error {
	list, err := c.Orphans(ctx)
	if err != nil {
		return err
	}
	return a.Emit(list, func() error {
		a.NoteMissing(list.Missing)
		t := cli.NewTable(a.Stdout, "VMID", "UID", "NAME", "POWER", "REASON")
		for _, o := range list.Items {
			t.Row(o.VMID, agentlab.WithoutControls(o.UID), cli.OrDash(agentlab.WithoutControls(o.Name)), o.Power, cli.OrDash(agentlab.WithoutControls(o.Reason)))
		}
		return t.Flush()
	})
}

// destroyOrphans destroys orphans, each after confirmation.
func destroyOrphans(ctx context.Context, a *cli.App, c *client.Client, ids []string, yes, force bool) error {
	var failed error
	for _, id := range ids {
		err := destroyOrphan(ctx, a, c, id, yes, force)
		if err != nil && len(ids) == 1 {
			return err
		}
		if err != nil {
			a.PrintError(err)
			failed = errors.Join(failed, work.ExitStatus(cli.ExitFailure))
		}
	}
	return failed
}

func destroyOrphan(ctx context.Context, a *cli.App, c *client.Client, id string, yes, force bool) error {
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
	return a.Done(o, "orphan %d (%s) destroyed", o.VMID, agentlab.WithoutControls(o.UID))
}

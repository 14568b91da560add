package session

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/work"
)

// Stop stops the sandbox of a session, or suspends it to disk.
func Stop(ctx context.Context, ui work.UI, c *client.Client, s api.Session, suspend, wait bool) (sb api.Sandbox, err error) {
	after := work.LastSandboxEvent(ctx, c, s)
	done := work.IsStopped
	if suspend {
		done = work.IsOnDisk
		sb, err = c.StopSession(ctx, s.ID, true)
	} else {
		sb, err = c.StopSandbox(ctx, fmt.Sprint(s.SandboxVMID), api.SandboxStop{})
	}
	if err == nil && wait && !done(sb) {
		sb, err = work.WaitSandbox(ctx, ui, c, sb, after, done)
	}
	return sb, err
}

// endPrograms asks before the programs of a work tree are ended.
func endPrograms(ctx context.Context, ui work.UI, w *Opened, t guestapi.RepoWorktree, yes bool) error {
	if yes {
		return nil
	}
	p, err := w.Programs(ctx, t.Dir)
	if err != nil || len(p.Names) == 0 {
		return err
	}
	running := strings.Join(p.Names, ", ")
	if ui.Confirm("End " + running + " in " + ShownGuest(t.Dir) + ", and remove the work tree?") {
		return nil
	}
	return agentlab.Errorf(agentlab.CodeConflict, "in %s of session %s runs: %s", ShownGuest(t.Dir), w.Session.Name, running).
		WithHint("end it in its terminal: agentlab attach %s/%s; or end it and remove the work tree: --yes", w.Session.Name, t.Branch)
}

// stopLimit limits the stop at the end of a command, also after an interrupt.
const stopLimit = 2 * time.Minute

// Leave stops the sandbox of a session again if it was started for this command: a
// stopped session stays stopped. What was started in it since then continues.
func Leave(ctx context.Context, ui work.UI, w *Opened) {
	if w == nil || !w.WasStopped {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopLimit)
	defer cancel()
	p, err := w.Programs(ctx, "")
	if err == nil && (len(p.Names) > 0 || p.Shells > 0) {
		err = agentlab.Errorf(agentlab.CodeConflict, "it is in use")
	}
	if err == nil {
		_, err = Stop(ctx, work.Brief(ui), w.C, w.Session, false, true)
	}
	if err != nil {
		ui.Progressf("note: the sandbox of session %[1]s was started for this command, and still runs: %[2]s\n  → agentlab stop %[1]s", w.Session.Name, agentlab.WithoutControls(err.Error()))
		return
	}
	ui.Progressf("the sandbox of session %s, which was started for this command, is stopped again", w.Session.Name)
}

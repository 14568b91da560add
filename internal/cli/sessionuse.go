package cli

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
	"github.com/agentlab-vm/agentlab/internal/work/session"
)

// endPrograms asks before the programs of a work tree are ended.
func (a *App) endPrograms(ctx context.Context, w *openedSession, t guestapi.RepoWorktree, yes bool) error {
	if yes {
		return nil
	}
	p, err := w.Programs(ctx, t.Dir)
	if err != nil || len(p.Names) == 0 {
		return err
	}
	running := strings.Join(p.Names, ", ")
	if a.Confirm("End " + running + " in " + session.ShownGuest(t.Dir) + ", and remove the work tree?") {
		return nil
	}
	return agentlab.Errorf(agentlab.CodeConflict, "in %s of session %s runs: %s", session.ShownGuest(t.Dir), w.session.Name, running).
		WithHint("end it in its terminal: agentlab attach %s/%s; or end it and remove the work tree: --yes", w.session.Name, t.Branch)
}

// newOpened returns a session, as it was before, with its running sandbox.
func newOpened(c *client.Client, s api.Session, sb api.Sandbox, l session.Link) *openedSession {
	stopped := s.Sandbox == "" || work.IsStopped(api.Sandbox{State: s.State})
	s.Sandbox, s.SandboxVMID, s.State = sb.Name, sb.VMID, sb.State
	return &openedSession{Repo: session.Repo{C: c, Sandbox: fmt.Sprint(sb.VMID), Path: l.Path}, session: s, link: l, wasStopped: stopped}
}

// stopLimit limits the stop at the end of a command, also after an interrupt.
const stopLimit = 2 * time.Minute

// leave stops the sandbox of a session again if it was started for this command: a
// stopped session stays stopped. What was started in it since then continues.
func (a *App) leave(ctx context.Context, w *openedSession) {
	if w == nil || !w.wasStopped {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopLimit)
	defer cancel()
	p, err := w.Programs(ctx, "")
	if err == nil && (len(p.Names) > 0 || p.Shells > 0) {
		err = agentlab.Errorf(agentlab.CodeConflict, "it is in use")
	}
	a.brief = true
	if err == nil {
		_, err = a.stopSandbox(ctx, w.C, w.session, false, true)
	}
	if err != nil {
		a.Progressf("note: the sandbox of session %[1]s was started for this command, and still runs: %[2]s\n  → agentlab stop %[1]s", w.session.Name, agentlab.WithoutControls(err.Error()))
		return
	}
	a.Progressf("the sandbox of session %s, which was started for this command, is stopped again", w.session.Name)
}

package session

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/projectfile"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/project"
)

// warnBeforeStart says what would disappoint the user minutes later: that the agent has
// no access to a model, and what is wrong with the host. On a terminal the user decides
// whether to go on without a model, because agents have a login of their own.
func warnBeforeStart(ctx context.Context, ui work.UI, c *client.Client, l Link, o StartOptions) error {
	profile := o.Profile
	if l.Session != "" {
		s, err := c.Session(ctx, l.Session)
		if err == nil && work.IsUp(api.Sandbox{State: s.State}) {
			return nil
		}
		if err == nil {
			profile = s.Profile
		}
	}
	if st, err := c.Status(ctx); err == nil {
		noteHost(ui, st.Findings)
	}
	if o.Agent == ShellOnly {
		return nil
	}
	if profile == "" {
		var err error
		if profile, err = l.Profile(ctx, c); err != nil {
			return err
		}
	}
	// A session is not a job, but its agent needs the same model. Other faults come from
	// the start itself.
	err := c.ValidateJob(ctx, api.JobCreate{Profile: profile, Agent: o.Agent, Task: "-"})
	if agentlab.CodeOf(err) != agentlab.CodePreflight {
		return nil
	}
	hint, _, _ := strings.Cut(agentlab.HintOf(err), "; --no-preflight") // which is an option of jobs
	ui.Progressf("warning: %s\n  → %s", agentlab.WithoutControls(err.Error()), agentlab.WithoutControls(hint))
	if !ui.Asks() || o.Detach || ui.Confirm("Start it nevertheless?") {
		return nil
	}
	return work.UsageErrorf("nothing was started: not confirmed").WithHint("%s", hint)
}

// noteHost says what the last check of the host has found, such as that CPUs are
// emulated: it can make a sandbox slow, or fail.
func noteHost(ui work.UI, all []api.Finding) {
	var found []string
	for _, f := range all {
		if f.Level != "ok" {
			found = append(found, agentlab.WithoutControls(f.Name+": "+f.Detail))
		}
	}
	if len(found) > 0 {
		ui.Progressf("note: the check of the host found: %s\n  → agentlab status", strings.Join(found, "; "))
	}
}

// newSession returns the request for the session of the repository in dir, if there is
// none. It does not wait for the build of the image dev, unless the repository needs
// Docker.
func (o *StartOptions) newSession(dir string, p projectfile.File) api.SessionCreate {
	docker := p.Services != "" || o.Devcontainer == agentlab.DevcontainerOn || o.Devcontainer != agentlab.DevcontainerOff && project.HasContainer(dir)
	return api.SessionCreate{Profile: o.Profile, Backend: o.Backend, Image: cmp.Or(o.Image, p.Image), Quick: !docker}
}

// noteQuick says that a new session has not the image of its profile, because that is
// not built.
func noteQuick(ctx context.Context, ui work.UI, c *client.Client, s api.Session) {
	p, err := c.Profile(ctx, s.Profile)
	if err != nil || s.Image == "" || p.Image == "" {
		return
	}
	ui.Progressf("note: the session has the smaller image %s, because %s is not built\n  → build it for later sessions: agentlab image build %[2]s; this one gets it with 'agentlab start --fresh'", s.Image, agentlab.WithoutControls(p.Image))
}

// noteUnfinished says what remains of a start that ended early. Its sandbox is made or
// started by the daemon, which continues.
func noteUnfinished(ui work.UI, s api.Session, err error) {
	if !errors.Is(err, context.Canceled) && agentlab.CodeOf(err) != agentlab.CodeUnavailable {
		return
	}
	ui.Progressf("session %s exists, and its sandbox may run or still be started\n  → continue: agentlab start\n  → stop it: agentlab stop %[1]s; or delete it: agentlab rm %[1]s", s.Name)
}

// noteUnbootable says what a new VM leaves behind.
func noteUnbootable(ui work.UI, s api.Session, sb api.Sandbox) {
	ui.Progressf(`warning: the VM of session %s does not start again: %s
  a new VM gets its /workspace; everything else is on the disk of sandbox %d, which is kept until %s
  → its log: agentlab sandbox logs %[3]d
  → try it once more: agentlab sandbox stop %[3]d, then agentlab sandbox start %[3]d
  → read its disk: docs/interactive.md, "After a crash"`, s.Name, agentlab.WithoutControls(sb.Reason), sb.VMID, work.LocalTime(sb.LeaseExpiresAt))
}

// destroyFailed destroys the former sandboxes of a session that have failed: a resume
// replaces them, and leaves them for a look at their logs. Their work is on the
// workspace. The number of one can be that of another sandbox by now.
func destroyFailed(ctx context.Context, ui work.UI, c *client.Client, s api.Session) error {
	for _, h := range s.History {
		sb, err := c.Sandbox(ctx, fmt.Sprint(h.SandboxVMID))
		if agentlab.CodeOf(err) == agentlab.CodeNotFound {
			continue
		}
		if err != nil {
			return err
		}
		state := agentlab.SandboxState(sb.State)
		if sb.UID != h.SandboxUID || state != agentlab.SandboxFailed && state != agentlab.SandboxTimeout {
			continue
		}
		r := work.RequestChange(ctx, c, fmt.Sprint(sb.VMID), true, c.DestroySandbox)
		done := func(sb api.Sandbox) bool { return work.IsDestroyed(sb) || work.IsKept(sb) }
		if r.Err == nil && !done(r.Sb) {
			_, r.Err = work.WaitSandbox(ctx, ui, c, r.Sb, r.After, done)
		}
		if r.Err != nil {
			return r.Err
		}
	}
	return nil
}

package session

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/guestrun"
)

// lossNoticed limits the time until the daemon finds out that a VM has ended.
const lossNoticed = time.Minute

// Resume continues the sandbox of a session and waits until commands run in it.
// After a crash of the host the daemon may not have found out yet that a VM has ended:
// then the session is resumed again.
func Resume(ctx context.Context, ui work.UI, c *client.Client, s api.Session, ttl time.Duration) (api.Sandbox, error) {
	return resumeFor(ctx, ui, c, s, ttl, func(sandbox string) error {
		defer work.SaySlow(ui, "waiting for the sandbox to run a command")()
		return guestrun.Run(ctx, c, sandbox, guestapi.ExecRequest{Command: []string{"true"}}, nil, io.Discard)
	})
}

// resumeFor is Resume with the caller's first use of the sandbox. try returns an
// error if the VM has ended; then it runs again.
func resumeFor(ctx context.Context, ui work.UI, c *client.Client, s api.Session, ttl time.Duration, try func(sandbox string) error) (api.Sandbox, error) {
	brief := work.Brief(ui)
	for began := time.Now(); ; {
		after := work.LastSandboxEvent(ctx, c, s)
		sb, err := c.ResumeSession(ctx, s.ID, api.SessionResume{TTLMinutes: int(ttl / time.Minute)})
		if err == nil && !work.IsUp(sb) {
			switch {
			case work.IsStopped(sb) && sb.Reason != "":
				ui.Progressf("the VM of session %s had ended (%s); its disk is started again", s.Name, agentlab.WithoutControls(sb.Reason))
			case work.IsStopped(sb) || sb.State == string(agentlab.SandboxSuspended):
				ui.Progressf("starting the VM of session %s", s.Name)
			}
			sb, err = work.WaitSandbox(ctx, brief, c, sb, after, work.IsUp)
		}
		if err != nil && sb.Unbootable && s.SandboxVMID != 0 {
			noteUnbootable(ui, s, sb)
			s.SandboxVMID = 0
			continue
		}
		if err != nil {
			return sb, err
		}
		err = try(fmt.Sprint(sb.VMID))
		if err == nil || ctx.Err() != nil || time.Since(began) > lossNoticed {
			return sb, err
		}
		s.SandboxVMID = sb.VMID
		if err := work.SleepOr(ctx, time.Second); err != nil {
			return sb, err
		}
	}
}

// slow is work.SaySlow for a Repo.
func slow(ui work.UI) func(what string) (stop func()) {
	return func(what string) func() { return work.SaySlow(ui, what) }
}

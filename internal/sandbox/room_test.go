package sandbox_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/sandbox/sandboxtest"
)

// A full disk refuses what is new, leaves what is stopped as it is, and holds
// up what was asked for before, until there is room.
func TestNoRoom(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		ctx := context.Background()
		sb := w.Create(agentlab.SandboxRequest{Name: "before"})
		w.Until(sb.VMID, agentlab.SandboxReady)
		if _, err := w.Svc.Stop(ctx, sb.VMID, 0); err != nil {
			w.Fatal(err)
		}
		w.Until(sb.VMID, agentlab.SandboxStopped)
		w.Full.Store(true)
		_, err := w.Svc.Create(ctx, agentlab.SandboxRequest{Name: "new"})
		sandboxtest.WantCode(w.T, err, agentlab.CodeNoSpace)
		_, err = w.Svc.Start(ctx, sb.VMID)
		sandboxtest.WantCode(w.T, err, agentlab.CodeNoSpace)
		if got := w.Get(sb.VMID); got.State != agentlab.SandboxStopped || got.Desired != agentlab.DesiredStopped {
			w.Errorf("%s, to be %s", got.State, got.Desired)
		}
		w.Full.Store(false)
		waiting := w.Create(agentlab.SandboxRequest{Name: "waiting"})
		w.Full.Store(true)
		time.Sleep(time.Minute)
		if got := w.Get(waiting.VMID); got.State != agentlab.SandboxProvisioning {
			w.Errorf("without room: %s: %s", got.State, got.Reason)
		}
		w.Full.Store(false)
		w.Until(waiting.VMID, agentlab.SandboxReady)
	})
}

// A guest that the host pauses, and lets go on, is reported.
func TestPausedGuestIsReported(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		sb := w.Create(agentlab.SandboxRequest{Name: "hog"})
		w.Until(sb.VMID, agentlab.SandboxReady)
		pause := func(why string) {
			if err := w.Host.PauseVM(backend.RefOf(sb), why); err != nil {
				w.Fatal(err)
			}
			time.Sleep(time.Minute)
		}
		told := func() (out []string) {
			for _, e := range w.Events(agentlab.EventSandboxState) {
				if strings.Contains(e.Data, "paused") {
					out = append(out, e.Message)
				}
			}
			return out
		}
		pause("the host's disk has 7 MiB free")
		pause("the host's disk has 6 MiB free")
		if got := told(); len(got) != 1 || got[0] != "the guest of sandbox hog is paused: the host's disk has 7 MiB free" {
			w.Errorf("events %q", got)
		}
		if got := w.Svc.Paused(); got[sb.VMID] != "the host's disk has 6 MiB free" || len(got) != 1 {
			w.Errorf("paused: %v", got)
		}
		pause("")
		if got := told(); len(got) != 2 || got[1] != "the guest of sandbox hog continues to run" || len(w.Svc.Paused()) != 0 {
			w.Errorf("events %q, paused %v", got, w.Svc.Paused())
		}
	})
}

// Words about a sandbox are kept without the secrets of its job, or its own
// when it has none.
func TestReasonsAreRedacted(t *testing.T) {
	for name, job := range map[string]string{"job": agentlab.NewJobID(), "no job": ""} {
		t.Run(name, func(t *testing.T) { reasonsAreRedacted(t, job) })
	}
}

func reasonsAreRedacted(t *testing.T, job string) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		sb := w.Create(agentlab.SandboxRequest{Name: "leaky", JobID: job, Keepalive: new(true)})
		w.Until(sb.VMID, agentlab.SandboxReady)
		if err := w.Host.CrashVM(backend.RefOf(sb), "the guest said hunter2"); err != nil {
			w.Fatal(err)
		}
		sb = w.Until(sb.VMID, agentlab.SandboxFailed)
		if !strings.Contains(sb.Reason, "[redacted]") || strings.Contains(sb.Reason, "hunter2") {
			w.Errorf("reason %q", sb.Reason)
		}
		for _, e := range w.Events(agentlab.EventSandboxState) {
			if strings.Contains(e.Message+e.Data, "hunter2") {
				w.Errorf("event %+v", e)
			}
		}
	})
}

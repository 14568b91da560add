package sandbox_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// A full disk refuses what is new, leaves what is stopped as it is, and holds
// up what was asked for before, until there is room.
func TestNoRoom(t *testing.T) {
	inWorld(t, func(w *world) {
		ctx := context.Background()
		sb := w.create(agentlab.SandboxRequest{Name: "before"})
		w.until(sb.VMID, agentlab.SandboxReady)
		if _, err := w.svc.Stop(ctx, sb.VMID, 0); err != nil {
			w.Fatal(err)
		}
		w.until(sb.VMID, agentlab.SandboxStopped)
		w.full.Store(true)
		_, err := w.svc.Create(ctx, agentlab.SandboxRequest{Name: "new"})
		wantCode(w.T, err, agentlab.CodeNoSpace)
		_, err = w.svc.Start(ctx, sb.VMID)
		wantCode(w.T, err, agentlab.CodeNoSpace)
		if got := w.get(sb.VMID); got.State != agentlab.SandboxStopped || got.Desired != agentlab.DesiredStopped {
			w.Errorf("%s, to be %s", got.State, got.Desired)
		}
		w.full.Store(false)
		waiting := w.create(agentlab.SandboxRequest{Name: "waiting"})
		w.full.Store(true)
		time.Sleep(time.Minute)
		if got := w.get(waiting.VMID); got.State != agentlab.SandboxProvisioning {
			w.Errorf("without room: %s: %s", got.State, got.Reason)
		}
		w.full.Store(false)
		w.until(waiting.VMID, agentlab.SandboxReady)
	})
}

// A guest that the host pauses, and lets go on, is reported.
func TestPausedGuestIsReported(t *testing.T) {
	inWorld(t, func(w *world) {
		sb := w.create(agentlab.SandboxRequest{Name: "hog"})
		w.until(sb.VMID, agentlab.SandboxReady)
		pause := func(why string) {
			if err := w.host.PauseVM(backend.RefOf(sb), why); err != nil {
				w.Fatal(err)
			}
			time.Sleep(time.Minute)
		}
		told := func() (out []string) {
			for _, e := range w.events(agentlab.EventSandboxState) {
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
		if got := w.svc.Paused(); got[sb.VMID] != "the host's disk has 6 MiB free" || len(got) != 1 {
			w.Errorf("paused: %v", got)
		}
		pause("")
		if got := told(); len(got) != 2 || got[1] != "the guest of sandbox hog continues to run" || len(w.svc.Paused()) != 0 {
			w.Errorf("events %q, paused %v", got, w.svc.Paused())
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
	inWorld(t, func(w *world) {
		sb := w.create(agentlab.SandboxRequest{Name: "leaky", JobID: job, Keepalive: new(true)})
		w.until(sb.VMID, agentlab.SandboxReady)
		if err := w.host.CrashVM(backend.RefOf(sb), "the guest said hunter2"); err != nil {
			w.Fatal(err)
		}
		sb = w.until(sb.VMID, agentlab.SandboxFailed)
		if !strings.Contains(sb.Reason, "[redacted]") || strings.Contains(sb.Reason, "hunter2") {
			w.Errorf("reason %q", sb.Reason)
		}
		for _, e := range w.events(agentlab.EventSandboxState) {
			if strings.Contains(e.Message+e.Data, "hunter2") {
				w.Errorf("event %+v", e)
			}
		}
	})
}

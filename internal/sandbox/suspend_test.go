package sandbox_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/internal/sandbox/sandboxtest"
)

func TestSuspendAndResume(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		ctx := context.Background()
		sb := w.Suspended("play")
		if p := w.Power(sb); p != backend.PowerSuspended {
			w.Errorf("power %s", p)
		}
		_, err := w.Svc.DialGuest(ctx, sb.VMID, 7)
		sandboxtest.WantCode(t, err, agentlab.CodeConflict)
		_, err = w.Svc.Start(ctx, sb.VMID)
		sandboxtest.WantCode(t, err, agentlab.CodeConflict)
		w.Restart() // a process that knows nothing of it leaves it as it is
		if _, err := w.Svc.Suspend(ctx, sb.VMID, false); err != nil {
			w.Errorf("suspending a suspended one: %v", err)
		}
		for range 2 {
			if _, err := w.Svc.Resume(ctx, sb.VMID); err != nil {
				w.Fatal(err)
			}
			w.Until(sb.VMID, agentlab.SandboxReady)
		}
		if p := w.Power(sb); p != backend.PowerRunning {
			w.Errorf("power %s", p)
		}
	})
}

// The end of a suspended sandbox in different cases.
func TestSuspendedEnds(t *testing.T) {
	for name, test := range map[string]struct {
		do   func(w *sandboxtest.World, sb agentlab.Sandbox) error
		want agentlab.SandboxState
	}{
		"stopped": {func(w *sandboxtest.World, sb agentlab.Sandbox) error {
			_, err := w.Svc.Stop(context.Background(), sb.VMID, time.Hour)
			return err
		}, agentlab.SandboxStopped},
		"destroyed": {func(w *sandboxtest.World, sb agentlab.Sandbox) error {
			_, err := w.Svc.Destroy(context.Background(), sb.VMID)
			return err
		}, agentlab.SandboxDestroyed},
		"lease": {func(*sandboxtest.World, agentlab.Sandbox) error { time.Sleep(2 * time.Hour); return nil }, agentlab.SandboxDestroyed},
		"crashed": {func(w *sandboxtest.World, sb agentlab.Sandbox) error {
			return w.Host.CrashVM(backend.RefOf(sb), "power cut")
		}, agentlab.SandboxFailed},
		"vanished": {func(w *sandboxtest.World, sb agentlab.Sandbox) error {
			return w.Host.RemoveBehindBack(backend.RefOf(sb))
		}, agentlab.SandboxFailed},
	} {
		t.Run(name, func(t *testing.T) {
			sandboxtest.InWorld(t, func(w *sandboxtest.World) {
				sb := w.Suspended("play")
				if err := test.do(w, sb); err != nil {
					w.Fatal(err)
				}
				w.Until(sb.VMID, test.want)
			})
		})
	}
}

// It was resumed by hand, so it is suspended again.
func TestResumedManually(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		sb := w.Suspended("play")
		if err := w.Driver.Resume(context.Background(), backend.RefOf(sb)); err != nil {
			w.Fatal(err)
		}
		for w.Power(sb) != backend.PowerSuspended {
			time.Sleep(time.Second)
		}
	})
}

// A backend that is in the way for a while is asked again.
func TestSuspendIsTriedAgain(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		sb := w.Create(agentlab.SandboxRequest{Name: "play"})
		w.Until(sb.VMID, agentlab.SandboxReady)
		w.Host.Inject(fake.Fault{Op: fake.OpSuspend, Times: 2, Err: agentlab.Errorf(agentlab.CodeBusy, "locked")})
		w.Host.Inject(fake.Fault{Op: fake.OpResume, At: fake.After, Times: 2, Err: agentlab.Errorf(agentlab.CodeUnknownOutcome, "the answer was lost")})
		if _, err := w.Svc.Suspend(context.Background(), sb.VMID, false); err != nil {
			w.Fatal(err)
		}
		w.Until(sb.VMID, agentlab.SandboxSuspended)
		if _, err := w.Svc.Resume(context.Background(), sb.VMID); err != nil {
			w.Fatal(err)
		}
		w.Until(sb.VMID, agentlab.SandboxReady)
	})
}

// A backend that cannot suspend says so, whatever state the sandbox is in: to
// wait for READY would not help.
func TestSuspendIsNotOfEveryBackend(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		w.Kill()
		w.Plain = true
		w.Begin()
		sb := w.Create(agentlab.SandboxRequest{Name: "play"})
		for _, toDisk := range []bool{false, true, false, true} {
			_, err := w.Svc.Suspend(context.Background(), sb.VMID, toDisk)
			sandboxtest.WantCode(t, err, agentlab.CodeUnsupported)
			w.Until(sb.VMID, agentlab.SandboxReady)
		}
	})
}

// A sandbox that is suspended to disk survives the end of the daemon and of the
// host, and continues with the memory that it had.
func TestSuspendToDisk(t *testing.T) {
	for name, between := range map[string]func(*sandboxtest.World){
		"at once": func(*sandboxtest.World) {}, "restart": (*sandboxtest.World).Restart, "host restart": (*sandboxtest.World).HostRestart,
	} {
		for _, paused := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, paused %t", name, paused), func(t *testing.T) {
				sandboxtest.InWorld(t, func(w *sandboxtest.World) {
					ctx := context.Background()
					sb := w.Create(agentlab.SandboxRequest{Name: "play"})
					w.Until(sb.VMID, agentlab.SandboxReady)
					boot := w.Boot(sb)
					if paused {
						if _, err := w.Svc.Suspend(ctx, sb.VMID, false); err != nil {
							t.Fatal(err)
						}
						w.Until(sb.VMID, agentlab.SandboxSuspended)
					}
					w.SuspendToDisk(sb)
					if _, err := w.Svc.Suspend(ctx, sb.VMID, false); err != nil {
						t.Errorf("pausing it: %v", err)
					}
					between(w)
					time.Sleep(time.Minute) // audits see it
					if got := w.Get(sb.VMID); got.State != agentlab.SandboxSuspended || !got.OnDisk || got.Desired != agentlab.DesiredSuspendedToDisk {
						t.Fatalf("it is %s, on disk %t, desired %s", got.State, got.OnDisk, got.Desired)
					}
					if _, err := w.Svc.Resume(ctx, sb.VMID); err != nil {
						t.Fatal(err)
					}
					if got := w.Until(sb.VMID, agentlab.SandboxReady); got.OnDisk || w.Boot(got) != boot {
						t.Errorf("on disk %t, boot %s, want %s", got.OnDisk, w.Boot(got), boot)
					}
					w.DestroyAll()
				})
			})
		}
	}
}

// Whatever step of a suspension to disk the daemon dies in, the next one
// completes it.
func TestSuspendToDiskIsCompleted(t *testing.T) {
	for _, op := range []fake.Op{fake.OpSuspendToDisk, fake.OpResume} {
		for _, at := range []fake.Point{fake.Before, fake.After} {
			t.Run(fmt.Sprintf("%s %s", op, at), func(t *testing.T) {
				sandboxtest.InWorld(t, func(w *sandboxtest.World) {
					ctx := context.Background()
					sb := w.Create(agentlab.SandboxRequest{Name: "play"})
					w.Until(sb.VMID, agentlab.SandboxReady)
					boot, dead := w.Boot(sb), make(chan struct{})
					w.Host.Inject(fake.Fault{Op: op, At: at, Times: 1, Crash: true, Hook: func(backend.Spec) { close(dead) }})
					if _, err := w.Svc.Suspend(ctx, sb.VMID, true); err != nil {
						t.Fatal(err)
					}
					if op == fake.OpResume {
						w.Until(sb.VMID, agentlab.SandboxSuspended)
						if _, err := w.Svc.Resume(ctx, sb.VMID); err != nil {
							t.Fatal(err)
						}
					}
					<-dead
					w.Restart()
					if op == fake.OpSuspendToDisk {
						w.UntilIt(sb.VMID, func(sb agentlab.Sandbox) bool { return sb.OnDisk })
						if _, err := w.Svc.Resume(ctx, sb.VMID); err != nil {
							t.Fatal(err)
						}
					}
					w.Until(sb.VMID, agentlab.SandboxReady)
					if got := w.Boot(sb); got != boot {
						t.Errorf("boot %s, want %s", got, boot)
					}
				})
			})
		}
	}
}

// The end of a sandbox that is suspended to disk: its lease still ends, and a
// stop discards its memory.
func TestSuspendedToDiskEnds(t *testing.T) {
	for name, test := range map[string]struct {
		do   func(w *sandboxtest.World, sb agentlab.Sandbox) error
		want agentlab.SandboxState
	}{
		"stopped": {func(w *sandboxtest.World, sb agentlab.Sandbox) error {
			_, err := w.Svc.Stop(context.Background(), sb.VMID, time.Hour)
			return err
		}, agentlab.SandboxStopped},
		"destroyed": {func(w *sandboxtest.World, sb agentlab.Sandbox) error {
			_, err := w.Svc.Destroy(context.Background(), sb.VMID)
			return err
		}, agentlab.SandboxDestroyed},
		"lease": {func(*sandboxtest.World, agentlab.Sandbox) error { time.Sleep(2 * time.Hour); return nil }, agentlab.SandboxDestroyed},
		"lease while no daemon runs": {func(w *sandboxtest.World, _ agentlab.Sandbox) error {
			w.Kill()
			time.Sleep(2 * time.Hour)
			w.Begin()
			return nil
		}, agentlab.SandboxDestroyed},
		"vanished": {func(w *sandboxtest.World, sb agentlab.Sandbox) error {
			return w.Host.RemoveBehindBack(backend.RefOf(sb))
		}, agentlab.SandboxFailed},
	} {
		t.Run(name, func(t *testing.T) {
			sandboxtest.InWorld(t, func(w *sandboxtest.World) {
				sb := w.Create(agentlab.SandboxRequest{Name: "play"})
				w.Until(sb.VMID, agentlab.SandboxReady)
				boot := w.Boot(sb)
				w.SuspendToDisk(sb)
				if err := test.do(w, sb); err != nil {
					t.Fatal(err)
				}
				if got := w.Until(sb.VMID, test.want); got.OnDisk {
					t.Error("its memory is still on disk")
				}
				if test.want != agentlab.SandboxStopped {
					return
				}
				if _, err := w.Svc.Start(context.Background(), sb.VMID); err != nil {
					t.Fatal(err)
				}
				if w.Until(sb.VMID, agentlab.SandboxReady); w.Boot(sb) == boot {
					t.Error("its memory was not discarded")
				}
			})
		})
	}
}

// The backend enforces the lease of a sandbox again after its resume, also on a
// host that was restarted and has lost the deadline.
func TestResumeSetsDeadline(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		sb := w.Create(agentlab.SandboxRequest{Name: "play"})
		w.Until(sb.VMID, agentlab.SandboxReady)
		w.SuspendToDisk(sb)
		w.HostRestart()
		before := w.Host.Calls(fake.OpSetDeadline)
		w.Host.Inject(fake.Fault{Op: fake.OpResume, Times: 1, Hook: func(backend.Spec) {
			if w.Host.Calls(fake.OpSetDeadline) == before {
				t.Error("no deadline was set before the resume")
			}
		}})
		if _, err := w.Svc.Resume(context.Background(), sb.VMID); err != nil {
			t.Fatal(err)
		}
		w.Until(sb.VMID, agentlab.SandboxReady)
	})
}

// A memory that cannot be loaded is kept; the row and an event say what to do.
func TestResumeUnsupported(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		ctx := context.Background()
		sb := w.Create(agentlab.SandboxRequest{Name: "play"})
		w.Until(sb.VMID, agentlab.SandboxReady)
		w.SuspendToDisk(sb)
		repaired := w.Host.Inject(fake.Fault{Op: fake.OpResume, Err: agentlab.Errorf(agentlab.CodeUnsupported, "another processor")})
		for range 2 {
			if _, err := w.Svc.Resume(ctx, sb.VMID); err != nil {
				t.Fatal(err)
			}
			got := w.UntilIt(sb.VMID, func(sb agentlab.Sandbox) bool { return sb.Desired == agentlab.DesiredSuspendedToDisk })
			if got.State != agentlab.SandboxSuspended || !got.OnDisk || !strings.Contains(got.Reason, "another processor") || !strings.Contains(got.Reason, fmt.Sprintf("agentlab sandbox stop %d", sb.VMID)) {
				t.Fatalf("%+v", got)
			}
			w.Restart()
		}
		refused := 0
		for _, e := range w.Events(agentlab.EventSandboxState) {
			if strings.Contains(e.Data, `"refused"`) && strings.Contains(e.Data, `"code":"unsupported"`) && strings.Contains(e.Message, "cannot be resumed: another processor") {
				refused++
			}
		}
		if refused != 2 {
			t.Errorf("%d events about it, want 2", refused)
		}
		repaired()
		if _, err := w.Svc.Resume(ctx, sb.VMID); err != nil {
			t.Fatal(err)
		}
		if got := w.Until(sb.VMID, agentlab.SandboxReady); got.Reason != "" {
			t.Errorf("reason %q", got.Reason)
		}
	})
}

// A sandbox that cannot be suspended to disk continues as it was. What may end by
// itself is tried for a limited time.
func TestSuspendToDiskGivenUp(t *testing.T) {
	for _, c := range []struct {
		paused bool
		code   agentlab.Code
	}{
		{false, agentlab.CodeNoSpace}, {true, agentlab.CodeNoSpace}, {false, agentlab.CodeInternal}, {true, agentlab.CodeInternal},
		{false, agentlab.CodeUnavailable}, {true, agentlab.CodeUnavailable}, {false, agentlab.CodeConflict},
	} {
		paused := c.paused
		t.Run(fmt.Sprintf("%s paused %t", c.code, paused), func(t *testing.T) {
			sandboxtest.InWorld(t, func(w *sandboxtest.World) {
				ctx := context.Background()
				sb := w.Create(agentlab.SandboxRequest{Name: "play"})
				w.Until(sb.VMID, agentlab.SandboxReady)
				want, state := agentlab.DesiredRunning, agentlab.SandboxReady
				if paused {
					want, state = agentlab.DesiredSuspended, agentlab.SandboxSuspended
					if _, err := w.Svc.Suspend(ctx, sb.VMID, false); err != nil {
						t.Fatal(err)
					}
					w.Until(sb.VMID, agentlab.SandboxSuspended)
				}
				w.Host.Inject(fake.Fault{Op: fake.OpSuspendToDisk, Err: agentlab.Errorf(c.code, "the disk is odd")})
				began := time.Now()
				if _, err := w.Svc.Suspend(ctx, sb.VMID, true); err != nil {
					t.Fatal(err)
				}
				got := w.UntilIt(sb.VMID, func(sb agentlab.Sandbox) bool { return sb.Desired == want })
				once := c.code == agentlab.CodeNoSpace || c.code == agentlab.CodeInternal
				// Of the bubble. Calls are not counted: the request interrupts a step
				// that has begun to carry it out, and that step is repeated.
				took := time.Since(began)
				if got.State != state || got.OnDisk || once != (took < time.Minute) {
					t.Errorf("it is %s, on disk %t, after %s", got.State, got.OnDisk, took)
				}
				refused := 0
				for _, e := range w.Events(agentlab.EventSandboxState) {
					if strings.Contains(e.Data, `"refused"`) && strings.Contains(e.Data, `"hint":"try again`) && strings.Contains(e.Message, "cannot be suspended: the disk is odd") {
						refused++
					}
				}
				if refused != 1 {
					t.Errorf("%d events have the reason", refused)
				}
			})
		})
	}
}

// A guest that is suspended has written its disks: nothing that it wrote to files is lost
// with its memory.
func TestSuspendedGuestHasWritten(t *testing.T) {
	for name, end := range map[string]func(w *sandboxtest.World, sb agentlab.Sandbox){
		"stopped": func(w *sandboxtest.World, sb agentlab.Sandbox) {
			sandboxtest.Must(w.Svc.Stop(context.Background(), sb.VMID, 0))(w.T)
			w.Until(sb.VMID, agentlab.SandboxStopped)
			sandboxtest.Must(w.Svc.Destroy(context.Background(), sb.VMID))(w.T)
		},
		"destroyed": func(w *sandboxtest.World, sb agentlab.Sandbox) {
			sandboxtest.Must(w.Svc.Destroy(context.Background(), sb.VMID))(w.T)
		},
		"lease": func(*sandboxtest.World, agentlab.Sandbox) {},
	} {
		for _, toDisk := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/%t", name, toDisk), func(t *testing.T) {
				sandboxtest.InWorld(t, func(w *sandboxtest.World) {
					sb := w.Create(sandboxtest.OnWorkspace("data", 0))
					w.Until(sb.VMID, agentlab.SandboxReady)
					w.Sh(sb, "echo hello > /work/unwritten")
					sandboxtest.Must(w.Svc.Suspend(context.Background(), sb.VMID, toDisk))(w.T)
					w.Until(sb.VMID, agentlab.SandboxSuspended)
					end(w, sb)
					w.Until(sb.VMID, agentlab.SandboxDestroyed)
					next := w.Create(sandboxtest.OnWorkspace("data", 0))
					w.Until(next.VMID, agentlab.SandboxReady)
					if got := w.Sh(next, "cat /work/written"); got != "hello" {
						t.Errorf("what its guest had in memory is lost: %q", got)
					}
				})
			})
		}
	}
}

// A guest that does not answer is suspended, and an event reports what may be lost.
func TestSilentGuestIsSuspended(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		sb := w.Create(agentlab.SandboxRequest{Name: "play"})
		w.Until(sb.VMID, agentlab.SandboxReady)
		w.Host.Inject(fake.Fault{Op: fake.OpDialControl, Err: agentlab.Errorf(agentlab.CodeUnavailable, "the guest does not answer")})
		sandboxtest.Must(w.Svc.Suspend(context.Background(), sb.VMID, false))(w.T)
		w.Until(sb.VMID, agentlab.SandboxSuspended)
		for _, e := range w.Events(agentlab.EventSandboxState) {
			if strings.Contains(e.Message, "has not written its disks") {
				return
			}
		}
		t.Error("there is no event")
	})
}

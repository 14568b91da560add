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
)

func (w *world) suspended(name string) agentlab.Sandbox {
	w.Helper()
	sb := w.create(agentlab.SandboxRequest{Name: name})
	_, err := w.svc.Suspend(context.Background(), sb.VMID, false)
	wantCode(w.T, err, agentlab.CodeConflict) // it is not READY yet
	w.until(sb.VMID, agentlab.SandboxReady)
	if _, err := w.svc.Suspend(context.Background(), sb.VMID, false); err != nil {
		w.Fatal(err)
	}
	return w.until(sb.VMID, agentlab.SandboxSuspended)
}

func TestSuspendAndResume(t *testing.T) {
	inWorld(t, func(w *world) {
		ctx := context.Background()
		sb := w.suspended("play")
		if p := w.power(sb); p != backend.PowerSuspended {
			w.Errorf("power %s", p)
		}
		_, err := w.svc.DialGuest(ctx, sb.VMID, 7)
		wantCode(t, err, agentlab.CodeConflict)
		_, err = w.svc.Start(ctx, sb.VMID)
		wantCode(t, err, agentlab.CodeConflict)
		w.restart() // a process that knows nothing of it leaves it as it is
		if _, err := w.svc.Suspend(ctx, sb.VMID, false); err != nil {
			w.Errorf("suspending a suspended one: %v", err)
		}
		for range 2 {
			if _, err := w.svc.Resume(ctx, sb.VMID); err != nil {
				w.Fatal(err)
			}
			w.until(sb.VMID, agentlab.SandboxReady)
		}
		if p := w.power(sb); p != backend.PowerRunning {
			w.Errorf("power %s", p)
		}
	})
}

// The end of a suspended sandbox in different cases.
func TestSuspendedEnds(t *testing.T) {
	for name, test := range map[string]struct {
		do   func(w *world, sb agentlab.Sandbox) error
		want agentlab.SandboxState
	}{
		"stopped": {func(w *world, sb agentlab.Sandbox) error {
			_, err := w.svc.Stop(context.Background(), sb.VMID, time.Hour)
			return err
		}, agentlab.SandboxStopped},
		"destroyed": {func(w *world, sb agentlab.Sandbox) error {
			_, err := w.svc.Destroy(context.Background(), sb.VMID)
			return err
		}, agentlab.SandboxDestroyed},
		"lease": {func(*world, agentlab.Sandbox) error { time.Sleep(2 * time.Hour); return nil }, agentlab.SandboxDestroyed},
		"crashed": {func(w *world, sb agentlab.Sandbox) error {
			return w.host.CrashVM(backend.RefOf(sb), "power cut")
		}, agentlab.SandboxFailed},
		"vanished": {func(w *world, sb agentlab.Sandbox) error {
			return w.host.RemoveBehindBack(backend.RefOf(sb))
		}, agentlab.SandboxFailed},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				sb := w.suspended("play")
				if err := test.do(w, sb); err != nil {
					w.Fatal(err)
				}
				w.until(sb.VMID, test.want)
			})
		})
	}
}

// It was resumed by hand, so it is suspended again.
func TestResumedManually(t *testing.T) {
	inWorld(t, func(w *world) {
		sb := w.suspended("play")
		if err := w.driver.Resume(context.Background(), backend.RefOf(sb)); err != nil {
			w.Fatal(err)
		}
		for w.power(sb) != backend.PowerSuspended {
			time.Sleep(time.Second)
		}
	})
}

// A backend that is in the way for a while is asked again.
func TestSuspendIsTriedAgain(t *testing.T) {
	inWorld(t, func(w *world) {
		sb := w.create(agentlab.SandboxRequest{Name: "play"})
		w.until(sb.VMID, agentlab.SandboxReady)
		w.host.Inject(fake.Fault{Op: fake.OpSuspend, Times: 2, Err: agentlab.Errorf(agentlab.CodeBusy, "locked")})
		w.host.Inject(fake.Fault{Op: fake.OpResume, At: fake.After, Times: 2, Err: agentlab.Errorf(agentlab.CodeUnknownOutcome, "the answer was lost")})
		if _, err := w.svc.Suspend(context.Background(), sb.VMID, false); err != nil {
			w.Fatal(err)
		}
		w.until(sb.VMID, agentlab.SandboxSuspended)
		if _, err := w.svc.Resume(context.Background(), sb.VMID); err != nil {
			w.Fatal(err)
		}
		w.until(sb.VMID, agentlab.SandboxReady)
	})
}

// A backend that cannot suspend says so, whatever state the sandbox is in: to
// wait for READY would not help.
func TestSuspendIsNotOfEveryBackend(t *testing.T) {
	inWorld(t, func(w *world) {
		w.kill()
		w.plain = true
		w.begin()
		sb := w.create(agentlab.SandboxRequest{Name: "play"})
		for _, toDisk := range []bool{false, true, false, true} {
			_, err := w.svc.Suspend(context.Background(), sb.VMID, toDisk)
			wantCode(t, err, agentlab.CodeUnsupported)
			w.until(sb.VMID, agentlab.SandboxReady)
		}
	})
}

func (w *world) suspendToDisk(sb agentlab.Sandbox) agentlab.Sandbox {
	w.Helper()
	if _, err := w.svc.Suspend(context.Background(), sb.VMID, true); err != nil {
		w.Fatal(err)
	}
	return w.untilIt(sb.VMID, func(sb agentlab.Sandbox) bool { return sb.OnDisk })
}

// boot returns the ID of the current boot of a guest.
func (w *world) boot(sb agentlab.Sandbox) string {
	w.Helper()
	return w.health(sb).BootID
}

// A sandbox that is suspended to disk survives the end of the daemon and of the
// host, and continues with the memory that it had.
func TestSuspendToDisk(t *testing.T) {
	for name, between := range map[string]func(*world){
		"at once": func(*world) {}, "restart": (*world).restart, "host restart": (*world).hostRestart,
	} {
		for _, paused := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, paused %t", name, paused), func(t *testing.T) {
				inWorld(t, func(w *world) {
					ctx := context.Background()
					sb := w.create(agentlab.SandboxRequest{Name: "play"})
					w.until(sb.VMID, agentlab.SandboxReady)
					boot := w.boot(sb)
					if paused {
						if _, err := w.svc.Suspend(ctx, sb.VMID, false); err != nil {
							t.Fatal(err)
						}
						w.until(sb.VMID, agentlab.SandboxSuspended)
					}
					w.suspendToDisk(sb)
					if _, err := w.svc.Suspend(ctx, sb.VMID, false); err != nil {
						t.Errorf("pausing it: %v", err)
					}
					between(w)
					time.Sleep(time.Minute) // audits see it
					if got := w.get(sb.VMID); got.State != agentlab.SandboxSuspended || !got.OnDisk || got.Desired != agentlab.DesiredSuspendedToDisk {
						t.Fatalf("it is %s, on disk %t, desired %s", got.State, got.OnDisk, got.Desired)
					}
					if _, err := w.svc.Resume(ctx, sb.VMID); err != nil {
						t.Fatal(err)
					}
					if got := w.until(sb.VMID, agentlab.SandboxReady); got.OnDisk || w.boot(got) != boot {
						t.Errorf("on disk %t, boot %s, want %s", got.OnDisk, w.boot(got), boot)
					}
					w.destroyAll()
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
				inWorld(t, func(w *world) {
					ctx := context.Background()
					sb := w.create(agentlab.SandboxRequest{Name: "play"})
					w.until(sb.VMID, agentlab.SandboxReady)
					boot, dead := w.boot(sb), make(chan struct{})
					w.host.Inject(fake.Fault{Op: op, At: at, Times: 1, Crash: true, Hook: func(backend.Spec) { close(dead) }})
					if _, err := w.svc.Suspend(ctx, sb.VMID, true); err != nil {
						t.Fatal(err)
					}
					if op == fake.OpResume {
						w.until(sb.VMID, agentlab.SandboxSuspended)
						if _, err := w.svc.Resume(ctx, sb.VMID); err != nil {
							t.Fatal(err)
						}
					}
					<-dead
					w.restart()
					if op == fake.OpSuspendToDisk {
						w.untilIt(sb.VMID, func(sb agentlab.Sandbox) bool { return sb.OnDisk })
						if _, err := w.svc.Resume(ctx, sb.VMID); err != nil {
							t.Fatal(err)
						}
					}
					w.until(sb.VMID, agentlab.SandboxReady)
					if got := w.boot(sb); got != boot {
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
		do   func(w *world, sb agentlab.Sandbox) error
		want agentlab.SandboxState
	}{
		"stopped": {func(w *world, sb agentlab.Sandbox) error {
			_, err := w.svc.Stop(context.Background(), sb.VMID, time.Hour)
			return err
		}, agentlab.SandboxStopped},
		"destroyed": {func(w *world, sb agentlab.Sandbox) error {
			_, err := w.svc.Destroy(context.Background(), sb.VMID)
			return err
		}, agentlab.SandboxDestroyed},
		"lease":                      {func(*world, agentlab.Sandbox) error { time.Sleep(2 * time.Hour); return nil }, agentlab.SandboxDestroyed},
		"lease while no daemon runs": {func(w *world, _ agentlab.Sandbox) error { w.kill(); time.Sleep(2 * time.Hour); w.begin(); return nil }, agentlab.SandboxDestroyed},
		"vanished": {func(w *world, sb agentlab.Sandbox) error {
			return w.host.RemoveBehindBack(backend.RefOf(sb))
		}, agentlab.SandboxFailed},
	} {
		t.Run(name, func(t *testing.T) {
			inWorld(t, func(w *world) {
				sb := w.create(agentlab.SandboxRequest{Name: "play"})
				w.until(sb.VMID, agentlab.SandboxReady)
				boot := w.boot(sb)
				w.suspendToDisk(sb)
				if err := test.do(w, sb); err != nil {
					t.Fatal(err)
				}
				if got := w.until(sb.VMID, test.want); got.OnDisk {
					t.Error("its memory is still on disk")
				}
				if test.want != agentlab.SandboxStopped {
					return
				}
				if _, err := w.svc.Start(context.Background(), sb.VMID); err != nil {
					t.Fatal(err)
				}
				if w.until(sb.VMID, agentlab.SandboxReady); w.boot(sb) == boot {
					t.Error("its memory was not discarded")
				}
			})
		})
	}
}

// The backend enforces the lease of a sandbox again after its resume, also on a
// host that was restarted and has lost the deadline.
func TestResumeSetsDeadline(t *testing.T) {
	inWorld(t, func(w *world) {
		sb := w.create(agentlab.SandboxRequest{Name: "play"})
		w.until(sb.VMID, agentlab.SandboxReady)
		w.suspendToDisk(sb)
		w.hostRestart()
		before := w.host.Calls(fake.OpSetDeadline)
		w.host.Inject(fake.Fault{Op: fake.OpResume, Times: 1, Hook: func(backend.Spec) {
			if w.host.Calls(fake.OpSetDeadline) == before {
				t.Error("no deadline was set before the resume")
			}
		}})
		if _, err := w.svc.Resume(context.Background(), sb.VMID); err != nil {
			t.Fatal(err)
		}
		w.until(sb.VMID, agentlab.SandboxReady)
	})
}

// A memory that cannot be loaded is kept; the row and an event say what to do.
func TestResumeUnsupported(t *testing.T) {
	inWorld(t, func(w *world) {
		ctx := context.Background()
		sb := w.create(agentlab.SandboxRequest{Name: "play"})
		w.until(sb.VMID, agentlab.SandboxReady)
		w.suspendToDisk(sb)
		repaired := w.host.Inject(fake.Fault{Op: fake.OpResume, Err: agentlab.Errorf(agentlab.CodeUnsupported, "another processor")})
		for range 2 {
			if _, err := w.svc.Resume(ctx, sb.VMID); err != nil {
				t.Fatal(err)
			}
			got := w.untilIt(sb.VMID, func(sb agentlab.Sandbox) bool { return sb.Desired == agentlab.DesiredSuspendedToDisk })
			if got.State != agentlab.SandboxSuspended || !got.OnDisk || !strings.Contains(got.Reason, "another processor") || !strings.Contains(got.Reason, fmt.Sprintf("agentlab sandbox stop %d", sb.VMID)) {
				t.Fatalf("%+v", got)
			}
			w.restart()
		}
		refused := 0
		for _, e := range w.events(agentlab.EventSandboxState) {
			if strings.Contains(e.Data, `"refused"`) && strings.Contains(e.Data, `"code":"unsupported"`) && strings.Contains(e.Message, "cannot be resumed: another processor") {
				refused++
			}
		}
		if refused != 2 {
			t.Errorf("%d events about it, want 2", refused)
		}
		repaired()
		if _, err := w.svc.Resume(ctx, sb.VMID); err != nil {
			t.Fatal(err)
		}
		if got := w.until(sb.VMID, agentlab.SandboxReady); got.Reason != "" {
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
			inWorld(t, func(w *world) {
				ctx := context.Background()
				sb := w.create(agentlab.SandboxRequest{Name: "play"})
				w.until(sb.VMID, agentlab.SandboxReady)
				want, state := agentlab.DesiredRunning, agentlab.SandboxReady
				if paused {
					want, state = agentlab.DesiredSuspended, agentlab.SandboxSuspended
					if _, err := w.svc.Suspend(ctx, sb.VMID, false); err != nil {
						t.Fatal(err)
					}
					w.until(sb.VMID, agentlab.SandboxSuspended)
				}
				w.host.Inject(fake.Fault{Op: fake.OpSuspendToDisk, Err: agentlab.Errorf(c.code, "the disk is odd")})
				began := time.Now()
				if _, err := w.svc.Suspend(ctx, sb.VMID, true); err != nil {
					t.Fatal(err)
				}
				got := w.untilIt(sb.VMID, func(sb agentlab.Sandbox) bool { return sb.Desired == want })
				once := c.code == agentlab.CodeNoSpace || c.code == agentlab.CodeInternal
				// Of the bubble. Calls are not counted: the request interrupts a step
				// that has begun to carry it out, and that step is repeated.
				took := time.Since(began)
				if got.State != state || got.OnDisk || once != (took < time.Minute) {
					t.Errorf("it is %s, on disk %t, after %s", got.State, got.OnDisk, took)
				}
				refused := 0
				for _, e := range w.events(agentlab.EventSandboxState) {
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
	for name, end := range map[string]func(w *world, sb agentlab.Sandbox){
		"stopped": func(w *world, sb agentlab.Sandbox) {
			must(w.svc.Stop(context.Background(), sb.VMID, 0))(w.T)
			w.until(sb.VMID, agentlab.SandboxStopped)
			must(w.svc.Destroy(context.Background(), sb.VMID))(w.T)
		},
		"destroyed": func(w *world, sb agentlab.Sandbox) { must(w.svc.Destroy(context.Background(), sb.VMID))(w.T) },
		"lease":     func(*world, agentlab.Sandbox) {},
	} {
		for _, toDisk := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/%t", name, toDisk), func(t *testing.T) {
				inWorld(t, func(w *world) {
					sb := w.create(onWorkspace("data", 0))
					w.until(sb.VMID, agentlab.SandboxReady)
					w.sh(sb, "echo hello > /work/unwritten")
					must(w.svc.Suspend(context.Background(), sb.VMID, toDisk))(w.T)
					w.until(sb.VMID, agentlab.SandboxSuspended)
					end(w, sb)
					w.until(sb.VMID, agentlab.SandboxDestroyed)
					next := w.create(onWorkspace("data", 0))
					w.until(next.VMID, agentlab.SandboxReady)
					if got := w.sh(next, "cat /work/written"); got != "hello" {
						t.Errorf("what its guest had in memory is lost: %q", got)
					}
				})
			})
		}
	}
}

// A guest that does not answer is suspended, and an event reports what may be lost.
func TestSilentGuestIsSuspended(t *testing.T) {
	inWorld(t, func(w *world) {
		sb := w.create(agentlab.SandboxRequest{Name: "play"})
		w.until(sb.VMID, agentlab.SandboxReady)
		w.host.Inject(fake.Fault{Op: fake.OpDialControl, Err: agentlab.Errorf(agentlab.CodeUnavailable, "the guest does not answer")})
		must(w.svc.Suspend(context.Background(), sb.VMID, false))(w.T)
		w.until(sb.VMID, agentlab.SandboxSuspended)
		for _, e := range w.events(agentlab.EventSandboxState) {
			if strings.Contains(e.Message, "has not written its disks") {
				return
			}
		}
		t.Error("there is no event")
	})
}

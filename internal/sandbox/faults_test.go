package sandbox_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/internal/sandbox/sandboxtest"
)

func fakeFault(op fake.Op, err error) fake.Fault { return fake.Fault{Op: op, Err: err} }

// TestFaultMatrix makes each step of the driver fail in each way, and checks
// the resulting state of the sandbox. Temporary faults are gone at the third
// attempt.
func TestFaultMatrix(t *testing.T) {
	passes := []agentlab.Code{agentlab.CodeBusy, agentlab.CodeUnavailable, agentlab.CodeUnknownOutcome}
	stays := []agentlab.Code{agentlab.CodeUnsupported, agentlab.CodeDenied, agentlab.CodeNoSpace, agentlab.CodeInvalid, agentlab.CodeInternal}
	exists := []agentlab.Code{agentlab.CodeExists}
	type row struct {
		op    fake.Op
		at    fake.Point
		codes []agentlab.Code
		want  agentlab.SandboxState // while it is to run
	}
	for _, r := range []row{
		{fake.OpCreate, fake.Before, passes, agentlab.SandboxReady},
		{fake.OpCreate, fake.Half, passes, agentlab.SandboxReady},
		{fake.OpCreate, fake.After, passes, agentlab.SandboxReady},
		{fake.OpStart, fake.Before, passes, agentlab.SandboxReady},
		{fake.OpStart, fake.After, passes, agentlab.SandboxReady},
		{fake.OpListenGuest, fake.Before, passes, agentlab.SandboxReady},
		{fake.OpInspect, fake.Before, passes, agentlab.SandboxReady},
		{fake.OpDialControl, fake.Before, passes, agentlab.SandboxReady},
		{fake.OpList, fake.Before, passes, agentlab.SandboxReady},
		{fake.OpCreate, fake.Before, exists, agentlab.SandboxFailed},
		{fake.OpCreate, fake.Half, exists, agentlab.SandboxFailed},
		{fake.OpStart, fake.Before, exists, agentlab.SandboxFailed},
		{fake.OpCreate, fake.Before, stays, agentlab.SandboxFailed},
		{fake.OpCreate, fake.Half, stays, agentlab.SandboxFailed},
		{fake.OpStart, fake.Before, stays, agentlab.SandboxFailed},
		{fake.OpStart, fake.After, stays, agentlab.SandboxFailed},
		{fake.OpListenGuest, fake.Before, stays, agentlab.SandboxFailed},
		{fake.OpDialControl, fake.Before, stays, agentlab.SandboxReady}, // a booting guest may say anything for a while
		{fake.OpInspect, fake.Before, stays, agentlab.SandboxReady},     // an error tells nothing about the VM
	} {
		for _, code := range r.codes {
			t.Run(fmt.Sprintf("%s/%s/%s", r.op, r.at, code), func(t *testing.T) {
				sandboxtest.InWorld(t, func(w *sandboxtest.World) {
					remove := w.Host.Inject(fake.Fault{Op: r.op, At: r.at, Times: 2, Err: agentlab.Errorf(code, "injected %s", code)})
					sb := w.Create(agentlab.SandboxRequest{Name: "play"})
					sb = w.Until(sb.VMID, agentlab.SandboxReady, agentlab.SandboxFailed)
					if sb.State != r.want {
						w.Fatalf("%s (%s), want %s", sb.State, sb.Reason, r.want)
					}
					if sb.State == agentlab.SandboxFailed && !strings.Contains(sb.Reason, "injected "+string(code)) {
						w.Errorf("the reason %q does not tell the fault", sb.Reason)
					}
					if sb.State == agentlab.SandboxFailed {
						time.Sleep(time.Minute)
						if p := w.Power(sb); p == backend.PowerRunning {
							w.Error("the VM of a failed sandbox runs")
						}
					}
					remove()
					w.DestroyAll()
				})
			})
		}
	}
	// The way down never gives up.
	for _, op := range []fake.Op{fake.OpStop, fake.OpDestroy} {
		for _, at := range []fake.Point{fake.Before, fake.Half, fake.After} {
			for _, code := range append(passes, stays...) {
				t.Run(fmt.Sprintf("%s/%s/%s", op, at, code), func(t *testing.T) {
					sandboxtest.InWorld(t, func(w *sandboxtest.World) {
						sb := w.Create(agentlab.SandboxRequest{Name: "play"})
						w.Until(sb.VMID, agentlab.SandboxReady)
						w.Host.Inject(fake.Fault{Op: op, At: at, Times: 5, Err: agentlab.Errorf(code, "injected %s", code)})
						if op == fake.OpStop {
							if _, err := w.Svc.Stop(context.Background(), sb.VMID, time.Second); err != nil {
								w.Fatal(err)
							}
							w.Until(sb.VMID, agentlab.SandboxStopped)
							if p := w.Power(sb); p != backend.PowerStopped {
								w.Errorf("STOPPED, but the VM is %s", p)
							}
						}
						w.DestroyAll()
						if op == fake.OpDestroy {
							told := 0
							for _, e := range w.Events(agentlab.EventSandboxState) {
								if strings.Contains(e.Message, "cannot be destroyed") {
									told++
								}
							}
							if told != 1 {
								w.Errorf("the trouble was told %d times, want once", told)
							}
						}
					})
				})
			}
		}
	}
}

// A fault that does not pass in time is a failure.
func TestProvisionTimeout(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		w.Host.Inject(fakeFault(fake.OpStart, agentlab.Errorf(agentlab.CodeBusy, "no slot")))
		began := time.Now()
		sb := w.Create(agentlab.SandboxRequest{})
		sb = w.Until(sb.VMID, agentlab.SandboxFailed)
		if d := time.Since(began); d < 5*time.Minute || d > 6*time.Minute {
			w.Errorf("gave up after %s", d)
		}
		if sb.Reason != "it could not be created: no slot" {
			w.Errorf("reason %q", sb.Reason)
		}
	})
}

// TestDaemonDies kills the daemon at each step of the driver and lets the
// next one go on.
func TestDaemonDies(t *testing.T) {
	for _, p := range []struct {
		op fake.Op
		at fake.Point
	}{
		{fake.OpCreate, fake.Before}, {fake.OpCreate, fake.Half}, {fake.OpCreate, fake.After},
		{fake.OpListenGuest, fake.Before},
		{fake.OpStart, fake.Before}, {fake.OpStart, fake.After},
		{fake.OpInspect, fake.Before}, {fake.OpDialControl, fake.Before},
		{fake.OpStop, fake.Before}, {fake.OpStop, fake.Half}, {fake.OpStop, fake.After},
		{fake.OpDestroy, fake.Before}, {fake.OpDestroy, fake.Half}, {fake.OpDestroy, fake.After},
	} {
		t.Run(string(p.op)+"/"+string(p.at), func(t *testing.T) {
			sandboxtest.InWorld(t, func(w *sandboxtest.World) {
				ctx := context.Background()
				reached := make(chan struct{})
				once := sync.OnceFunc(func() { close(reached) })
				arm := func() {
					w.Host.Inject(fake.Fault{Op: p.op, At: p.at, Times: 1, Crash: true, Hook: func(backend.Spec) { once() }})
				}
				die := func() {
					<-reached
					w.Restart()
				}
				down := p.op == fake.OpStop || p.op == fake.OpDestroy
				if !down {
					arm()
				}
				sb := w.Create(agentlab.SandboxRequest{Name: "play"})
				if !down {
					die()
				}
				w.Until(sb.VMID, agentlab.SandboxReady)
				if down {
					arm()
				}
				if _, err := w.Svc.Stop(ctx, sb.VMID, time.Second); err != nil {
					w.Fatal(err)
				}
				if p.op == fake.OpStop {
					die()
				}
				w.Until(sb.VMID, agentlab.SandboxStopped)
				if _, err := w.Svc.Destroy(ctx, sb.VMID); err != nil {
					w.Fatal(err)
				}
				if p.op == fake.OpDestroy {
					die()
				}
				w.Until(sb.VMID, agentlab.SandboxDestroyed)
				w.Empty()
			})
		})
	}
}

// TestRestartInEachState ends and begins the daemon while a sandbox is in
// each of its states.
func TestRestartInEachState(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		sb := w.Create(agentlab.SandboxRequest{Name: "play"})
		w.Restart()
		w.Until(sb.VMID, agentlab.SandboxBooting)
		w.Restart()
		w.Until(sb.VMID, agentlab.SandboxReady)
		if n := w.Host.Calls(fake.OpStart); n != 1 {
			w.Errorf("started %d times", n)
		}
		w.Restart()
		time.Sleep(time.Minute)
		w.Until(sb.VMID, agentlab.SandboxReady)
		if _, err := w.Svc.Stop(context.Background(), sb.VMID, 0); err != nil {
			w.Fatal(err)
		}
		w.Restart()
		w.Until(sb.VMID, agentlab.SandboxStopped)
		w.Restart()
		if _, err := w.Svc.Start(context.Background(), sb.VMID); err != nil {
			w.Fatal(err)
		}
		w.Restart()
		w.Until(sb.VMID, agentlab.SandboxReady)
		if _, err := w.Svc.Destroy(context.Background(), sb.VMID); err != nil {
			w.Fatal(err)
		}
		w.Restart()
		w.Until(sb.VMID, agentlab.SandboxDestroyed)
		w.Empty()
	})
}

// While the daemon was away, things happened to its VMs.
func TestRecovery(t *testing.T) {
	for _, test := range []struct {
		name  string
		state agentlab.SandboxState // in which the daemon dies
		harm  func(w *sandboxtest.World, ref backend.Ref) error
		want  agentlab.SandboxState
		why   string
	}{
		{"crashed", agentlab.SandboxReady, func(w *sandboxtest.World, ref backend.Ref) error { return w.Host.CrashVM(ref, "oom") }, agentlab.SandboxFailed, "its VM has crashed: oom"},
		{"vanished", agentlab.SandboxReady, func(w *sandboxtest.World, ref backend.Ref) error { return w.Host.RemoveBehindBack(ref) }, agentlab.SandboxFailed, "its VM was not found on the backend"},
		{"powered off", agentlab.SandboxReady, func(w *sandboxtest.World, ref backend.Ref) error {
			return w.Host.Open().Stop(context.Background(), ref, 0)
		}, agentlab.SandboxStopped, "the guest powered itself off"},
		{"crashed while booting", agentlab.SandboxBooting, func(w *sandboxtest.World, ref backend.Ref) error { return w.Host.CrashVM(ref, "oom") }, agentlab.SandboxReady, ""},
		{"vanished while booting", agentlab.SandboxBooting, func(w *sandboxtest.World, ref backend.Ref) error { return w.Host.RemoveBehindBack(ref) }, agentlab.SandboxReady, ""},
		{"nothing", agentlab.SandboxReady, func(*sandboxtest.World, backend.Ref) error { return nil }, agentlab.SandboxReady, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			sandboxtest.InWorld(t, func(w *sandboxtest.World) {
				sb := w.Create(agentlab.SandboxRequest{Name: "play"})
				w.Until(sb.VMID, test.state)
				w.Kill()
				if err := test.harm(w, backend.RefOf(sb)); err != nil {
					w.Fatal(err)
				}
				w.Begin()
				time.Sleep(time.Minute)
				sb = w.Get(sb.VMID)
				if sb.State != test.want || sb.Reason != test.why {
					w.Errorf("%s (%s), want %s (%s)", sb.State, sb.Reason, test.want, test.why)
				}
				w.DestroyAll()
			})
		})
	}
}

// A VM with our mark but without a row is reported and not touched; one that a
// destroyed row proves to be ours is removed.
func TestOrphans(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		ctx := context.Background()
		d := w.Host.Open()
		stray := backend.Spec{VMID: 7777, UID: "stray", Name: "stray", Network: agentlab.Network{Mode: agentlab.NetworkNAT}}
		if err := d.Create(ctx, stray); err != nil {
			w.Fatal(err)
		}
		sb := w.Create(agentlab.SandboxRequest{Name: "play"})
		w.Until(sb.VMID, agentlab.SandboxReady)
		if _, err := w.Svc.Destroy(ctx, sb.VMID); err != nil {
			w.Fatal(err)
		}
		w.Until(sb.VMID, agentlab.SandboxDestroyed)
		again := stray
		again.VMID, again.UID, again.Name = sb.VMID, sb.UID, sb.Name
		if err := d.Create(ctx, again); err != nil { // as if the destruction had been cut short
			w.Fatal(err)
		}
		time.Sleep(time.Minute)
		left, err := d.List(ctx)
		if err != nil || len(left) != 1 || left[0].Ref.UID != stray.UID {
			w.Errorf("left: %v, %v; want the stray one alone", left, err)
		}
		if told := w.Events(agentlab.EventDrift); len(told) != 1 || told[0].SandboxVMID != 7777 {
			w.Errorf("drift events: %v, want one", told)
		}
	})
}

func TestImageBuild(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		w.Images.Build = func(ctx context.Context, name string, progress func(string)) error {
			progress("building " + name)
			time.Sleep(20 * time.Minute)
			progress("still\tbuilding\x00")
			return ctx.Err()
		}
		began := time.Now()
		var all []agentlab.Sandbox
		for range 3 {
			all = append(all, w.Create(agentlab.SandboxRequest{TTL: 10 * time.Minute}))
		}
		time.Sleep(15 * time.Minute) // longer than the lease, which has not begun
		for _, sb := range all {
			if sb = w.Get(sb.VMID); sb.State != agentlab.SandboxProvisioning {
				w.Errorf("%s: %s", sb.State, sb.Reason)
			}
		}
		for _, sb := range all {
			sb = w.Until(sb.VMID, agentlab.SandboxReady)
			if left := time.Until(sb.LeaseExpiresAt); left < 9*time.Minute {
				w.Errorf("the build ate the lease: %s left", left)
			}
		}
		if d := time.Since(began); d > 21*time.Minute {
			w.Errorf("READY after %s", d)
		}
		if w.Images.Calls != 1 {
			w.Errorf("the image was ensured %d times", w.Images.Calls)
		}
		told := w.Events(agentlab.EventImageBuild)
		if len(told) < 4 || told[0].Message != "building base" {
			w.Fatalf("progress: %v", told)
		}
		who := map[int]bool{}
		for _, e := range told[len(told)-3:] {
			if e.Message != "still building" {
				w.Errorf("progress: %v", e)
			}
			who[e.SandboxVMID] = true
		}
		if len(who) != 3 {
			w.Errorf("progress was told to %v, want all three", who)
		}
	})
}

func TestImageFails(t *testing.T) {
	for name, test := range map[string]struct {
		build func(ctx context.Context, _ string, _ func(string)) error
		why   string
	}{
		"error": {func(context.Context, string, func(string)) error {
			return agentlab.Errorf(agentlab.CodeUnavailable, "the mirror does not answer")
		}, "image base: the mirror does not answer"},
		"hangs": {func(ctx context.Context, _ string, _ func(string)) error { <-ctx.Done(); return ctx.Err() }, "image base: not built within 1h0m0s"},
	} {
		t.Run(name, func(t *testing.T) {
			sandboxtest.InWorld(t, func(w *sandboxtest.World) {
				w.Images.Build = test.build
				sb := w.Create(agentlab.SandboxRequest{})
				sb = w.Until(sb.VMID, agentlab.SandboxFailed)
				if !strings.HasPrefix(sb.Reason, test.why) {
					w.Errorf("reason %q", sb.Reason)
				}
			})
		})
	}
}

// A daemon that ends during a build does not fail the sandboxes that wait.
func TestRestartDuringImageBuild(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		var n atomic.Int32
		w.Images.Build = func(ctx context.Context, _ string, _ func(string)) error {
			if n.Add(1) == 1 {
				<-ctx.Done()
			}
			return ctx.Err()
		}
		sb := w.Create(agentlab.SandboxRequest{})
		w.Until(sb.VMID, agentlab.SandboxProvisioning)
		synctest.Wait()
		w.Restart()
		w.Until(sb.VMID, agentlab.SandboxReady)
	})
}

// No more boots run at the same time than allowed, and all get their turn.
func TestParallelBoots(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		w.Limits.ParallelBoots = 2
		w.Restart()
		for range 10 {
			w.Create(agentlab.SandboxRequest{})
		}
		synctest.Wait()
		time.Sleep(time.Millisecond)
		if n, wait := w.Svc.BootQueue(); n != 8 || wait < time.Millisecond {
			w.Errorf("%d wait, the first for %s", n, wait)
		}
		most := 0
		for range 1000 {
			counts, err := w.Store.CountSandboxes(context.Background())
			if err != nil {
				w.Fatal(err)
			}
			most = max(most, counts[agentlab.SandboxBooting])
			if counts[agentlab.SandboxReady] == 10 {
				break
			}
			time.Sleep(50 * time.Millisecond)
		}
		if most != 2 {
			w.Errorf("%d booted at the same time, want 2", most)
		}
		if n, wait := w.Svc.BootQueue(); n != 0 || wait != 0 {
			w.Errorf("%d wait, the first for %s", n, wait)
		}
		w.DestroyAll()
	})
}

// A sandbox that cannot boot does not keep the others from it.
func TestStuckBootsDoNotBlock(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		w.Limits.ParallelBoots = 2
		w.Restart()
		for i := range 2 {
			w.Create(agentlab.SandboxRequest{Name: fmt.Sprintf("never-boots-%d", i)})
		}
		good := w.Create(agentlab.SandboxRequest{})
		gone := w.Create(agentlab.SandboxRequest{})
		if _, err := w.Svc.Destroy(context.Background(), gone.VMID); err != nil {
			w.Fatal(err)
		}
		w.Until(gone.VMID, agentlab.SandboxDestroyed)
		began := time.Now()
		w.Until(good.VMID, agentlab.SandboxReady)
		if d := time.Since(began); d > 190*time.Second {
			w.Errorf("READY after %s", d)
		}
	})
}

// A start that is given up may leave what looks like a crash: it is no reason
// to fail until the VM was seen to run.
func TestStartIsCutShort(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		ctx := context.Background()
		sb := w.Create(agentlab.SandboxRequest{Name: "play"})
		w.Until(sb.VMID, agentlab.SandboxReady)
		if _, err := w.Svc.Stop(ctx, sb.VMID, 0); err != nil {
			w.Fatal(err)
		}
		w.Until(sb.VMID, agentlab.SandboxStopped)
		w.Host.Inject(fake.Fault{
			Op: fake.OpStart, At: fake.After, Times: 2, Err: agentlab.Errorf(agentlab.CodeUnavailable, "given up"),
			Hook: func(s backend.Spec) { _ = w.Host.CrashVM(s.Ref(), "its supervisor process was killed") },
		})
		if _, err := w.Svc.Start(ctx, sb.VMID); err != nil {
			w.Fatal(err)
		}
		w.Until(sb.VMID, agentlab.SandboxReady, agentlab.SandboxFailed)
		if sb = w.Get(sb.VMID); sb.State != agentlab.SandboxReady {
			w.Errorf("%s: %s", sb.State, sb.Reason)
		}
	})
}

// No caller waits for the end of a lease, so an event says what prevents the
// destruction, and what to do.
func TestFailureAtEndOfLease(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		sb := w.Create(agentlab.SandboxRequest{Name: "play", TTL: time.Hour})
		w.Until(sb.VMID, agentlab.SandboxReady)
		w.Host.Inject(fake.Fault{Op: fake.OpStop, Times: 3, Err: agentlab.Errorf(agentlab.CodeUnavailable, "injected").WithHint("mend it")})
		w.Until(sb.VMID, agentlab.SandboxDestroyed)
		var told []string
		for _, e := range w.Events(agentlab.EventSandboxState) {
			if strings.Contains(e.Message, "cannot be destroyed") {
				told = append(told, e.Message)
			}
		}
		if len(told) != 1 || told[0] != "sandbox play cannot be destroyed, will be tried again: injected (mend it)" {
			w.Errorf("%q", told)
		}
	})
}

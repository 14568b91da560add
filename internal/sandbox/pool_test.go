package sandbox_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/internal/store"
	"github.com/agentlab-vm/agentlab/internal/warmpool"
)

// inPool is inWorld with n sandboxes of image base in the warm pool, when all wait.
func inPool(t *testing.T, n int, fn func(w *world)) {
	t.Helper()
	inWorld(t, func(w *world) {
		w.kill()
		w.pool = []warmpool.Entry{{Image: "base", Count: n}}
		w.begin()
		w.filled(n)
		fn(w)
	})
}

// pooled returns the rows of the warm pool.
func (w *world) pooled() (out []agentlab.Sandbox) {
	w.Helper()
	all, err := w.store.Sandboxes(context.Background(), agentlab.SandboxFilter{Destroyed: true})
	if err != nil {
		w.Fatal(err)
	}
	for _, sb := range all {
		if sb.Pooled() {
			out = append(out, sb)
		}
	}
	return out
}

// when lets time pass until cond is true for the rows of the warm pool.
func (w *world) when(what string, cond func([]agentlab.Sandbox) bool) []agentlab.Sandbox {
	w.Helper()
	for range 900 {
		synctest.Wait()
		if rows := w.pooled(); cond(rows) {
			return rows
		}
		time.Sleep(100 * time.Millisecond) // of the bubble's time
	}
	w.Fatalf("the pool is not %s: %+v", what, w.pooled())
	return nil
}

// filled waits until the pool has exactly n rows, and all wait.
func (w *world) filled(n int) []agentlab.Sandbox {
	w.Helper()
	return w.when(fmt.Sprintf("filled with %d", n), func(rows []agentlab.Sandbox) bool {
		return len(rows) == n && !slices.ContainsFunc(rows, func(sb agentlab.Sandbox) bool { return sb.State != agentlab.SandboxPooled })
	})
}

func TestPoolHandsOut(t *testing.T) {
	inPool(t, 2, func(w *world) {
		waiting := w.pooled()
		for _, sb := range waiting {
			if w.power(sb) != backend.PowerSuspended || sb.Network.Mode != agentlab.NetworkOff || sb.JobID != "" || !sb.BootedAt.IsZero() {
				t.Errorf("waiting: %s, %+v", w.power(sb), sb)
			}
		}
		if len(w.events("")) != 0 || len(w.events(agentlab.EventSandboxState)) != 0 {
			t.Error("a sandbox without a user has events")
		}
		starts := w.host.Calls(fake.OpStart)
		began := time.Now()
		sb := w.create(agentlab.SandboxRequest{Name: "play", TTL: 3 * time.Hour, JobID: "job"})
		if sb.State != agentlab.SandboxBooting || !slices.ContainsFunc(waiting, func(p agentlab.Sandbox) bool { return p.UID == sb.UID && p.VMID == sb.VMID }) {
			t.Fatalf("not from the pool: %+v", sb)
		}
		sb = w.until(sb.VMID, agentlab.SandboxReady)
		if took := time.Since(began); took > time.Second { // a boot takes 2 s
			t.Errorf("it took %s", took)
		}
		if w.host.Calls(fake.OpStart) != starts {
			t.Error("a VM was started")
		}
		if sb.Start != agentlab.StartPool || sb.Name != "play" || sb.Profile != "plain" || sb.JobID != "job" || sb.NetworkPending ||
			sb.Network.Mode != agentlab.NetworkNAT || sb.LeaseExpiresAt.Sub(sb.CreatedAt) != 3*time.Hour || sb.CreatedAt.Before(began.Add(-time.Second)) {
			t.Errorf("handed out: %+v", sb)
		}
		in, err := w.driver.Inspect(context.Background(), backend.RefOf(sb))
		if err != nil || in.Spec == nil || in.Spec.Network.Mode != agentlab.NetworkNAT {
			t.Errorf("the backend has %+v, %v", in.Spec, err)
		}
		if evs := w.events(agentlab.EventSandboxCreated); len(evs) != 1 || !strings.Contains(evs[0].Data, `"pool"`) || evs[0].SandboxVMID != sb.VMID {
			t.Errorf("events %+v", evs)
		}
		w.filled(2)
		if _, err := w.svc.Destroy(context.Background(), sb.VMID); err != nil {
			t.Fatal(err)
		}
		w.until(sb.VMID, agentlab.SandboxDestroyed)
		if len(w.pooled()) != 2 {
			t.Error("destroying a user's sandbox changed the pool")
		}
	})
}

// What a request needs and the pool cannot give is created as without a pool.
func TestPoolDoesNotFit(t *testing.T) {
	for name, r := range map[string]agentlab.SandboxRequest{
		"image": {Image: "agents"}, "cores": {Cores: 2}, "memory": {MemoryMB: 1024}, "disk": {Profile: "big"},
	} {
		t.Run(name, func(t *testing.T) {
			inPool(t, 1, func(w *world) {
				p := w.profiles.list["plain"]
				p.Resources.RootSizeGB = 40
				w.profiles.list["big"] = p
				if sb := w.create(r); sb.State != agentlab.SandboxRequested {
					t.Fatalf("%+v", sb)
				} else if sb = w.until(sb.VMID, agentlab.SandboxReady); sb.Start != agentlab.StartBoot && sb.Start != agentlab.StartTemplate {
					t.Errorf("start %q", sb.Start)
				}
				w.filled(1)
			})
		})
	}
}

// A name that is taken, and the maximum number of sandboxes, count for sandboxes of
// the pool too. The pool itself does not count.
func TestPoolLimits(t *testing.T) {
	inWorld(t, func(w *world) {
		w.kill()
		w.limits.MaxSandboxes = 2
		w.pool = []warmpool.Entry{{Image: "base", Count: 2}}
		w.begin()
		w.filled(2)
		w.create(agentlab.SandboxRequest{Name: "one"})
		_, err := w.svc.Create(context.Background(), agentlab.SandboxRequest{Name: "one"})
		wantCode(t, err, agentlab.CodeExists)
		w.create(agentlab.SandboxRequest{Name: "two"})
		_, err = w.svc.Create(context.Background(), agentlab.SandboxRequest{Name: "three"})
		wantCode(t, err, agentlab.CodeLimit)
	})
}

// A sandbox of the pool can be stopped and started after it was handed out, and
// boots if its VM has ended before that. It then has another name than its VM.
func TestPoolStartsAgain(t *testing.T) {
	t.Run("stopped", func(t *testing.T) {
		inPool(t, 1, func(w *world) {
			ctx := context.Background()
			sb := w.until(w.create(agentlab.SandboxRequest{Name: "play"}).VMID, agentlab.SandboxReady)
			must(w.svc.Stop(ctx, sb.VMID, 0))(t)
			w.until(sb.VMID, agentlab.SandboxStopped)
			must(w.svc.Start(ctx, sb.VMID))(t)
			if sb = w.until(sb.VMID, agentlab.SandboxReady, agentlab.SandboxFailed); sb.State != agentlab.SandboxReady {
				t.Errorf("%s: %s", sb.State, sb.Reason)
			}
		})
	})
	t.Run("died in the pool", func(t *testing.T) {
		inPool(t, 1, func(w *world) {
			p := w.pooled()[0]
			if err := w.host.CrashVM(backend.RefOf(p), "killed"); err != nil {
				t.Fatal(err)
			}
			sb := w.create(agentlab.SandboxRequest{Name: "play"})
			if sb.UID != p.UID {
				t.Fatalf("not from the pool: %+v", sb)
			}
			if sb = w.until(sb.VMID, agentlab.SandboxReady, agentlab.SandboxFailed); sb.State != agentlab.SandboxReady {
				t.Errorf("%s: %s", sb.State, sb.Reason)
			}
		})
	})
}

// A sandbox whose policy cannot be applied is not continued.
func TestPoolFailsClosed(t *testing.T) {
	inPool(t, 1, func(w *world) {
		w.host.Inject(fake.Fault{Op: fake.OpUpdateNetwork, Err: agentlab.Errorf(agentlab.CodeInternal, "no rules today")})
		sb := w.create(agentlab.SandboxRequest{})
		resumes := w.host.Calls(fake.OpResume)
		sb = w.until(sb.VMID, agentlab.SandboxFailed)
		if !strings.Contains(sb.Reason, "no rules today") || w.host.Calls(fake.OpResume) != resumes {
			t.Errorf("%q, %d times resumed", sb.Reason, w.host.Calls(fake.OpResume)-resumes)
		}
	})
}

// The policy is in force before the guest continues.
func TestPoolPolicyFirst(t *testing.T) {
	inPool(t, 1, func(w *world) {
		checked := false
		w.host.Inject(fake.Fault{Op: fake.OpResume, Hook: func(sp backend.Spec) {
			in, err := w.host.Open().Inspect(context.Background(), backend.Ref{UID: sp.UID})
			checked = err == nil && in.Spec.Network.Mode == agentlab.NetworkNAT
		}})
		w.until(w.create(agentlab.SandboxRequest{}).VMID, agentlab.SandboxReady)
		if !checked {
			t.Error("it was continued with the policy of the pool")
		}
	})
}

// No user can reach a sandbox of the pool. It can be destroyed, and is replaced.
func TestPooledIsNobodys(t *testing.T) {
	inPool(t, 1, func(w *world) {
		ctx, vmid := context.Background(), w.pooled()[0].VMID
		for name, call := range map[string]func() error{
			"exec":    func() error { _, err := w.svc.Exec(ctx, vmid, guestapi.ExecRequest{}); return err },
			"attach":  func() error { _, err := w.svc.Attach(ctx, vmid, guestapi.AttachRequest{}); return err },
			"ssh":     func() error { _, err := w.svc.SSHKey(ctx, vmid, guestapi.SSHKeyRequest{}); return err },
			"dial":    func() error { _, err := w.svc.DialGuest(ctx, vmid, 7); return err },
			"start":   func() error { _, err := w.svc.Start(ctx, vmid); return err },
			"stop":    func() error { _, err := w.svc.Stop(ctx, vmid, 0); return err },
			"suspend": func() error { _, err := w.svc.Suspend(ctx, vmid, false); return err },
			"resume":  func() error { _, err := w.svc.Resume(ctx, vmid); return err },
			"renew":   func() error { _, err := w.svc.RenewLease(ctx, vmid, time.Hour); return err },
			"narrow":  func() error { return w.svc.NarrowNetwork(ctx, vmid, agentlab.Network{Mode: agentlab.NetworkOff}) },
			"save":    func() error { _, err := w.snaps.SaveSnapshot(ctx, vmid, "s", false); return err },
			"fork":    func() error { _, err := w.snaps.Fork(ctx, vmid, agentlab.ForkRequest{Count: 1}); return err },
			"reload": func() error {
				out, err := w.svc.ReloadNetworks(ctx, []int{vmid})
				if err == nil {
					err = out[0].Err
				}
				return err
			},
		} {
			if err := call(); agentlab.CodeOf(err) != agentlab.CodeConflict {
				t.Errorf("%s: %v", name, err)
			}
		}
		if out, err := w.svc.ReloadNetworks(ctx, nil); err != nil || len(out) != 0 {
			t.Errorf("reload of all: %+v, %v", out, err)
		}
		if sb := w.pooled()[0]; sb.State != agentlab.SandboxPooled || sb.VMID != vmid {
			t.Errorf("changed: %+v", sb)
		}
		if _, err := w.svc.Destroy(ctx, vmid); err != nil {
			t.Fatal(err)
		}
		w.when("replaced", func(rows []agentlab.Sandbox) bool {
			return len(rows) == 1 && rows[0].VMID != vmid && rows[0].State == agentlab.SandboxPooled
		})
	})
}

// A request that starts a VM stops what is being made for the pool, and does not
// wait for it.
func TestPoolGivesWayToStarts(t *testing.T) {
	inWorld(t, func(w *world) {
		w.kill()
		w.limits.ParallelBoots = 1
		w.pool = []warmpool.Entry{{Image: "base", Count: 1}}
		w.begin()
		w.when("being made", func(rows []agentlab.Sandbox) bool {
			return len(rows) == 1 && rows[0].State == agentlab.SandboxBooting
		})
		old := w.pooled()[0]
		began := time.Now()
		sb := w.create(agentlab.SandboxRequest{Cores: 2})
		w.when("destroyed", func(rows []agentlab.Sandbox) bool { return len(rows) == 0 })
		if w.power(old) != "" {
			t.Error("its VM is left")
		}
		sb = w.until(sb.VMID, agentlab.SandboxReady)
		if took := time.Since(began); took > 2500*time.Millisecond { // a boot takes 2 s
			t.Errorf("it took %s", took)
		}
		ready := time.Now()
		w.when("made again", func(rows []agentlab.Sandbox) bool { return len(rows) == 1 })
		if quiet := time.Since(ready); quiet < 2*time.Second {
			t.Errorf("the pool goes on %s after a start", quiet)
		}
		w.filled(1)
		if f := w.warm.Findings(); len(f) != 0 {
			t.Errorf("findings %+v", f)
		}
	})
}

// While a sandbox of a user starts, however long, none is made.
func TestPoolWaitsForStarts(t *testing.T) {
	inWorld(t, func(w *world) {
		w.kill()
		w.pool = []warmpool.Entry{{Image: "base", Count: 1}}
		w.begin()
		sb := w.create(agentlab.SandboxRequest{Name: "never-boots", Cores: 2})
		w.when("empty", func(rows []agentlab.Sandbox) bool { return len(rows) == 0 })
		w.untilIt(sb.VMID, func(sb agentlab.Sandbox) bool {
			if n := len(w.pooled()); n != 0 && sb.State != agentlab.SandboxFailed {
				t.Fatalf("%d in the pool while a sandbox is %s", n, sb.State)
			}
			return sb.State == agentlab.SandboxFailed
		})
		w.filled(1)
	})
}

// When numbers are short, the pool gives its own to a request.
func TestPoolGivesNumbers(t *testing.T) {
	inWorld(t, func(w *world) {
		w.kill()
		w.limits.VMIDFirst, w.limits.VMIDLast = 1000, 1001
		w.pool = []warmpool.Entry{{Image: "base", Count: 2}}
		w.begin()
		w.filled(2)
		sb := w.create(agentlab.SandboxRequest{Cores: 2})
		w.until(sb.VMID, agentlab.SandboxReady)
		w.filled(1)
		other := w.create(agentlab.SandboxRequest{Cores: 2})
		w.until(other.VMID, agentlab.SandboxReady)
		_, err := w.svc.Create(context.Background(), agentlab.SandboxRequest{Cores: 2})
		wantCode(t, err, agentlab.CodeLimit)
	})
}

// Without room on the host there is no pool, neither in memory nor on disk.
func TestPoolNeedsRoom(t *testing.T) {
	noMemory := fake.Fault{Op: fake.OpRoom, Err: agentlab.Errorf(agentlab.CodeNoSpace, "no memory")}
	inPool(t, 2, func(w *world) {
		remove := w.host.Inject(noMemory)
		sb := w.create(agentlab.SandboxRequest{Cores: 2})
		began := time.Now()
		w.until(sb.VMID, agentlab.SandboxBooting, agentlab.SandboxReady)
		w.when("empty", func(rows []agentlab.Sandbox) bool { return len(rows) == 0 })
		if took := time.Since(began); took > time.Second {
			t.Errorf("the pool was destroyed after %s", took)
		}
		w.until(sb.VMID, agentlab.SandboxReady)
		time.Sleep(time.Minute)
		if n := len(w.pooled()); n != 0 {
			t.Errorf("%d are made without memory", n)
		}
		if f := w.warm.Findings(); len(f) != 1 || !strings.Contains(f[0].Detail, "no memory") {
			t.Errorf("findings %+v", f)
		}
		remove()
		w.filled(2)
		w.full.Store(true)
		w.when("empty", func(rows []agentlab.Sandbox) bool { return len(rows) == 0 })
		w.full.Store(false)
		w.filled(2)
		// What is not known changes nothing.
		before := w.pooled()
		w.host.Inject(fake.Fault{Op: fake.OpRoom, Times: 10, Err: agentlab.Errorf(agentlab.CodeUnavailable, "no answer")})
		time.Sleep(15 * time.Second)
		if after := w.pooled(); len(after) != 2 || after[0].UID != before[0].UID || after[1].UID != before[1].UID {
			t.Errorf("the pool was changed: %+v", after)
		}
	})
}

// What an image or the configuration no longer describes is replaced or removed.
func TestPoolIsCurrent(t *testing.T) {
	inPool(t, 2, func(w *world) {
		old := w.pooled()
		w.images.mu.Lock()
		w.images.digest = "sha256-2"
		w.images.mu.Unlock()
		if sb := w.create(agentlab.SandboxRequest{}); sb.State != agentlab.SandboxRequested {
			t.Errorf("an outdated sandbox was handed out: %+v", sb)
		}
		w.when("replaced", func(rows []agentlab.Sandbox) bool {
			return len(rows) == 2 && rows[0].Image == "base@sha256-2" && rows[1].Image == "base@sha256-2" && rows[1].State == agentlab.SandboxPooled
		})
		for _, sb := range old {
			if w.power(sb) != "" {
				t.Error("an outdated VM is left")
			}
		}
		w.images.mu.Lock()
		w.images.missing = true
		calls := w.images.calls
		w.images.mu.Unlock()
		time.Sleep(time.Minute)
		if w.images.calls != calls {
			t.Error("the pool builds images")
		}
		w.images.mu.Lock()
		w.images.missing = false
		w.images.mu.Unlock()
		w.kill()
		w.pool = nil
		w.begin()
		w.when("empty", func(rows []agentlab.Sandbox) bool { return len(rows) == 0 })
		if left, err := w.driver.List(context.Background()); err != nil || len(left) != 1 { // that of the request
			t.Errorf("left: %+v, %v", left, err)
		}
	})
}

// One that has waited long is replaced.
func TestPoolIsRenewed(t *testing.T) {
	inPool(t, 1, func(w *world) {
		old := w.pooled()[0]
		time.Sleep(3 * time.Hour)
		if sb := w.filled(1)[0]; sb.UID == old.UID {
			t.Error("it still waits")
		}
	})
}

// Failures are repeated less and less often, and reported.
func TestPoolBacksOff(t *testing.T) {
	inWorld(t, func(w *world) {
		w.host.Inject(fake.Fault{Op: fake.OpStart, Err: agentlab.Errorf(agentlab.CodeInternal, "no start")})
		w.kill()
		w.pool = []warmpool.Entry{{Image: "base", Count: 1}}
		w.begin()
		time.Sleep(2 * time.Hour)
		if n := w.host.Calls(fake.OpStart); n < 5 || n > 25 {
			t.Errorf("%d attempts in two hours", n)
		}
		if f := w.warm.Findings(); len(f) != 1 || !strings.Contains(f[0].Detail, "no start") {
			t.Errorf("findings %+v", f)
		}
		if st, err := w.warm.Status(context.Background()); err != nil || len(st) != 1 || st[0].Ready != 0 || !strings.Contains(st[0].Problem, "no start") {
			t.Errorf("status %+v, %v", st, err)
		}
	})
}

// One whose VM dies is replaced, and is never handed out as it is.
func TestPooledVMDies(t *testing.T) {
	inPool(t, 1, func(w *world) {
		old := w.pooled()[0]
		if err := w.host.CrashVM(backend.RefOf(old), "killed"); err != nil {
			t.Fatal(err)
		}
		w.when("replaced", func(rows []agentlab.Sandbox) bool {
			return len(rows) == 1 && rows[0].UID != old.UID && rows[0].State == agentlab.SandboxPooled
		})
		old = w.pooled()[0]
		if err := w.host.CrashVM(backend.RefOf(old), "killed"); err != nil {
			t.Fatal(err)
		}
		sb := w.create(agentlab.SandboxRequest{}) // before the pool notices
		if sb.UID != old.UID {
			t.Fatalf("another one: %+v", sb)
		}
		w.until(sb.VMID, agentlab.SandboxReady)
	})
}

// A backend that cannot pause guests has a pool of running ones, and one that cannot
// change policies has none.
func TestPoolOfOtherBackends(t *testing.T) {
	inWorld(t, func(w *world) {
		w.kill()
		w.wrap = func(d backend.Driver) backend.Driver {
			return struct {
				backend.Driver
				backend.Net
				backend.Host
			}{d, backend.GroupsOf(d).Net, backend.GroupsOf(d).Host}
		}
		w.pool = []warmpool.Entry{{Image: "base", Count: 1}}
		w.begin()
		p := w.filled(1)[0]
		if w.power(p) != backend.PowerRunning {
			t.Errorf("it is %s", w.power(p))
		}
		if sb := w.until(w.create(agentlab.SandboxRequest{}).VMID, agentlab.SandboxReady); sb.UID != p.UID || sb.Network.Mode != agentlab.NetworkNAT || sb.NetworkPending {
			t.Errorf("%+v", sb)
		}
		w.kill()
		w.wrap, w.plain = nil, true
		w.begin()
		w.when("empty", func(rows []agentlab.Sandbox) bool { return len(rows) == 0 })
		time.Sleep(time.Minute)
		if f := w.warm.Findings(); len(w.pooled()) != 0 || len(f) != 1 || !strings.Contains(f[0].Detail, "cannot have a warm pool") {
			t.Errorf("%+v, findings %+v", w.pooled(), f)
		}
	})
}

// A daemon that ends at any point leaves nothing that the next one does not remove
// or complete.
func TestPoolKill(t *testing.T) {
	for _, op := range []fake.Op{fake.OpCreate, fake.OpStart, fake.OpSuspend, fake.OpSetDeadline} {
		for _, at := range []fake.Point{fake.Before, fake.After} {
			t.Run(fmt.Sprintf("made/%s/%s", op, at), func(t *testing.T) {
				inWorld(t, func(w *world) {
					w.kill()
					w.pool = []warmpool.Entry{{Image: "base", Count: 1}}
					w.host.Inject(fake.Fault{Op: op, At: at, Times: 1, Crash: true})
					w.begin()
					time.Sleep(10 * time.Second)
					w.restart()
					w.filled(1)
					if list, err := w.driver.List(context.Background()); err != nil || len(list) != 1 {
						t.Errorf("VMs: %+v, %v", list, err)
					}
				})
			})
		}
	}
	for _, op := range []fake.Op{fake.OpUpdateNetwork, fake.OpResume, fake.OpSetDeadline, fake.OpListenGuest, fake.OpDialControl, fake.OpInspect} {
		for _, at := range []fake.Point{fake.Before, fake.After} {
			t.Run(fmt.Sprintf("handed out/%s/%s", op, at), func(t *testing.T) {
				inPool(t, 1, func(w *world) {
					p := w.pooled()[0]
					w.host.Inject(fake.Fault{Op: op, At: at, Times: 1, Crash: true})
					sb := w.create(agentlab.SandboxRequest{Name: "play"})
					time.Sleep(3 * time.Second)
					w.restart()
					sb = w.until(sb.VMID, agentlab.SandboxReady)
					in, err := w.driver.Inspect(context.Background(), backend.RefOf(sb))
					if sb.UID != p.UID || sb.Start != agentlab.StartPool || sb.NetworkPending || err != nil || in.Power != backend.PowerRunning || in.Spec.Network.Mode != agentlab.NetworkNAT {
						t.Errorf("%+v, %+v, %v", sb, in, err)
					}
					if again := w.filled(1)[0]; again.UID == p.UID {
						t.Error("the same one twice")
					}
				})
			})
		}
	}
	t.Run("row left", func(t *testing.T) {
		inPool(t, 1, func(w *world) {
			w.kill()
			db, err := store.Open(context.Background(), w.path, store.Options{})
			if err != nil {
				t.Fatal(err)
			}
			left := agentlab.Sandbox{
				UID: agentlab.NewUID(), Name: "pool-left", Backend: "fake", Profile: agentlab.ProfilePool, Image: "base@x", State: agentlab.SandboxDestroyed, Desired: agentlab.DesiredDestroyed,
				Resources: agentlab.Resources{Cores: 1, MemoryMB: 512}, Network: agentlab.Network{Mode: agentlab.NetworkOff}, LeaseExpiresAt: time.Now(),
			}
			_, err = db.AllocateSandbox(context.Background(), left, agentlab.Allocation{First: 5000, Last: 5000})
			if err = errors.Join(err, db.Close()); err != nil {
				t.Fatal(err)
			}
			w.begin()
			w.filled(1)
		})
	})
	t.Run("waiting", func(t *testing.T) {
		inPool(t, 2, func(w *world) {
			old := w.pooled()
			w.restart()
			w.when("replaced", func(rows []agentlab.Sandbox) bool {
				return len(rows) == 2 && rows[0].UID != old[0].UID && rows[1].UID != old[1].UID && rows[1].State == agentlab.SandboxPooled
			})
			if list, err := w.driver.List(context.Background()); err != nil || len(list) != 2 {
				t.Errorf("VMs: %+v, %v", list, err)
			}
		})
	})
}

// Many requests at once get different sandboxes.
func TestPoolHandsOutOnce(t *testing.T) {
	inPool(t, 3, func(w *world) {
		made := make(chan agentlab.Sandbox)
		for range 6 {
			go func() {
				sb, err := w.svc.Create(context.Background(), agentlab.SandboxRequest{})
				if err != nil {
					t.Error(err)
				}
				made <- sb
			}()
		}
		seen, fromPool := map[int]bool{}, 0
		for range 6 {
			sb := <-made
			if seen[sb.VMID] {
				t.Errorf("%d twice", sb.VMID)
			}
			seen[sb.VMID] = true
			if sb.Start == agentlab.StartPool {
				fromPool++
			}
		}
		if fromPool != 3 {
			t.Errorf("%d from the pool", fromPool)
		}
		for vmid := range seen {
			w.until(vmid, agentlab.SandboxReady)
		}
	})
}

package warmpool_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/internal/sandbox/sandboxtest"
	"github.com/agentlab-vm/agentlab/internal/store"
	"github.com/agentlab-vm/agentlab/internal/warmpool"
)

// inPool is inWorld with n sandboxes of image base in the warm pool, when all wait.
func inPool(t *testing.T, n int, fn func(w *sandboxtest.World)) {
	t.Helper()
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		w.Kill()
		w.Pool = []warmpool.Entry{{Image: "base", Count: n}}
		w.Begin()
		w.Filled(n)
		fn(w)
	})
}

func TestPoolHandsOut(t *testing.T) {
	inPool(t, 2, func(w *sandboxtest.World) {
		waiting := w.Pooled()
		for _, sb := range waiting {
			if w.Power(sb) != backend.PowerSuspended || sb.Network.Mode != agentlab.NetworkOff || sb.JobID != "" || !sb.BootedAt.IsZero() {
				t.Errorf("waiting: %s, %+v", w.Power(sb), sb)
			}
		}
		if len(w.Events("")) != 0 || len(w.Events(agentlab.EventSandboxState)) != 0 {
			t.Error("a sandbox without a user has events")
		}
		starts := w.Host.Calls(fake.OpStart)
		began := time.Now()
		sb := w.Create(agentlab.SandboxRequest{Name: "play", TTL: 3 * time.Hour, JobID: "job"})
		if sb.State != agentlab.SandboxBooting || !slices.ContainsFunc(waiting, func(p agentlab.Sandbox) bool { return p.UID == sb.UID && p.VMID == sb.VMID }) {
			t.Fatalf("not from the pool: %+v", sb)
		}
		sb = w.Until(sb.VMID, agentlab.SandboxReady)
		if took := time.Since(began); took > time.Second { // a boot takes 2 s
			t.Errorf("it took %s", took)
		}
		if w.Host.Calls(fake.OpStart) != starts {
			t.Error("a VM was started")
		}
		if sb.Start != agentlab.StartPool || sb.Name != "play" || sb.Profile != "plain" || sb.JobID != "job" || sb.NetworkPending ||
			sb.Network.Mode != agentlab.NetworkNAT || sb.LeaseExpiresAt.Sub(sb.CreatedAt) != 3*time.Hour || sb.CreatedAt.Before(began.Add(-time.Second)) {
			t.Errorf("handed out: %+v", sb)
		}
		in, err := w.Driver.Inspect(context.Background(), backend.RefOf(sb))
		if err != nil || in.Spec == nil || in.Spec.Network.Mode != agentlab.NetworkNAT {
			t.Errorf("the backend has %+v, %v", in.Spec, err)
		}
		if evs := w.Events(agentlab.EventSandboxCreated); len(evs) != 1 || !strings.Contains(evs[0].Data, `"pool"`) || evs[0].SandboxVMID != sb.VMID {
			t.Errorf("events %+v", evs)
		}
		w.Filled(2)
		if _, err := w.Svc.Destroy(context.Background(), sb.VMID); err != nil {
			t.Fatal(err)
		}
		w.Until(sb.VMID, agentlab.SandboxDestroyed)
		if len(w.Pooled()) != 2 {
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
			inPool(t, 1, func(w *sandboxtest.World) {
				p := w.Profiles.List["plain"]
				p.Resources.RootSizeGB = 40
				w.Profiles.List["big"] = p
				if sb := w.Create(r); sb.State != agentlab.SandboxRequested {
					t.Fatalf("%+v", sb)
				} else if sb = w.Until(sb.VMID, agentlab.SandboxReady); sb.Start != agentlab.StartBoot && sb.Start != agentlab.StartTemplate {
					t.Errorf("start %q", sb.Start)
				}
				w.Filled(1)
			})
		})
	}
}

// A name that is taken, and the maximum number of sandboxes, count for sandboxes of
// the pool too. The pool itself does not count.
func TestPoolLimits(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		w.Kill()
		w.Limits.MaxSandboxes = 2
		w.Pool = []warmpool.Entry{{Image: "base", Count: 2}}
		w.Begin()
		w.Filled(2)
		w.Create(agentlab.SandboxRequest{Name: "one"})
		_, err := w.Svc.Create(context.Background(), agentlab.SandboxRequest{Name: "one"})
		sandboxtest.WantCode(t, err, agentlab.CodeExists)
		w.Create(agentlab.SandboxRequest{Name: "two"})
		_, err = w.Svc.Create(context.Background(), agentlab.SandboxRequest{Name: "three"})
		sandboxtest.WantCode(t, err, agentlab.CodeLimit)
	})
}

// A sandbox of the pool can be stopped and started after it was handed out, and
// boots if its VM has ended before that. It then has another name than its VM.
func TestPoolStartsAgain(t *testing.T) {
	t.Run("stopped", func(t *testing.T) {
		inPool(t, 1, func(w *sandboxtest.World) {
			ctx := context.Background()
			sb := w.Until(w.Create(agentlab.SandboxRequest{Name: "play"}).VMID, agentlab.SandboxReady)
			sandboxtest.Must(w.Svc.Stop(ctx, sb.VMID, 0))(t)
			w.Until(sb.VMID, agentlab.SandboxStopped)
			sandboxtest.Must(w.Svc.Start(ctx, sb.VMID))(t)
			if sb = w.Until(sb.VMID, agentlab.SandboxReady, agentlab.SandboxFailed); sb.State != agentlab.SandboxReady {
				t.Errorf("%s: %s", sb.State, sb.Reason)
			}
		})
	})
	t.Run("died in the pool", func(t *testing.T) {
		inPool(t, 1, func(w *sandboxtest.World) {
			p := w.Pooled()[0]
			if err := w.Host.CrashVM(backend.RefOf(p), "killed"); err != nil {
				t.Fatal(err)
			}
			sb := w.Create(agentlab.SandboxRequest{Name: "play"})
			if sb.UID != p.UID {
				t.Fatalf("not from the pool: %+v", sb)
			}
			if sb = w.Until(sb.VMID, agentlab.SandboxReady, agentlab.SandboxFailed); sb.State != agentlab.SandboxReady {
				t.Errorf("%s: %s", sb.State, sb.Reason)
			}
		})
	})
}

// A sandbox whose policy cannot be applied is not continued.
func TestPoolFailsClosed(t *testing.T) {
	inPool(t, 1, func(w *sandboxtest.World) {
		w.Host.Inject(fake.Fault{Op: fake.OpUpdateNetwork, Err: agentlab.Errorf(agentlab.CodeInternal, "no rules today")})
		sb := w.Create(agentlab.SandboxRequest{})
		resumes := w.Host.Calls(fake.OpResume)
		sb = w.Until(sb.VMID, agentlab.SandboxFailed)
		if !strings.Contains(sb.Reason, "no rules today") || w.Host.Calls(fake.OpResume) != resumes {
			t.Errorf("%q, %d times resumed", sb.Reason, w.Host.Calls(fake.OpResume)-resumes)
		}
	})
}

// The policy is in force before the guest continues.
func TestPoolPolicyFirst(t *testing.T) {
	inPool(t, 1, func(w *sandboxtest.World) {
		checked := false
		w.Host.Inject(fake.Fault{Op: fake.OpResume, Hook: func(sp backend.Spec) {
			in, err := w.Host.Open().Inspect(context.Background(), backend.Ref{UID: sp.UID})
			checked = err == nil && in.Spec.Network.Mode == agentlab.NetworkNAT
		}})
		w.Until(w.Create(agentlab.SandboxRequest{}).VMID, agentlab.SandboxReady)
		if !checked {
			t.Error("it was continued with the policy of the pool")
		}
	})
}

// No user can reach a sandbox of the pool. It can be destroyed, and is replaced.
func TestPooledIsNobodys(t *testing.T) {
	inPool(t, 1, func(w *sandboxtest.World) {
		ctx, vmid := context.Background(), w.Pooled()[0].VMID
		for name, call := range map[string]func() error{
			"exec":    func() error { _, err := w.Svc.Exec(ctx, vmid, guestapi.ExecRequest{}); return err },
			"attach":  func() error { _, err := w.Svc.Attach(ctx, vmid, guestapi.AttachRequest{}); return err },
			"ssh":     func() error { _, err := w.Svc.SSHKey(ctx, vmid, guestapi.SSHKeyRequest{}); return err },
			"dial":    func() error { _, err := w.Svc.DialGuest(ctx, vmid, 7); return err },
			"start":   func() error { _, err := w.Svc.Start(ctx, vmid); return err },
			"stop":    func() error { _, err := w.Svc.Stop(ctx, vmid, 0); return err },
			"suspend": func() error { _, err := w.Svc.Suspend(ctx, vmid, false); return err },
			"resume":  func() error { _, err := w.Svc.Resume(ctx, vmid); return err },
			"renew":   func() error { _, err := w.Svc.RenewLease(ctx, vmid, time.Hour); return err },
			"narrow":  func() error { return w.Svc.NarrowNetwork(ctx, vmid, agentlab.Network{Mode: agentlab.NetworkOff}) },
			"save":    func() error { _, err := w.Snaps.SaveSnapshot(ctx, vmid, "s", false); return err },
			"fork":    func() error { _, err := w.Snaps.Fork(ctx, vmid, agentlab.ForkRequest{Count: 1}); return err },
			"reload": func() error {
				out, err := w.Svc.ReloadNetworks(ctx, []int{vmid})
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
		if out, err := w.Svc.ReloadNetworks(ctx, nil); err != nil || len(out) != 0 {
			t.Errorf("reload of all: %+v, %v", out, err)
		}
		if sb := w.Pooled()[0]; sb.State != agentlab.SandboxPooled || sb.VMID != vmid {
			t.Errorf("changed: %+v", sb)
		}
		if _, err := w.Svc.Destroy(ctx, vmid); err != nil {
			t.Fatal(err)
		}
		w.When("replaced", func(rows []agentlab.Sandbox) bool {
			return len(rows) == 1 && rows[0].VMID != vmid && rows[0].State == agentlab.SandboxPooled
		})
	})
}

// A request that starts a VM stops what is being made for the pool, and does not
// wait for it.
func TestPoolGivesWayToStarts(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		w.Kill()
		w.Limits.ParallelBoots = 1
		w.Pool = []warmpool.Entry{{Image: "base", Count: 1}}
		w.Begin()
		w.When("being made", func(rows []agentlab.Sandbox) bool {
			return len(rows) == 1 && rows[0].State == agentlab.SandboxBooting
		})
		old := w.Pooled()[0]
		began := time.Now()
		sb := w.Create(agentlab.SandboxRequest{Cores: 2})
		w.When("destroyed", func(rows []agentlab.Sandbox) bool { return len(rows) == 0 })
		if w.Power(old) != "" {
			t.Error("its VM is left")
		}
		sb = w.Until(sb.VMID, agentlab.SandboxReady)
		if took := time.Since(began); took > 2500*time.Millisecond { // a boot takes 2 s
			t.Errorf("it took %s", took)
		}
		ready := time.Now()
		w.When("made again", func(rows []agentlab.Sandbox) bool { return len(rows) == 1 })
		if quiet := time.Since(ready); quiet < 2*time.Second {
			t.Errorf("the pool goes on %s after a start", quiet)
		}
		w.Filled(1)
		if f := w.Warm.Findings(); len(f) != 0 {
			t.Errorf("findings %+v", f)
		}
	})
}

// While a sandbox of a user starts, however long, none is made.
func TestPoolWaitsForStarts(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		w.Kill()
		w.Pool = []warmpool.Entry{{Image: "base", Count: 1}}
		w.Begin()
		sb := w.Create(agentlab.SandboxRequest{Name: "never-boots", Cores: 2})
		w.When("empty", func(rows []agentlab.Sandbox) bool { return len(rows) == 0 })
		w.UntilIt(sb.VMID, func(sb agentlab.Sandbox) bool {
			if n := len(w.Pooled()); n != 0 && sb.State != agentlab.SandboxFailed {
				t.Fatalf("%d in the pool while a sandbox is %s", n, sb.State)
			}
			return sb.State == agentlab.SandboxFailed
		})
		w.Filled(1)
	})
}

// When numbers are short, the pool gives its own to a request.
func TestPoolGivesNumbers(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		w.Kill()
		w.Limits.VMIDFirst, w.Limits.VMIDLast = 1000, 1001
		w.Pool = []warmpool.Entry{{Image: "base", Count: 2}}
		w.Begin()
		w.Filled(2)
		sb := w.Create(agentlab.SandboxRequest{Cores: 2})
		w.Until(sb.VMID, agentlab.SandboxReady)
		w.Filled(1)
		other := w.Create(agentlab.SandboxRequest{Cores: 2})
		w.Until(other.VMID, agentlab.SandboxReady)
		_, err := w.Svc.Create(context.Background(), agentlab.SandboxRequest{Cores: 2})
		sandboxtest.WantCode(t, err, agentlab.CodeLimit)
	})
}

// Without room on the host there is no pool, neither in memory nor on disk.
func TestPoolNeedsRoom(t *testing.T) {
	noMemory := fake.Fault{Op: fake.OpRoom, Err: agentlab.Errorf(agentlab.CodeNoSpace, "no memory")}
	inPool(t, 2, func(w *sandboxtest.World) {
		remove := w.Host.Inject(noMemory)
		sb := w.Create(agentlab.SandboxRequest{Cores: 2})
		began := time.Now()
		w.Until(sb.VMID, agentlab.SandboxBooting, agentlab.SandboxReady)
		w.When("empty", func(rows []agentlab.Sandbox) bool { return len(rows) == 0 })
		if took := time.Since(began); took > time.Second {
			t.Errorf("the pool was destroyed after %s", took)
		}
		w.Until(sb.VMID, agentlab.SandboxReady)
		time.Sleep(time.Minute)
		if n := len(w.Pooled()); n != 0 {
			t.Errorf("%d are made without memory", n)
		}
		if f := w.Warm.Findings(); len(f) != 1 || !strings.Contains(f[0].Detail, "no memory") {
			t.Errorf("findings %+v", f)
		}
		remove()
		w.Filled(2)
		w.Full.Store(true)
		w.When("empty", func(rows []agentlab.Sandbox) bool { return len(rows) == 0 })
		w.Full.Store(false)
		w.Filled(2)
		// What is not known changes nothing.
		before := w.Pooled()
		w.Host.Inject(fake.Fault{Op: fake.OpRoom, Times: 10, Err: agentlab.Errorf(agentlab.CodeUnavailable, "no answer")})
		time.Sleep(15 * time.Second)
		if after := w.Pooled(); len(after) != 2 || after[0].UID != before[0].UID || after[1].UID != before[1].UID {
			t.Errorf("the pool was changed: %+v", after)
		}
	})
}

// What an image or the configuration no longer describes is replaced or removed.
func TestPoolIsCurrent(t *testing.T) {
	inPool(t, 2, func(w *sandboxtest.World) {
		old := w.Pooled()
		w.Images.Mu.Lock()
		w.Images.Digest = "sha256-2"
		w.Images.Mu.Unlock()
		if sb := w.Create(agentlab.SandboxRequest{}); sb.State != agentlab.SandboxRequested {
			t.Errorf("an outdated sandbox was handed out: %+v", sb)
		}
		w.When("replaced", func(rows []agentlab.Sandbox) bool {
			return len(rows) == 2 && rows[0].Image == "base@sha256-2" && rows[1].Image == "base@sha256-2" && rows[1].State == agentlab.SandboxPooled
		})
		for _, sb := range old {
			if w.Power(sb) != "" {
				t.Error("an outdated VM is left")
			}
		}
		w.Images.Mu.Lock()
		w.Images.Missing = true
		calls := w.Images.Calls
		w.Images.Mu.Unlock()
		time.Sleep(time.Minute)
		if w.Images.Calls != calls {
			t.Error("the pool builds images")
		}
		w.Images.Mu.Lock()
		w.Images.Missing = false
		w.Images.Mu.Unlock()
		w.Kill()
		w.Pool = nil
		w.Begin()
		w.When("empty", func(rows []agentlab.Sandbox) bool { return len(rows) == 0 })
		if left, err := w.Driver.List(context.Background()); err != nil || len(left) != 1 { // that of the request
			t.Errorf("left: %+v, %v", left, err)
		}
	})
}

// One that has waited long is replaced.
func TestPoolIsRenewed(t *testing.T) {
	inPool(t, 1, func(w *sandboxtest.World) {
		old := w.Pooled()[0]
		time.Sleep(3 * time.Hour)
		if sb := w.Filled(1)[0]; sb.UID == old.UID {
			t.Error("it still waits")
		}
	})
}

// Failures are repeated less and less often, and reported.
func TestPoolBacksOff(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		w.Host.Inject(fake.Fault{Op: fake.OpStart, Err: agentlab.Errorf(agentlab.CodeInternal, "no start")})
		w.Kill()
		w.Pool = []warmpool.Entry{{Image: "base", Count: 1}}
		w.Begin()
		time.Sleep(2 * time.Hour)
		if n := w.Host.Calls(fake.OpStart); n < 5 || n > 25 {
			t.Errorf("%d attempts in two hours", n)
		}
		if f := w.Warm.Findings(); len(f) != 1 || !strings.Contains(f[0].Detail, "no start") {
			t.Errorf("findings %+v", f)
		}
		if st, err := w.Warm.Status(context.Background()); err != nil || len(st) != 1 || st[0].Ready != 0 || !strings.Contains(st[0].Problem, "no start") {
			t.Errorf("status %+v, %v", st, err)
		}
	})
}

// One whose VM dies is replaced, and is never handed out as it is.
func TestPooledVMDies(t *testing.T) {
	inPool(t, 1, func(w *sandboxtest.World) {
		old := w.Pooled()[0]
		if err := w.Host.CrashVM(backend.RefOf(old), "killed"); err != nil {
			t.Fatal(err)
		}
		w.When("replaced", func(rows []agentlab.Sandbox) bool {
			return len(rows) == 1 && rows[0].UID != old.UID && rows[0].State == agentlab.SandboxPooled
		})
		old = w.Pooled()[0]
		if err := w.Host.CrashVM(backend.RefOf(old), "killed"); err != nil {
			t.Fatal(err)
		}
		sb := w.Create(agentlab.SandboxRequest{}) // before the pool notices
		if sb.UID != old.UID {
			t.Fatalf("another one: %+v", sb)
		}
		w.Until(sb.VMID, agentlab.SandboxReady)
	})
}

// A backend that cannot pause guests has a pool of running ones, and one that cannot
// change policies has none.
func TestPoolOfOtherBackends(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		w.Kill()
		w.Wrap = func(d backend.Driver) backend.Driver {
			return struct {
				backend.Driver
				backend.Net
				backend.Host
			}{d, backend.GroupsOf(d).Net, backend.GroupsOf(d).Host}
		}
		w.Pool = []warmpool.Entry{{Image: "base", Count: 1}}
		w.Begin()
		p := w.Filled(1)[0]
		if w.Power(p) != backend.PowerRunning {
			t.Errorf("it is %s", w.Power(p))
		}
		if sb := w.Until(w.Create(agentlab.SandboxRequest{}).VMID, agentlab.SandboxReady); sb.UID != p.UID || sb.Network.Mode != agentlab.NetworkNAT || sb.NetworkPending {
			t.Errorf("%+v", sb)
		}
		w.Kill()
		w.Wrap, w.Plain = nil, true
		w.Begin()
		w.When("empty", func(rows []agentlab.Sandbox) bool { return len(rows) == 0 })
		time.Sleep(time.Minute)
		if f := w.Warm.Findings(); len(w.Pooled()) != 0 || len(f) != 1 || !strings.Contains(f[0].Detail, "cannot have a warm pool") {
			t.Errorf("%+v, findings %+v", w.Pooled(), f)
		}
	})
}

// A daemon that ends at any point leaves nothing that the next one does not remove
// or complete.
func TestPoolKill(t *testing.T) {
	for _, op := range []fake.Op{fake.OpCreate, fake.OpStart, fake.OpSuspend, fake.OpSetDeadline} {
		for _, at := range []fake.Point{fake.Before, fake.After} {
			t.Run(fmt.Sprintf("made/%s/%s", op, at), func(t *testing.T) {
				sandboxtest.InWorld(t, func(w *sandboxtest.World) {
					w.Kill()
					w.Pool = []warmpool.Entry{{Image: "base", Count: 1}}
					w.Host.Inject(fake.Fault{Op: op, At: at, Times: 1, Crash: true})
					w.Begin()
					time.Sleep(10 * time.Second)
					w.Restart()
					w.Filled(1)
					if list, err := w.Driver.List(context.Background()); err != nil || len(list) != 1 {
						t.Errorf("VMs: %+v, %v", list, err)
					}
				})
			})
		}
	}
	for _, op := range []fake.Op{fake.OpUpdateNetwork, fake.OpResume, fake.OpSetDeadline, fake.OpListenGuest, fake.OpDialControl, fake.OpInspect} {
		for _, at := range []fake.Point{fake.Before, fake.After} {
			t.Run(fmt.Sprintf("handed out/%s/%s", op, at), func(t *testing.T) {
				inPool(t, 1, func(w *sandboxtest.World) {
					p := w.Pooled()[0]
					w.Host.Inject(fake.Fault{Op: op, At: at, Times: 1, Crash: true})
					sb := w.Create(agentlab.SandboxRequest{Name: "play"})
					time.Sleep(3 * time.Second)
					w.Restart()
					sb = w.Until(sb.VMID, agentlab.SandboxReady)
					in, err := w.Driver.Inspect(context.Background(), backend.RefOf(sb))
					if sb.UID != p.UID || sb.Start != agentlab.StartPool || sb.NetworkPending || err != nil || in.Power != backend.PowerRunning || in.Spec.Network.Mode != agentlab.NetworkNAT {
						t.Errorf("%+v, %+v, %v", sb, in, err)
					}
					if again := w.Filled(1)[0]; again.UID == p.UID {
						t.Error("the same one twice")
					}
				})
			})
		}
	}
	t.Run("row left", func(t *testing.T) {
		inPool(t, 1, func(w *sandboxtest.World) {
			w.Kill()
			db, err := store.Open(context.Background(), w.Path, store.Options{})
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
			w.Begin()
			w.Filled(1)
		})
	})
	t.Run("waiting", func(t *testing.T) {
		inPool(t, 2, func(w *sandboxtest.World) {
			old := w.Pooled()
			w.Restart()
			w.When("replaced", func(rows []agentlab.Sandbox) bool {
				return len(rows) == 2 && rows[0].UID != old[0].UID && rows[1].UID != old[1].UID && rows[1].State == agentlab.SandboxPooled
			})
			if list, err := w.Driver.List(context.Background()); err != nil || len(list) != 2 {
				t.Errorf("VMs: %+v, %v", list, err)
			}
		})
	})
}

// Many requests at once get different sandboxes.
func TestPoolHandsOutOnce(t *testing.T) {
	inPool(t, 3, func(w *sandboxtest.World) {
		made := make(chan agentlab.Sandbox)
		for range 6 {
			go func() {
				sb, err := w.Svc.Create(context.Background(), agentlab.SandboxRequest{})
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
			w.Until(vmid, agentlab.SandboxReady)
		}
	})
}

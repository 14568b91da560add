package sandbox_test

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/internal/sandbox"
	"github.com/agentlab-vm/agentlab/internal/sandbox/sandboxtest"
)

func TestFromRequestToDestroyed(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		ctx := context.Background()
		sb := w.Create(agentlab.SandboxRequest{Name: "play"})
		if sb.State != agentlab.SandboxRequested || sb.VMID == 0 || sb.Image != "base" {
			w.Fatalf("created %+v", sb)
		}
		began := time.Now()
		sb = w.Until(sb.VMID, agentlab.SandboxReady)
		if d := time.Since(began); d > 2500*time.Millisecond {
			w.Errorf("READY after %s, the guest answers after 2 s", d)
		}
		if sb.Image != "base@sha256-1" || sb.IP != "10.77.0.2" || sb.BootedAt.IsZero() {
			w.Errorf("READY as %+v", sb)
		}
		if left := sb.LeaseExpiresAt.Sub(began); left < time.Hour || left > time.Hour+time.Second {
			w.Errorf("the lease is %s, want an hour", left)
		}
		if got, err := w.Svc.Get(ctx, "play"); err != nil || got.VMID != sb.VMID {
			w.Errorf("by name: %v, %v", got, err)
		}
		if _, err := w.Svc.Destroy(ctx, sb.VMID); err != nil {
			w.Fatal(err)
		}
		w.Until(sb.VMID, agentlab.SandboxDestroyed)
		if p := w.Power(sb); p != "" {
			w.Errorf("the backend still has it: %s", p)
		}
		if _, err := w.Svc.Destroy(ctx, sb.VMID); err != nil {
			w.Errorf("destroying it again: %v", err)
		}
		_, err := w.Svc.Get(ctx, "play")
		sandboxtest.WantCode(t, err, agentlab.CodeNotFound)
		if show := fmt.Sprintf("'agentlab sandbox show %d'", sb.VMID); !strings.HasSuffix(agentlab.HintOf(err), show) {
			w.Errorf("the hint %q does not name %s", agentlab.HintOf(err), show)
		}

		var states []string
		for _, e := range w.Events(agentlab.EventSandboxState) {
			states = append(states, e.Message)
		}
		want := "sandbox play is PROVISIONING|sandbox play is BOOTING|sandbox play is READY|sandbox play will be destroyed|sandbox play is DESTROYED"
		if got := strings.Join(states, "|"); got != want {
			w.Errorf("events:\n%s\nwant:\n%s", got, want)
		}
	})
}

func TestStopAndStart(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		ctx := context.Background()
		sb := w.Create(agentlab.SandboxRequest{Name: "play"})
		_, err := w.Svc.Stop(ctx, sb.VMID, time.Second)
		if err != nil { // while it is being made there is nothing to stop
			sandboxtest.WantCode(t, err, agentlab.CodeConflict)
		}
		w.Until(sb.VMID, agentlab.SandboxReady)
		if _, err := w.Svc.Stop(ctx, sb.VMID, time.Second); err != nil {
			w.Fatal(err)
		}
		w.Until(sb.VMID, agentlab.SandboxStopped)
		if p := w.Power(sb); p != backend.PowerStopped {
			w.Errorf("power %s", p)
		}
		_, err = w.Svc.DialGuest(ctx, sb.VMID, 7)
		sandboxtest.WantCode(t, err, agentlab.CodeConflict)
		for range 2 {
			if _, err := w.Svc.Stop(ctx, sb.VMID, 0); err != nil {
				w.Errorf("stopping a stopped one: %v", err)
			}
		}
		booted := w.Get(sb.VMID).BootedAt
		for range 2 {
			if _, err := w.Svc.Start(ctx, sb.VMID); err != nil {
				w.Fatal(err)
			}
			sb = w.Until(sb.VMID, agentlab.SandboxReady)
		}
		if !sb.BootedAt.Equal(booted) {
			w.Error("the first boot's time was overwritten")
		}
		c, err := w.Svc.DialGuest(ctx, sb.VMID, 7)
		if err != nil {
			w.Fatal(err)
		}
		_ = c.Close()
	})
}

// A sandbox that was recovered without its profile is not started.
func TestRecoveredSandboxIsNotStarted(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		ctx := context.Background()
		sb := w.Create(agentlab.SandboxRequest{Name: "play"})
		sb = w.Until(sb.VMID, agentlab.SandboxReady)
		if _, err := w.Svc.Stop(ctx, sb.VMID, 0); err != nil {
			w.Fatal(err)
		}
		w.Until(sb.VMID, agentlab.SandboxStopped)
		if _, err := w.Store.UpdateSandbox(ctx, sb.VMID, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
			sb.Profile = agentlab.ProfileLost
			return nil, nil
		}); err != nil {
			w.Fatal(err)
		}
		_, err := w.Svc.Start(ctx, sb.VMID)
		sandboxtest.WantCode(t, err, agentlab.CodeConflict)
		if !strings.Contains(agentlab.HintOf(err), "agentlab sandbox destroy") {
			w.Errorf("hint %q", agentlab.HintOf(err))
		}
	})
}

func TestStopCutsAStubbornGuest(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		sb := w.Create(agentlab.SandboxRequest{Name: "never-stops"})
		w.Until(sb.VMID, agentlab.SandboxReady)
		began := time.Now()
		if _, err := w.Svc.Stop(context.Background(), sb.VMID, 20*time.Second); err != nil {
			w.Fatal(err)
		}
		w.Until(sb.VMID, agentlab.SandboxStopped)
		if d := time.Since(began); d < 20*time.Second || d > 21*time.Second {
			w.Errorf("stopped after %s, want the grace of 20 s", d)
		}
	})
}

// Destroy counts at every moment, also inside a slow step.
func TestDestroyInterrupts(t *testing.T) {
	for _, state := range []agentlab.SandboxState{agentlab.SandboxRequested, agentlab.SandboxProvisioning, agentlab.SandboxBooting, agentlab.SandboxReady, agentlab.SandboxFailed, agentlab.SandboxStopped} {
		t.Run(string(state), func(t *testing.T) {
			sandboxtest.InWorld(t, func(w *sandboxtest.World) {
				ctx := context.Background()
				name := "play"
				switch state {
				case agentlab.SandboxProvisioning:
					w.Images.Build = func(ctx context.Context, _ string, _ func(string)) error {
						select { // an hour's build
						case <-ctx.Done():
							return ctx.Err()
						case <-time.After(time.Hour):
							return nil
						}
					}
				case agentlab.SandboxBooting:
					name = "never-boots"
				case agentlab.SandboxFailed:
					name = "crash-boots"
				}
				sb := w.Create(agentlab.SandboxRequest{Name: name})
				if state == agentlab.SandboxStopped {
					w.Until(sb.VMID, agentlab.SandboxReady)
					if _, err := w.Svc.Stop(ctx, sb.VMID, 0); err != nil {
						w.Fatal(err)
					}
				}
				if state != agentlab.SandboxRequested { // it is, and may be no longer at the first look
					w.Until(sb.VMID, state)
				}
				began := time.Now()
				if _, err := w.Svc.Destroy(ctx, sb.VMID); err != nil {
					w.Fatal(err)
				}
				w.Until(sb.VMID, agentlab.SandboxDestroyed)
				if d := time.Since(began); d > time.Second {
					w.Errorf("destroyed after %s", d)
				}
				if p := w.Power(sb); p != "" {
					w.Errorf("the backend still has it: %s", p)
				}
			})
		})
	}
}

func TestBadRequests(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		w.Create(agentlab.SandboxRequest{Name: "taken"})
		for _, test := range []struct {
			name  string
			r     agentlab.SandboxRequest
			code  agentlab.Code
			field string
		}{
			{"bad name", agentlab.SandboxRequest{Name: "No_Name"}, agentlab.CodeInvalid, "name"},
			{"digits", agentlab.SandboxRequest{Name: "123"}, agentlab.CodeInvalid, "name"},
			{"taken name", agentlab.SandboxRequest{Name: "taken"}, agentlab.CodeExists, "name"},
			{"profile", agentlab.SandboxRequest{Profile: "nope"}, agentlab.CodeNotFound, "profile"},
			{"image", agentlab.SandboxRequest{Image: "nope"}, agentlab.CodeNotFound, "image"},
			{"short lease", agentlab.SandboxRequest{TTL: time.Second}, agentlab.CodeInvalid, "ttl"},
			{"negative lease", agentlab.SandboxRequest{TTL: -time.Hour}, agentlab.CodeInvalid, "ttl"},
			{"profile's lease", agentlab.SandboxRequest{Profile: "long"}, agentlab.CodeInvalid, "ttl"},
			{"cores", agentlab.SandboxRequest{Cores: 1000}, agentlab.CodeInvalid, "resources.cores"},
			{"memory", agentlab.SandboxRequest{MemoryMB: 1}, agentlab.CodeInvalid, "resources.memory_mb"},
			{"unsupported", agentlab.SandboxRequest{Cores: 65}, agentlab.CodeUnsupported, "resources.cores"},
		} {
			_, err := w.Svc.Create(context.Background(), test.r)
			if e, _ := err.(*agentlab.Error); e == nil || e.Code != test.code || e.Field != test.field {
				w.Errorf("%s: got %v, want code %s of field %s", test.name, err, test.code, test.field)
			}
		}
		all, err := w.Svc.List(context.Background(), agentlab.SandboxFilter{Destroyed: true})
		if err != nil || len(all) != 1 {
			w.Errorf("refused requests left rows: %v, %v", all, err)
		}
	})
}

func TestLimits(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		w.Limits = sandbox.Limits{MaxSandboxes: 1, MaxTTL: 2 * time.Hour}
		w.Restart()
		_, err := w.Svc.Create(context.Background(), agentlab.SandboxRequest{TTL: 3 * time.Hour})
		sandboxtest.WantCode(t, err, agentlab.CodeInvalid)
		sb := w.Create(agentlab.SandboxRequest{})
		_, err = w.Svc.Create(context.Background(), agentlab.SandboxRequest{})
		sandboxtest.WantCode(t, err, agentlab.CodeLimit)
		_, err = w.Svc.RenewLease(context.Background(), sb.VMID, 3*time.Hour)
		sandboxtest.WantCode(t, err, agentlab.CodeInvalid)
		_, err = w.Svc.RenewLease(context.Background(), sb.VMID, 0)
		sandboxtest.WantCode(t, err, agentlab.CodeInvalid)
		_, err = w.Svc.RenewLease(context.Background(), 4711, time.Hour)
		sandboxtest.WantCode(t, err, agentlab.CodeNotFound)
	})
}

func TestLeaseEnds(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		began := time.Now()
		sb := w.Create(agentlab.SandboxRequest{Name: "play", TTL: time.Hour})
		sb = w.Until(sb.VMID, agentlab.SandboxDestroyed)
		if d := time.Since(began); d < time.Hour || d > time.Hour+time.Minute {
			w.Errorf("destroyed after %s, the lease was an hour", d)
		}
		if sb.Reason != "its lease ended" {
			w.Errorf("reason %q", sb.Reason)
		}
		var states []string
		for _, e := range w.Events(agentlab.EventSandboxState) {
			states = append(states, e.Message)
		}
		if got := strings.Join(states[3:], "|"); got != "sandbox play is TIMEOUT: its lease ended|sandbox play is STOPPED: its lease ended|sandbox play is DESTROYED: its lease ended" {
			w.Error(got)
		}
	})
}

func TestLeaseIsRenewed(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		began := time.Now()
		sb := w.Create(agentlab.SandboxRequest{TTL: time.Hour})
		w.Until(sb.VMID, agentlab.SandboxReady)
		time.Sleep(59 * time.Minute)
		if _, err := w.Svc.RenewLease(context.Background(), sb.VMID, time.Hour); err != nil {
			w.Fatal(err)
		}
		w.Until(sb.VMID, agentlab.SandboxDestroyed)
		if d := time.Since(began); d < 119*time.Minute || d > 121*time.Minute {
			w.Errorf("destroyed after %s", d)
		}
		_, err := w.Svc.RenewLease(context.Background(), sb.VMID, time.Hour)
		sandboxtest.WantCode(t, err, agentlab.CodeConflict)
	})
}

// A keepalive sandbox is stopped and kept a while, then destroyed.
func TestKeepaliveLeaseEnds(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		w.Limits.KeepaliveGrace = time.Hour
		w.Restart()
		began := time.Now()
		sb := w.Create(agentlab.SandboxRequest{TTL: time.Hour, Keepalive: new(true)})
		sb = w.Until(sb.VMID, agentlab.SandboxStopped)
		if d := time.Since(began); d < time.Hour || d > time.Hour+time.Minute {
			w.Errorf("stopped after %s, the lease was an hour", d)
		}
		if p := w.Power(sb); p != backend.PowerStopped {
			w.Errorf("power %q, its disk should be kept", p)
		}
		if _, err := w.Svc.RenewLease(context.Background(), sb.VMID, 90*time.Minute); err != nil {
			w.Fatal(err)
		}
		if _, err := w.Svc.Start(context.Background(), sb.VMID); err != nil {
			w.Fatal(err)
		}
		w.Until(sb.VMID, agentlab.SandboxReady)
		w.Until(sb.VMID, agentlab.SandboxStopped)
		w.Until(sb.VMID, agentlab.SandboxDestroyed)
		if d := time.Since(began); d < 210*time.Minute || d > 212*time.Minute {
			w.Errorf("destroyed after %s, want 60+90+60 min", d)
		}
	})
}

// A sandbox whose guest reboots is started again, unless it reboots all the time.
func TestGuestReboots(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		sb := w.Create(agentlab.SandboxRequest{Name: "play", TTL: 4 * time.Hour})
		sb = w.Until(sb.VMID, agentlab.SandboxReady)
		// It is STOPPED only for a moment.
		reboot := func() agentlab.Sandbox {
			t.Helper()
			if err := w.Host.RebootVM(backend.RefOf(sb)); err != nil {
				t.Fatal(err)
			}
			return w.UntilIt(sb.VMID, func(sb agentlab.Sandbox) bool {
				return sb.State == agentlab.SandboxReady && w.Power(sb) == backend.PowerRunning || sb.Desired == agentlab.DesiredStopped
			})
		}
		reboot()
		if !slices.ContainsFunc(w.Events(agentlab.EventSandboxState), func(e agentlab.Event) bool {
			return e.Message == "sandbox play is STOPPED: the guest rebooted itself; it is started again"
		}) {
			t.Error("there is no event of the reboot")
		}
		time.Sleep(3 * time.Hour)
		for range 5 {
			if sb = reboot(); sb.State != agentlab.SandboxReady {
				t.Fatalf("%s: %s", sb.State, sb.Reason)
			}
		}
		sb = reboot()
		if sb.State != agentlab.SandboxStopped || sb.Reason != "the guest rebooted itself too often; it is not started again" {
			t.Errorf("%s: %s", sb.State, sb.Reason)
		}
		if _, err := w.Svc.Start(context.Background(), sb.VMID); err != nil {
			t.Fatal(err)
		}
		w.Until(sb.VMID, agentlab.SandboxReady)
	})
}

// A reboot counts once, also if the database has no space for its result for a while.
func TestRebootOnFullDisk(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		sb := w.Until(w.Create(agentlab.SandboxRequest{Name: "play"}).VMID, agentlab.SandboxReady)
		for range 5 {
			w.DBFull.Store(true)
			if err := w.Host.RebootVM(backend.RefOf(sb)); err != nil {
				t.Fatal(err)
			}
			time.Sleep(5 * time.Minute)
			w.DBFull.Store(false)
			sb = w.UntilIt(sb.VMID, func(sb agentlab.Sandbox) bool {
				return sb.State == agentlab.SandboxReady && w.Power(sb) == backend.PowerRunning || sb.Desired == agentlab.DesiredStopped
			})
			if sb.State != agentlab.SandboxReady {
				t.Fatalf("%s: %s", sb.State, sb.Reason)
			}
		}
	})
}

func TestManuallyFailedIsKept(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		sb := w.Create(agentlab.SandboxRequest{Name: "play"})
		w.Until(sb.VMID, agentlab.SandboxReady)
		if err := w.Host.CrashVM(backend.RefOf(sb), "triple\nfault \x1b[31m"); err != nil {
			w.Fatal(err)
		}
		began := time.Now()
		sb = w.Until(sb.VMID, agentlab.SandboxFailed)
		if d := time.Since(began); d > 6*time.Second {
			w.Errorf("the crash was seen after %s", d)
		}
		if sb.Reason != "its VM has crashed: triple fault [31m" {
			w.Errorf("reason %q", sb.Reason)
		}
		time.Sleep(time.Minute)
		if p := w.Power(sb); p != backend.PowerStopped {
			w.Errorf("power %q", p)
		}
		_, err := w.Svc.Start(context.Background(), sb.VMID)
		sandboxtest.WantCode(t, err, agentlab.CodeConflict)
		if _, err := w.Svc.Stop(context.Background(), sb.VMID, time.Second); err != nil {
			w.Fatal(err)
		}
		w.Until(sb.VMID, agentlab.SandboxStopped)
		if _, err := w.Svc.Start(context.Background(), sb.VMID); err != nil {
			w.Fatal(err)
		}
		w.Until(sb.VMID, agentlab.SandboxReady)
		w.Until(sb.VMID, agentlab.SandboxDestroyed) // by its lease
	})
}

func TestFailedLeaseEnds(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		sb := w.Create(agentlab.SandboxRequest{Name: "crash-boots"})
		sb = w.Until(sb.VMID, agentlab.SandboxFailed)
		if !strings.Contains(sb.Reason, "no working init") {
			w.Errorf("reason %q", sb.Reason)
		}
		sb = w.Until(sb.VMID, agentlab.SandboxDestroyed)
		if !strings.Contains(sb.Reason, "no working init") {
			w.Errorf("why it failed is lost: %q", sb.Reason)
		}
	})
}

func TestFailedOfAJobIsDestroyed(t *testing.T) {
	for _, keep := range []bool{false, true} {
		sandboxtest.InWorld(t, func(w *sandboxtest.World) {
			sb := w.Create(agentlab.SandboxRequest{Name: "crash-boots", JobID: agentlab.NewJobID(), Keepalive: &keep})
			began := time.Now()
			if !keep {
				w.Until(sb.VMID, agentlab.SandboxDestroyed)
				if d := time.Since(began); d > time.Minute {
					w.Errorf("destroyed after %s", d)
				}
				return
			}
			w.Until(sb.VMID, agentlab.SandboxFailed)
			time.Sleep(10 * time.Minute)
			w.Until(sb.VMID, agentlab.SandboxFailed)
		})
	}
}

func TestGuestThatNeverAnswers(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		began := time.Now()
		sb := w.Create(agentlab.SandboxRequest{Name: "never-boots"})
		sb = w.Until(sb.VMID, agentlab.SandboxFailed)
		if d := time.Since(began); d < 180*time.Second || d > 182*time.Second {
			w.Errorf("FAILED after %s", d)
		}
		if !strings.HasPrefix(sb.Reason, "its guest did not answer within 3m0s: the guest of sandbox") {
			w.Errorf("reason %q", sb.Reason)
		}
	})
}

func TestGuestPowersItselfOff(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		sb := w.Create(agentlab.SandboxRequest{Name: "play"})
		w.Until(sb.VMID, agentlab.SandboxReady)
		d := w.Host.Open()
		if err := d.Stop(context.Background(), backend.RefOf(sb), 0); err != nil {
			w.Fatal(err)
		}
		sb = w.Until(sb.VMID, agentlab.SandboxStopped)
		if sb.Desired != agentlab.DesiredStopped || sb.Reason != "the guest powered itself off" {
			w.Errorf("%+v", sb)
		}
	})
}

func TestVanishedVM(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		sb := w.Create(agentlab.SandboxRequest{Name: "play"})
		w.Until(sb.VMID, agentlab.SandboxReady)
		if err := w.Host.RemoveBehindBack(backend.RefOf(sb)); err != nil {
			w.Fatal(err)
		}
		sb = w.Until(sb.VMID, agentlab.SandboxFailed)
		if sb.Reason != "its VM was not found on the backend" {
			w.Errorf("reason %q", sb.Reason)
		}
		if _, err := w.Svc.Destroy(context.Background(), sb.VMID); err != nil {
			w.Fatal(err)
		}
		w.Until(sb.VMID, agentlab.SandboxDestroyed)
	})
}

// An unavailable backend is never read as an empty one.
func TestUnknownIsNotAbsent(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		sb := w.Create(agentlab.SandboxRequest{Name: "play"})
		w.Until(sb.VMID, agentlab.SandboxReady)
		away := agentlab.Errorf(agentlab.CodeUnavailable, "no route to host")
		remove := []func(){
			w.Host.Inject(fakeFault("inspect", away)),
			w.Host.Inject(fakeFault("list", away)),
		}
		w.Restart()
		time.Sleep(10 * time.Minute)
		if sb = w.Get(sb.VMID); sb.State != agentlab.SandboxReady {
			w.Fatalf("%s: %s", sb.State, sb.Reason)
		}
		for _, r := range remove {
			r()
		}
		time.Sleep(time.Minute)
		if sb = w.Get(sb.VMID); sb.State != agentlab.SandboxReady {
			w.Fatalf("%s: %s", sb.State, sb.Reason)
		}
	})
}

// counted is a driver that counts the streams to its guests.
type counted struct {
	*fake.Driver
	streams *atomic.Int32
}

func (d counted) DialControl(ctx context.Context, ref backend.Ref) (net.Conn, error) {
	c, err := d.Driver.DialControl(ctx, ref)
	if err == nil {
		d.streams.Add(1)
	}
	return c, err
}

// The first request to a guest that was just started is its identity: each request
// to an emulated guest that has just started is expensive.
func TestNewGuestIsNotAsked(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		var streams atomic.Int32
		w.Wrap = func(d backend.Driver) backend.Driver {
			return counted{d.(*fake.Driver), &streams}
		}
		w.Restart()
		sb := w.Create(agentlab.SandboxRequest{Name: "play"})
		for i := range 2 {
			w.Until(sb.VMID, agentlab.SandboxReady)
			if n := streams.Swap(0); n != 1 {
				t.Errorf("start %d: %d streams to a new guest", i, n)
			}
			if _, err := w.Svc.Stop(context.Background(), sb.VMID, 0); err != nil {
				t.Fatal(err)
			}
			w.Until(sb.VMID, agentlab.SandboxStopped)
			streams.Store(0) // the question whether it powers off
			if _, err := w.Svc.Start(context.Background(), sb.VMID); err != nil {
				t.Fatal(err)
			}
		}
	})
}

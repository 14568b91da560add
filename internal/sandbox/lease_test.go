package sandbox_test

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/sandbox/sandboxtest"
)

// An event warns 15 and 5 minutes before the end of a lease, once, and again after
// it was renewed.
func TestWarningsBeforeTheEnd(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		sb := w.Create(agentlab.SandboxRequest{Name: "play", TTL: time.Hour})
		w.Until(sb.VMID, agentlab.SandboxReady)
		end := w.Get(sb.VMID).LeaseExpiresAt
		for _, c := range []struct {
			left time.Duration
			want []int
		}{{15*time.Minute + time.Second, nil}, {14 * time.Minute, []int{15}}, {6 * time.Minute, []int{15}}, {4 * time.Minute, []int{15, 5}}} {
			time.Sleep(time.Until(end.Add(-c.left)))
			if got := w.Warnings(); !slices.Equal(got, c.want) {
				t.Fatalf("%s before the end: %v, want %v", c.left, got, c.want)
			}
		}
		if _, err := w.Svc.RenewLease(context.Background(), sb.VMID, 20*time.Minute); err != nil {
			t.Fatal(err)
		}
		time.Sleep(6 * time.Minute)
		w.Restart() // does not repeat a warning
		w.Until(sb.VMID, agentlab.SandboxReady)
		time.Sleep(2 * time.Minute)
		if got := w.Warnings(); !slices.Equal(got, []int{15, 5, 15}) {
			t.Fatalf("after renewal: %v", got)
		}
		w.Until(sb.VMID, agentlab.SandboxDestroyed)
		if got := w.Warnings(); !slices.Equal(got, []int{15, 5, 15, 5}) {
			t.Fatalf("at the end: %v", got)
		}
	})
}

// A lease that is short from the beginning has no warning that is due at once.
func TestShortLeaseIsNotWarnedOfAtOnce(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		sb := w.Create(agentlab.SandboxRequest{TTL: 10 * time.Minute})
		w.Until(sb.VMID, agentlab.SandboxDestroyed)
		if got := w.Warnings(); !slices.Equal(got, []int{5}) {
			t.Error(got)
		}
	})
}

// A lease does not end while a terminal is attached, until the longest lease since
// the sandbox was created has passed.
func TestAttachedTerminalRenews(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		w.Limits.MaxTTL = 3 * time.Hour
		w.Restart()
		sb := w.Create(agentlab.SandboxRequest{Name: "play", TTL: 30 * time.Minute})
		w.Until(sb.VMID, agentlab.SandboxReady)
		created := w.Get(sb.VMID).CreatedAt
		first, second := w.Attach(sb.VMID), w.Attach(sb.VMID)
		_ = first.Close()
		_ = first.Close() // counts once
		time.Sleep(2*time.Hour + 30*time.Minute)
		now := w.Get(sb.VMID)
		if now.State != agentlab.SandboxReady || !now.LeaseExpiresAt.Equal(created.Add(3*time.Hour)) {
			t.Fatalf("%s, ends %s after its creation", now.State, now.LeaseExpiresAt.Sub(created))
		}
		if got := w.Warnings(); len(got) != 0 {
			t.Errorf("warnings although it was renewed: %v", got)
		}
		sb = w.Until(sb.VMID, agentlab.SandboxDestroyed)
		if got := w.Warnings(); !slices.Equal(got, []int{15, 5}) {
			t.Errorf("warnings when it could not be renewed: %v", got)
		}
		_ = second.Close()
	})
}

// A terminal that was detached renews nothing, and neither does one of a sandbox
// that its user stops.
func TestDetachedTerminalDoesNotRenew(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		sb := w.Create(agentlab.SandboxRequest{Name: "play", TTL: 30 * time.Minute})
		w.Until(sb.VMID, agentlab.SandboxReady)
		end := w.Get(sb.VMID).LeaseExpiresAt
		_ = w.Attach(sb.VMID).Close()
		stopped := w.Create(agentlab.SandboxRequest{Name: "off", TTL: 30 * time.Minute})
		w.Until(stopped.VMID, agentlab.SandboxReady)
		held := w.Attach(stopped.VMID)
		defer func() { _ = held.Close() }()
		if _, err := w.Svc.Stop(context.Background(), stopped.VMID, time.Second); err != nil {
			t.Fatal(err)
		}
		w.Until(stopped.VMID, agentlab.SandboxStopped)
		w.Until(sb.VMID, agentlab.SandboxDestroyed)
		w.Until(stopped.VMID, agentlab.SandboxDestroyed)
		if d := time.Since(end); d > 10*time.Minute {
			t.Errorf("it ended %s after its lease", d)
		}
		for _, e := range w.Events(agentlab.EventSandboxLease) {
			if strings.Contains(e.Message, "terminal") {
				t.Error(e.Message)
			}
		}
	})
}

// A guest renews the lease of its sandbox only if the profile allows that, and never
// makes it shorter, longer than the maximum, or an event with each call.
func TestGuestRenews(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		ctx := context.Background()
		w.Limits.MaxTTL = 3 * time.Hour
		w.Restart()
		sb := w.Create(agentlab.SandboxRequest{Name: "play", TTL: 30 * time.Minute})
		w.Until(sb.VMID, agentlab.SandboxReady)
		if _, err := w.Svc.RenewFromGuest(ctx, sb.VMID, time.Hour); agentlab.CodeOf(err) != agentlab.CodeDenied {
			t.Errorf("a profile that does not allow it: %v", err)
		}
		p := w.Profiles.List["plain"]
		p.GuestRenew, p.TTL = true, 2*time.Hour
		w.Profiles.List["plain"] = p
		created := w.Get(sb.VMID).CreatedAt
		for _, c := range []struct {
			sleep, ttl time.Duration
			end        time.Duration // after the creation
			code       agentlab.Code
		}{
			{10 * time.Minute, time.Minute, 30 * time.Minute, ""}, // not shorter
			{0, 0, 2*time.Hour + 10*time.Minute, ""},
			{30 * time.Second, 0, 2*time.Hour + 10*time.Minute, ""}, // too little
			{0, 30 * time.Second, 0, agentlab.CodeInvalid},
			{0, 4 * time.Hour, 0, agentlab.CodeInvalid},
			{time.Hour, 0, 3 * time.Hour, ""},
			{0, 0, 3 * time.Hour, ""},
		} {
			time.Sleep(c.sleep)
			events := len(w.Events(agentlab.EventSandboxLease))
			end, err := w.Svc.RenewFromGuest(ctx, sb.VMID, c.ttl)
			if agentlab.CodeOf(err) != c.code || err == nil && (end.Sub(created) < c.end-time.Minute || end.Sub(created) > c.end+time.Minute) {
				t.Errorf("%+v: ends %s after the creation, %v", c, end.Sub(created), err)
			}
			if n := len(w.Events(agentlab.EventSandboxLease)) - events; n > 1 {
				t.Errorf("%+v: %d events", c, n)
			}
		}
		if _, err := w.Svc.Stop(ctx, sb.VMID, 0); err != nil {
			t.Fatal(err)
		}
		w.Until(sb.VMID, agentlab.SandboxStopped)
		before := w.Get(sb.VMID).LeaseExpiresAt
		if end, _ := w.Svc.RenewFromGuest(ctx, sb.VMID, 0); end.After(before) || !w.Get(sb.VMID).LeaseExpiresAt.Equal(before) {
			t.Errorf("a stopped sandbox renewed its lease to %s", end)
		}
	})
}

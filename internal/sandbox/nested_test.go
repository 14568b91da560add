package sandbox_test

import (
	"context"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/sandbox/sandboxtest"
)

// nestedWorld has the profiles auto and on.
func nestedWorld(w *sandboxtest.World) {
	for _, n := range []agentlab.Nested{agentlab.NestedAuto, agentlab.NestedOn} {
		p := w.Profiles.List["plain"]
		p.Resources.Nested = n
		w.Profiles.List[string(n)] = p
	}
}

// The guest reports at each start whether virtual machines run in it. Where they do not,
// a sandbox that can do without them starts with a warning.
func TestNestedReport(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		nestedWorld(w)
		for _, c := range []struct {
			name, profile string
			state         agentlab.NestedState
			event         string
		}{
			{"fine", "auto", agentlab.NestedWorks, "virtual machines can run in sandbox fine"},
			{"no-kvm", "auto", agentlab.NestedNoVM, "warning: virtual machines do not run in sandbox no-kvm: the kernel of the guest creates no virtual machine"},
			{"plain", "plain", "", ""},
		} {
			before := len(w.Events(agentlab.EventSandboxNested))
			sb := w.Until(w.Create(agentlab.SandboxRequest{Name: c.name, Profile: c.profile}).VMID, agentlab.SandboxReady)
			evs := w.Events(agentlab.EventSandboxNested)[before:]
			if sb.NestedState != c.state || len(evs) != min(1, len(c.event)) || len(evs) == 1 && evs[0].Message != c.event {
				t.Errorf("%s: state %q, events %v", c.name, sb.NestedState, evs)
			}
		}
		sb, err := w.Svc.Get(context.Background(), "no-kvm")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.Svc.Stop(context.Background(), sb.VMID, 0); err != nil {
			t.Fatal(err)
		}
		w.Until(sb.VMID, agentlab.SandboxStopped)
		if _, err := w.Svc.Start(context.Background(), sb.VMID); err != nil {
			t.Fatal(err)
		}
		w.Until(sb.VMID, agentlab.SandboxReady)
		if n := len(w.Events(agentlab.EventSandboxNested)); n != 3 {
			t.Errorf("%d reports after three starts", n)
		}
	})
}

// A sandbox that requires virtualization becomes FAILED if only its guest finds out that
// there is none.
func TestNestedRequired(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		nestedWorld(w)
		sb := w.Until(w.Create(agentlab.SandboxRequest{Name: "no-kvm", Profile: "on"}).VMID, agentlab.SandboxFailed, agentlab.SandboxReady)
		if sb.State != agentlab.SandboxFailed || !strings.Contains(sb.Reason, "requires nested virtualization: the kernel of the guest creates no virtual machine") {
			t.Errorf("%s: %s", sb.State, sb.Reason)
		}
		w.Until(w.Create(agentlab.SandboxRequest{Name: "fine", Profile: "on"}).VMID, agentlab.SandboxReady)
	})
}

// On a backend without virtualization, what requires it is refused before anything is
// created.
func TestNestedRefused(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		w.Kill()
		w.Plain = true
		w.Begin()
		nestedWorld(w)
		ctx := context.Background()
		_, err := w.Svc.Create(ctx, agentlab.SandboxRequest{Profile: "on"})
		sandboxtest.WantCode(t, err, agentlab.CodeUnsupported)
		_, _, err = w.Svc.Plan(ctx, agentlab.SandboxRequest{Profile: "auto", Nested: agentlab.NestedOn})
		sandboxtest.WantCode(t, err, agentlab.CodeUnsupported)
		_, err = w.Svc.Create(ctx, agentlab.SandboxRequest{Profile: "plain", Nested: agentlab.NestedAuto})
		sandboxtest.WantCode(t, err, agentlab.CodeDenied)
		if list, err := w.Svc.List(ctx, agentlab.SandboxFilter{}); err != nil || len(list) != 0 {
			t.Errorf("%v, %v", list, err)
		}
		sb := w.Create(agentlab.SandboxRequest{Profile: "auto", Nested: agentlab.NestedOff})
		if sb.Resources.Nested != agentlab.NestedOff {
			t.Errorf("nested is %q", sb.Resources.Nested)
		}
	})
}

// A sandbox from a snapshot has the CPUs of the one that was saved.
func TestNestedOfASnapshot(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		nestedWorld(w)
		ctx := context.Background()
		for _, profile := range []string{"plain", "auto"} {
			sb := w.Until(w.Create(agentlab.SandboxRequest{Name: profile, Profile: profile}).VMID, agentlab.SandboxReady)
			if _, err := w.Snaps.SaveSnapshot(ctx, sb.VMID, "one", false); err != nil {
				t.Fatal(err)
			}
			w.UntilIt(sb.VMID, func(agentlab.Sandbox) bool {
				snap, err := w.Snaps.FindSnapshot(ctx, profile, "one")
				return err == nil && snap.State == agentlab.SnapshotReady
			})
		}
		for _, c := range []struct {
			profile, from string
			want          agentlab.Nested
			code          agentlab.Code
		}{
			{"auto", "auto/one", agentlab.NestedAuto, ""},
			{"on", "auto/one", agentlab.NestedOn, ""},
			{"plain", "auto/one", "", agentlab.CodeInvalid},
			{"auto", "plain/one", agentlab.NestedOff, ""},
			{"on", "plain/one", "", agentlab.CodeInvalid},
		} {
			sb, err := w.Svc.Create(ctx, agentlab.SandboxRequest{Profile: c.profile, From: c.from})
			if agentlab.CodeOf(err) != c.code || err == nil && sb.Resources.Nested != c.want && sb.Resources.Nested.Wanted() {
				t.Errorf("%s from %s: nested %q, %v", c.profile, c.from, sb.Resources.Nested, err)
			}
		}
	})
}

package sandbox_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/sandbox"
	"github.com/agentlab-vm/agentlab/internal/sandbox/sandboxtest"
)

func TestReloadReachesRunningSandboxes(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		a, b := w.Create(agentlab.SandboxRequest{}), w.Create(agentlab.SandboxRequest{Profile: "secrets"})
		w.Until(a.VMID, agentlab.SandboxReady)
		w.Until(b.VMID, agentlab.SandboxReady)
		if err := w.Svc.NarrowNetwork(context.Background(), a.VMID, sandboxtest.Allowlist("github.com")); err != nil {
			t.Fatal(err)
		}
		w.SetProfile("plain", sandboxtest.Allowlist("github.com", "pypi.org"))
		got, err := w.Svc.ReloadNetworks(context.Background(), nil)
		if err != nil || len(got) != 2 || !got[0].Changed || got[1].Changed || got[0].Err != nil || got[1].Err != nil || got[0].Sandbox.NetworkPending {
			t.Fatalf("%+v, %v", got, err)
		}
		want := sandboxtest.Allowlist("github.com", "pypi.org")
		want.Layers = []agentlab.Network{sandboxtest.Allowlist("github.com")}
		w.WantInForce(a.VMID, want)
		w.WantInForce(b.VMID, agentlab.Network{Mode: agentlab.NetworkNAT})

		calls := w.Host.Calls(fake.OpUpdateNetwork)
		if got, err = w.Svc.ReloadNetworks(context.Background(), nil); err != nil || got[0].Changed || w.Host.Calls(fake.OpUpdateNetwork) != calls {
			t.Errorf("a second reload: %+v, %v", got, err)
		}
		got, err = w.Svc.ReloadNetworks(context.Background(), []int{b.VMID})
		if err != nil || len(got) != 1 || got[0].Changed || got[0].Err != nil || w.Host.Calls(fake.OpUpdateNetwork) != calls+1 {
			t.Errorf("one by its number is done again: %+v, %v", got, err)
		}
		w.Profiles.Mu.Lock()
		delete(w.Profiles.List, "plain")
		w.Profiles.Mu.Unlock()
		if got, err = w.Svc.ReloadNetworks(context.Background(), nil); err != nil || agentlab.CodeOf(got[0].Err) != agentlab.CodeNotFound || got[1].Err != nil {
			t.Errorf("without its profile: %+v, %v", got, err)
		}
		w.WantInForce(a.VMID, want)
		if _, err := w.Svc.ReloadNetworks(context.Background(), []int{4711}); agentlab.CodeOf(err) != agentlab.CodeNotFound {
			t.Errorf("an unknown sandbox: %v", err)
		}
		if n := len(w.Events(agentlab.EventSandboxNetwork)); n != 6 { // written and in force, three times
			t.Errorf("%d events", n)
		}
	})
}

func TestNarrowing(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		sb := w.Create(agentlab.SandboxRequest{})
		w.Until(sb.VMID, agentlab.SandboxReady)
		for range 2 { // the runner says it again after a crash
			if err := w.Svc.NarrowNetwork(context.Background(), sb.VMID, sandboxtest.Allowlist("a.example")); err != nil {
				t.Fatal(err)
			}
		}
		want := agentlab.Network{Mode: agentlab.NetworkNAT, Layers: []agentlab.Network{sandboxtest.Allowlist("a.example")}}
		w.WantInForce(sb.VMID, want)

		many := sandboxtest.Allowlist()
		for range sandbox.MaxLayerRules + 1 {
			many.Allow = append(many.Allow, agentlab.NetworkRule{Rule: "a.example"})
		}
		nested := sandboxtest.Allowlist()
		nested.Layers = []agentlab.Network{{Mode: agentlab.NetworkNAT}}
		for name, n := range map[string]agentlab.Network{
			"no rule": sandboxtest.Allowlist("http://x"), "no mode": {}, "too many": many, "nested": nested,
			"limits": {Mode: agentlab.NetworkNAT, Limits: agentlab.NetworkLimits{Flows: 1}},
		} {
			if err := w.Svc.NarrowNetwork(context.Background(), sb.VMID, n); agentlab.CodeOf(err) != agentlab.CodeInvalid {
				t.Errorf("%s: %v", name, err)
			}
		}
		w.WantInForce(sb.VMID, want)
		var err error
		for i := range egress.MaxLayers {
			err = w.Svc.NarrowNetwork(context.Background(), sb.VMID, sandboxtest.Allowlist(string(rune('b'+i))+".example"))
		}
		sandboxtest.WantCode(t, err, agentlab.CodeLimit)
		sandboxtest.WantCode(t, w.Svc.NarrowNetwork(context.Background(), 4711, sandboxtest.Allowlist()), agentlab.CodeNotFound)
	})
}

// A daemon that dies between the row and the backend leaves the policy to the
// next one, wherever it dies.
func TestPolicyComesIntoForceAfterACrash(t *testing.T) {
	for _, at := range []fake.Point{fake.Before, fake.After} {
		t.Run(string(at), func(t *testing.T) {
			sandboxtest.InWorld(t, func(w *sandboxtest.World) {
				sb := w.Create(agentlab.SandboxRequest{})
				w.Until(sb.VMID, agentlab.SandboxReady)
				died := make(chan struct{})
				w.Host.Inject(fake.Fault{Op: fake.OpUpdateNetwork, At: at, Times: 1, Crash: true, Hook: func(backend.Spec) { close(died) }})
				ctx, cancel := context.WithCancel(context.Background())
				told := make(chan error, 1)
				go func() { told <- w.Svc.NarrowNetwork(ctx, sb.VMID, sandboxtest.Allowlist("a.example")) }()
				<-died
				cancel()
				if err := <-told; err == nil {
					t.Error("the policy was said to be in force")
				}
				w.Restart()
				w.UntilIt(sb.VMID, func(sb agentlab.Sandbox) bool { return !sb.NetworkPending })
				w.WantInForce(sb.VMID, agentlab.Network{Mode: agentlab.NetworkNAT, Layers: []agentlab.Network{sandboxtest.Allowlist("a.example")}})
			})
		})
	}
}

// A reload does not say that nothing is to do while what an earlier one asked
// for is not in force.
func TestReloadWaitsForAnEarlierOne(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		sb := w.Create(agentlab.SandboxRequest{})
		w.Until(sb.VMID, agentlab.SandboxReady)
		mend := w.Host.Inject(fake.Fault{Op: fake.OpUpdateNetwork, Err: agentlab.Errorf(agentlab.CodeUnavailable, "not now")})
		w.SetProfile("plain", sandboxtest.Allowlist("a.example"))
		for i, changed := range []bool{true, false} {
			got, err := w.Svc.ReloadNetworks(context.Background(), nil)
			if err != nil || len(got) != 1 || got[0].Changed != changed || agentlab.CodeOf(got[0].Err) != agentlab.CodeUnavailable {
				t.Fatalf("call %d: %+v, %v", i+1, got, err)
			}
		}
		mend()
		got, err := w.Svc.ReloadNetworks(context.Background(), nil)
		if err != nil || len(got) != 1 || got[0].Err != nil || got[0].Sandbox.NetworkPending {
			t.Fatalf("%+v, %v", got, err)
		}
		w.WantInForce(sb.VMID, sandboxtest.Allowlist("a.example"))
	})
}

func TestPolicyOfStoppedSandbox(t *testing.T) {
	sandboxtest.InWorld(t, func(w *sandboxtest.World) {
		sb := w.Create(agentlab.SandboxRequest{})
		w.Until(sb.VMID, agentlab.SandboxReady)
		if _, err := w.Svc.Stop(context.Background(), sb.VMID, 0); err != nil {
			t.Fatal(err)
		}
		w.Until(sb.VMID, agentlab.SandboxStopped)
		w.SetProfile("plain", sandboxtest.Allowlist("a.example"))
		if got, err := w.Svc.ReloadNetworks(context.Background(), nil); err != nil || got[0].Err != nil || !got[0].Sandbox.NetworkPending {
			t.Fatalf("%+v, %v", got, err)
		}
		if _, err := w.Svc.Start(context.Background(), sb.VMID); err != nil {
			t.Fatal(err)
		}
		w.Until(sb.VMID, agentlab.SandboxReady)
		w.WantInForce(sb.VMID, sandboxtest.Allowlist("a.example"))
		if _, err := w.Svc.Destroy(context.Background(), sb.VMID); err != nil {
			t.Fatal(err)
		}
		w.Until(sb.VMID, agentlab.SandboxDestroyed)
		got, err := w.Svc.ReloadNetworks(context.Background(), []int{sb.VMID})
		if err != nil || agentlab.CodeOf(got[0].Err) != agentlab.CodeConflict {
			t.Errorf("a destroyed one: %+v, %v", got, err)
		}
	})
}

// A policy that cannot be put in force powers the VM off.
func TestPolicyFailsClosed(t *testing.T) {
	for name, c := range map[string]struct {
		err  error
		code agentlab.Code // of the call
	}{
		"lasting":         {agentlab.Errorf(agentlab.CodeInternal, "no"), agentlab.CodeConflict},
		"passes too late": {agentlab.Errorf(agentlab.CodeUnavailable, "not now"), agentlab.CodeUnavailable},
		"foreign error":   {errors.New("boom"), agentlab.CodeConflict},
	} {
		t.Run(name, func(t *testing.T) {
			sandboxtest.InWorld(t, func(w *sandboxtest.World) {
				sb := w.Create(agentlab.SandboxRequest{})
				w.Until(sb.VMID, agentlab.SandboxReady)
				w.Host.Inject(fake.Fault{Op: fake.OpUpdateNetwork, Err: c.err})
				begin := time.Now()
				sandboxtest.WantCode(t, w.Svc.NarrowNetwork(context.Background(), sb.VMID, sandboxtest.Allowlist("a.example")), c.code)
				sb = w.Until(sb.VMID, agentlab.SandboxFailed)
				if !strings.Contains(sb.Reason, "network policy could not be applied") || time.Since(begin) > 5*time.Minute {
					t.Errorf("reason %q after %s", sb.Reason, time.Since(begin))
				}
				w.UntilIt(sb.VMID, func(sb agentlab.Sandbox) bool { return w.Power(sb) == backend.PowerStopped })
			})
		})
	}
	t.Run("passing", func(t *testing.T) {
		sandboxtest.InWorld(t, func(w *sandboxtest.World) {
			sb := w.Create(agentlab.SandboxRequest{})
			w.Until(sb.VMID, agentlab.SandboxReady)
			w.Host.Inject(fake.Fault{Op: fake.OpUpdateNetwork, Times: 2, Err: agentlab.Errorf(agentlab.CodeBusy, "not now")})
			if err := w.Svc.NarrowNetwork(context.Background(), sb.VMID, sandboxtest.Allowlist("a.example")); err != nil {
				t.Fatal(err)
			}
			w.WantInForce(sb.VMID, agentlab.Network{Mode: agentlab.NetworkNAT, Layers: []agentlab.Network{sandboxtest.Allowlist("a.example")}})
		})
	})
}

package sandbox_test

import (
	"context"
	"errors"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/sandbox"
)

func allowlist(names ...string) agentlab.Network {
	n := agentlab.Network{Mode: agentlab.NetworkAllowlist}
	for _, name := range names {
		n.Allow = append(n.Allow, agentlab.NetworkRule{Rule: name})
	}
	return n
}

func (w *world) setProfile(name string, n agentlab.Network) {
	w.profiles.mu.Lock()
	defer w.profiles.mu.Unlock()
	p := w.profiles.list[name]
	p.Network = n
	w.profiles.list[name] = p
}

func (w *world) inForce(sb agentlab.Sandbox) agentlab.Network {
	w.Helper()
	n, err := w.host.Network(backend.RefOf(sb))
	if err != nil {
		w.Fatal(err)
	}
	return n
}

func (w *world) wantInForce(vmid int, want agentlab.Network) {
	w.Helper()
	sb := w.get(vmid)
	if got := w.inForce(sb); !reflect.DeepEqual(got, want) || !reflect.DeepEqual(sb.Network, want) || sb.NetworkPending {
		w.Errorf("in force %+v; row %+v, pending %v; want %+v", got, sb.Network, sb.NetworkPending, want)
	}
}

func TestReloadReachesRunningSandboxes(t *testing.T) {
	inWorld(t, func(w *world) {
		a, b := w.create(agentlab.SandboxRequest{}), w.create(agentlab.SandboxRequest{Profile: "secrets"})
		w.until(a.VMID, agentlab.SandboxReady)
		w.until(b.VMID, agentlab.SandboxReady)
		if err := w.svc.NarrowNetwork(context.Background(), a.VMID, allowlist("github.com")); err != nil {
			t.Fatal(err)
		}
		w.setProfile("plain", allowlist("github.com", "pypi.org"))
		got, err := w.svc.ReloadNetworks(context.Background(), nil)
		if err != nil || len(got) != 2 || !got[0].Changed || got[1].Changed || got[0].Err != nil || got[1].Err != nil || got[0].Sandbox.NetworkPending {
			t.Fatalf("%+v, %v", got, err)
		}
		want := allowlist("github.com", "pypi.org")
		want.Layers = []agentlab.Network{allowlist("github.com")}
		w.wantInForce(a.VMID, want)
		w.wantInForce(b.VMID, agentlab.Network{Mode: agentlab.NetworkNAT})

		calls := w.host.Calls(fake.OpUpdateNetwork)
		if got, err = w.svc.ReloadNetworks(context.Background(), nil); err != nil || got[0].Changed || w.host.Calls(fake.OpUpdateNetwork) != calls {
			t.Errorf("a second reload: %+v, %v", got, err)
		}
		got, err = w.svc.ReloadNetworks(context.Background(), []int{b.VMID})
		if err != nil || len(got) != 1 || got[0].Changed || got[0].Err != nil || w.host.Calls(fake.OpUpdateNetwork) != calls+1 {
			t.Errorf("one by its number is done again: %+v, %v", got, err)
		}
		w.profiles.mu.Lock()
		delete(w.profiles.list, "plain")
		w.profiles.mu.Unlock()
		if got, err = w.svc.ReloadNetworks(context.Background(), nil); err != nil || agentlab.CodeOf(got[0].Err) != agentlab.CodeNotFound || got[1].Err != nil {
			t.Errorf("without its profile: %+v, %v", got, err)
		}
		w.wantInForce(a.VMID, want)
		if _, err := w.svc.ReloadNetworks(context.Background(), []int{4711}); agentlab.CodeOf(err) != agentlab.CodeNotFound {
			t.Errorf("an unknown sandbox: %v", err)
		}
		if n := len(w.events(agentlab.EventSandboxNetwork)); n != 6 { // written and in force, three times
			t.Errorf("%d events", n)
		}
	})
}

func TestNarrowing(t *testing.T) {
	inWorld(t, func(w *world) {
		sb := w.create(agentlab.SandboxRequest{})
		w.until(sb.VMID, agentlab.SandboxReady)
		for range 2 { // the runner says it again after a crash
			if err := w.svc.NarrowNetwork(context.Background(), sb.VMID, allowlist("a.example")); err != nil {
				t.Fatal(err)
			}
		}
		want := agentlab.Network{Mode: agentlab.NetworkNAT, Layers: []agentlab.Network{allowlist("a.example")}}
		w.wantInForce(sb.VMID, want)

		many := allowlist()
		for range sandbox.MaxLayerRules + 1 {
			many.Allow = append(many.Allow, agentlab.NetworkRule{Rule: "a.example"})
		}
		nested := allowlist()
		nested.Layers = []agentlab.Network{{Mode: agentlab.NetworkNAT}}
		for name, n := range map[string]agentlab.Network{
			"no rule": allowlist("http://x"), "no mode": {}, "too many": many, "nested": nested,
			"limits": {Mode: agentlab.NetworkNAT, Limits: agentlab.NetworkLimits{Flows: 1}},
		} {
			if err := w.svc.NarrowNetwork(context.Background(), sb.VMID, n); agentlab.CodeOf(err) != agentlab.CodeInvalid {
				t.Errorf("%s: %v", name, err)
			}
		}
		w.wantInForce(sb.VMID, want)
		var err error
		for i := range egress.MaxLayers {
			err = w.svc.NarrowNetwork(context.Background(), sb.VMID, allowlist(string(rune('b'+i))+".example"))
		}
		wantCode(t, err, agentlab.CodeLimit)
		wantCode(t, w.svc.NarrowNetwork(context.Background(), 4711, allowlist()), agentlab.CodeNotFound)
	})
}

// A daemon that dies between the row and the backend leaves the policy to the
// next one, wherever it dies.
func TestPolicyComesIntoForceAfterACrash(t *testing.T) {
	for _, at := range []fake.Point{fake.Before, fake.After} {
		t.Run(string(at), func(t *testing.T) {
			inWorld(t, func(w *world) {
				sb := w.create(agentlab.SandboxRequest{})
				w.until(sb.VMID, agentlab.SandboxReady)
				died := make(chan struct{})
				w.host.Inject(fake.Fault{Op: fake.OpUpdateNetwork, At: at, Times: 1, Crash: true, Hook: func(backend.Spec) { close(died) }})
				ctx, cancel := context.WithCancel(context.Background())
				told := make(chan error, 1)
				go func() { told <- w.svc.NarrowNetwork(ctx, sb.VMID, allowlist("a.example")) }()
				<-died
				cancel()
				if err := <-told; err == nil {
					t.Error("the policy was said to be in force")
				}
				w.restart()
				w.untilIt(sb.VMID, func(sb agentlab.Sandbox) bool { return !sb.NetworkPending })
				w.wantInForce(sb.VMID, agentlab.Network{Mode: agentlab.NetworkNAT, Layers: []agentlab.Network{allowlist("a.example")}})
			})
		})
	}
}

// A reload does not say that nothing is to do while what an earlier one asked
// for is not in force.
func TestReloadWaitsForAnEarlierOne(t *testing.T) {
	inWorld(t, func(w *world) {
		sb := w.create(agentlab.SandboxRequest{})
		w.until(sb.VMID, agentlab.SandboxReady)
		mend := w.host.Inject(fake.Fault{Op: fake.OpUpdateNetwork, Err: agentlab.Errorf(agentlab.CodeUnavailable, "not now")})
		w.setProfile("plain", allowlist("a.example"))
		for i, changed := range []bool{true, false} {
			got, err := w.svc.ReloadNetworks(context.Background(), nil)
			if err != nil || len(got) != 1 || got[0].Changed != changed || agentlab.CodeOf(got[0].Err) != agentlab.CodeUnavailable {
				t.Fatalf("call %d: %+v, %v", i+1, got, err)
			}
		}
		mend()
		got, err := w.svc.ReloadNetworks(context.Background(), nil)
		if err != nil || len(got) != 1 || got[0].Err != nil || got[0].Sandbox.NetworkPending {
			t.Fatalf("%+v, %v", got, err)
		}
		w.wantInForce(sb.VMID, allowlist("a.example"))
	})
}

func TestPolicyOfStoppedSandbox(t *testing.T) {
	inWorld(t, func(w *world) {
		sb := w.create(agentlab.SandboxRequest{})
		w.until(sb.VMID, agentlab.SandboxReady)
		if _, err := w.svc.Stop(context.Background(), sb.VMID, 0); err != nil {
			t.Fatal(err)
		}
		w.until(sb.VMID, agentlab.SandboxStopped)
		w.setProfile("plain", allowlist("a.example"))
		if got, err := w.svc.ReloadNetworks(context.Background(), nil); err != nil || got[0].Err != nil || !got[0].Sandbox.NetworkPending {
			t.Fatalf("%+v, %v", got, err)
		}
		if _, err := w.svc.Start(context.Background(), sb.VMID); err != nil {
			t.Fatal(err)
		}
		w.until(sb.VMID, agentlab.SandboxReady)
		w.wantInForce(sb.VMID, allowlist("a.example"))
		if _, err := w.svc.Destroy(context.Background(), sb.VMID); err != nil {
			t.Fatal(err)
		}
		w.until(sb.VMID, agentlab.SandboxDestroyed)
		got, err := w.svc.ReloadNetworks(context.Background(), []int{sb.VMID})
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
			inWorld(t, func(w *world) {
				sb := w.create(agentlab.SandboxRequest{})
				w.until(sb.VMID, agentlab.SandboxReady)
				w.host.Inject(fake.Fault{Op: fake.OpUpdateNetwork, Err: c.err})
				begin := time.Now()
				wantCode(t, w.svc.NarrowNetwork(context.Background(), sb.VMID, allowlist("a.example")), c.code)
				sb = w.until(sb.VMID, agentlab.SandboxFailed)
				if !strings.Contains(sb.Reason, "network policy could not be applied") || time.Since(begin) > 5*time.Minute {
					t.Errorf("reason %q after %s", sb.Reason, time.Since(begin))
				}
				w.untilIt(sb.VMID, func(sb agentlab.Sandbox) bool { return w.power(sb) == backend.PowerStopped })
			})
		})
	}
	t.Run("passing", func(t *testing.T) {
		inWorld(t, func(w *world) {
			sb := w.create(agentlab.SandboxRequest{})
			w.until(sb.VMID, agentlab.SandboxReady)
			w.host.Inject(fake.Fault{Op: fake.OpUpdateNetwork, Times: 2, Err: agentlab.Errorf(agentlab.CodeBusy, "not now")})
			if err := w.svc.NarrowNetwork(context.Background(), sb.VMID, allowlist("a.example")); err != nil {
				t.Fatal(err)
			}
			w.wantInForce(sb.VMID, agentlab.Network{Mode: agentlab.NetworkNAT, Layers: []agentlab.Network{allowlist("a.example")}})
		})
	})
}

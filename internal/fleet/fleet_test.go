package fleet_test

import (
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/internal/fleet"
)

// Nothing is concluded about a VM on a backend that the daemon does not have: no method
// succeeds or reports that something is absent.
func TestMissingBackend(t *testing.T) {
	d, err := fake.Open(fake.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = d.Close() }()
	f := fleet.Single(d, nil)
	if b := f.Of("fake"); b != f.Default() || b.Missing() != nil || b.Power == nil || b.Name() != "fake" {
		t.Errorf("%+v", b)
	}
	b, ctx, ref := f.Of("lab"), t.Context(), backend.Ref{UID: "uid"}
	calls := map[string]error{
		"Missing": b.Missing(), "Validate": b.Validate(backend.Spec{}), "Create": b.Create(ctx, backend.Spec{}), "Start": b.Start(ctx, ref),
		"Stop": b.Stop(ctx, ref, 0), "Destroy": b.Destroy(ctx, ref),
	}
	_, calls["Inspect"] = b.Inspect(ctx, ref)
	_, calls["List"] = b.List(ctx)
	_, calls["DialControl"] = b.DialControl(ctx, ref)
	_, calls["DialGuest"] = b.DialGuest(ctx, ref, 22)
	_, calls["ListenGuest"] = b.ListenGuest(ctx, ref)
	_, calls["NeedSnapshots"] = b.NeedSnapshots()
	_, calls["NeedVolumes"] = b.NeedVolumes()
	_, calls["NeedTemplates"] = b.NeedTemplates()
	for name, err := range calls {
		if agentlab.CodeOf(err) != agentlab.CodeConflict || agentlab.HintOf(err) == "" {
			t.Errorf("%s: %v", name, err)
		}
	}
	if b.Groups != (backend.Groups{}) {
		t.Errorf("it has %+v", b.Groups)
	}
}

package doctor

import (
	"context"
	"log/slog"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/internal/fleet"
)

// kept are rows with facts that stay.
type kept struct {
	rows
	facts map[string]string
}

func (k kept) Fact(_ context.Context, name string) (string, error) { return k.facts[name], nil }

func (k kept) SetFact(_ context.Context, name, value string) error {
	k.facts[name] = value
	return nil
}

// A backend stays drained after a restart of the daemon, also one that the daemon did not have
// in the meantime.
func TestDrain(t *testing.T) {
	ctx, facts := t.Context(), kept{facts: map[string]string{}}
	open := func(names ...string) *Service {
		t.Helper()
		var list []*fleet.Backend
		for _, name := range names {
			d, err := fake.Open(fake.Config{})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = d.Close() })
			list = append(list, fleet.Of(name, d, nil))
		}
		s := New(Config{Store: facts, Fleet: fleet.New(list...), Space: NewSpace(t.TempDir(), t.TempDir(), t.TempDir()+"/reserve", 0, slog.New(slog.DiscardHandler))})
		if err := s.Load(ctx); err != nil {
			t.Fatal(err)
		}
		return s
	}
	s := open("one", "two")
	if b, err := s.Drain(ctx, "two", true); err != nil || !b.Drained {
		t.Fatalf("%+v, %v", b, err)
	}
	if err := s.Usable("two"); agentlab.CodeOf(err) != agentlab.CodeBusy || agentlab.HintOf(err) == "" {
		t.Errorf("Usable: %v", err)
	}
	if err := s.Usable("one"); err != nil {
		t.Errorf("Usable: %v", err)
	}
	if _, err := s.Drain(ctx, "three", true); agentlab.CodeOf(err) != agentlab.CodeInvalid {
		t.Errorf("Drain: %v", err)
	}
	if _, err := open("one").Drain(ctx, "one", true); err != nil {
		t.Fatal(err)
	}
	s = open("one", "two")
	if list := s.Backends(); !list[0].Drained || !list[1].Drained || !list[0].Default || list[1].Default {
		t.Errorf("%+v", list)
	}
	if b, err := s.Drain(ctx, "two", false); err != nil || b.Drained {
		t.Errorf("%+v, %v", b, err)
	}
	if list := open("one", "two").Backends(); !list[0].Drained || list[1].Drained {
		t.Errorf("%+v", list)
	}
}

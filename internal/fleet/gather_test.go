package fleet

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// A backend that hangs or fails delays and spoils nothing of another, and is named.
func TestGather(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b, c := &Backend{name: "a"}, &Backend{name: "b"}, &Backend{name: "c"}
		lost := errors.New("lost")
		ask := func(ctx context.Context, b *Backend) ([]string, error) {
			switch b.name {
			case "b":
				<-ctx.Done()
				return nil, ctx.Err()
			case "c":
				return nil, lost
			}
			return []string{"one", "two"}, nil
		}
		began := time.Now()
		all, missing, err := Gather(t.Context(), []*Backend{a, b, c}, ask)
		if took := time.Since(began); took != gatherLimit {
			t.Errorf("it took %s", took)
		}
		if !slices.Equal(all, []string{"one", "two"}) || err != nil || len(missing) != 2 || !errors.Is(missing[1], lost) {
			t.Fatalf("%v, %v, %v", all, missing, err)
		}
		if agentlab.CodeOf(missing[0]) != agentlab.CodeUnavailable || !strings.HasPrefix(missing[0].Error(), "backend b did not answer") {
			t.Error(missing[0])
		}
		if _, _, err := Gather(t.Context(), []*Backend{c}, ask); !errors.Is(err, lost) {
			t.Error(err)
		}
		if _, _, err := Gather(t.Context(), []*Backend{b, c}, ask); agentlab.CodeOf(err) != agentlab.CodeUnavailable {
			t.Error(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, _, err := Gather(ctx, []*Backend{a, b}, ask); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}

package fleet_test

import (
	"context"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/internal/fleet"
)

// calls observes the errors of a backend.
type calls struct{ codes []agentlab.Code }

func (c *calls) Backends([]string) {}
func (c *calls) BackendCalled(_ string, _ time.Duration, err error) {
	c.codes = append(c.codes, agentlab.CodeOf(err))
}

func open(t *testing.T) (*fake.Host, *fleet.Backend, *calls) {
	t.Helper()
	d, err := fake.Open(fake.Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close() })
	seen := &calls{}
	return d.Host(), fleet.New(fleet.Of("lab", d, nil)).Observe(seen).Default(), seen
}

// A backend that does not return the list of its sandboxes is down until it does: calls that
// could hang too are refused, and what limits a guest is tried.
func TestDown(t *testing.T) {
	for name, c := range map[string]struct {
		fault fake.Fault
		lists int
	}{
		"hangs": {fake.Fault{Op: fake.OpList}, 1},
		"fails": {fake.Fault{Op: fake.OpList, Err: agentlab.Errorf(agentlab.CodeUnavailable, "connection refused")}, 2},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h, b, _ := open(t)
				ctx, ref := t.Context(), backend.Ref{UID: "uid"}
				if name == "hangs" {
					c.fault.Block = make(chan struct{}) // of this bubble
				}
				repair := h.Inject(c.fault)
				begin := time.Now()
				for range c.lists {
					if b.Down() != nil {
						t.Fatal("it is down too early")
					}
					if _, err := b.List(ctx); agentlab.CodeOf(err) != agentlab.CodeUnavailable {
						t.Fatal(err)
					}
				}
				err := b.Start(ctx, ref)
				if since := begin.UTC().Format("15:04:05"); agentlab.CodeOf(err) != agentlab.CodeUnavailable || !strings.Contains(err.Error(), "backend lab has not answered since") || !strings.Contains(err.Error(), since) {
					t.Errorf("Start: %v", err)
				}
				if _, err := b.Volumes.ListVolumes(ctx); agentlab.CodeOf(err) != agentlab.CodeUnavailable || h.Calls(fake.OpListVolumes) != 0 || h.Calls(fake.OpStart) != 0 {
					t.Errorf("ListVolumes: %v", err)
				}
				if _, down := b.Finding(); !down {
					t.Error("no finding")
				}
				if err := b.Destroy(ctx, ref); err != nil || h.Calls(fake.OpDestroy) != 1 {
					t.Errorf("Destroy: %v", err)
				}
				repair()
				if _, err := b.List(ctx); err != nil || b.Down() != nil {
					t.Errorf("%v, %v", err, b.Down())
				}
				if err := b.Start(ctx, ref); agentlab.CodeOf(err) != agentlab.CodeNotFound {
					t.Errorf("Start: %v", err)
				}
			})
		})
	}
}

// A call that hangs ends, and its outcome is unknown if it changes something. The end of
// the caller's context is neither a failure of the backend nor observed.
func TestBound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, b, seen := open(t)
		for _, op := range []fake.Op{fake.OpCreate, fake.OpInspect, fake.OpTaken, fake.OpSetDeadline} {
			h.Inject(fake.Fault{Op: op, Block: make(chan struct{})})
		}
		ctx, ref := t.Context(), backend.Ref{UID: "uid"}
		if err := b.Create(ctx, backend.Spec{UID: "uid"}); agentlab.CodeOf(err) != agentlab.CodeUnknownOutcome {
			t.Errorf("Create: %v", err)
		}
		if err := b.Power.SetDeadline(ctx, ref, backend.Deadline{}); agentlab.CodeOf(err) != agentlab.CodeUnknownOutcome {
			t.Errorf("SetDeadline: %v", err)
		}
		if _, err := b.Inspect(ctx, ref); agentlab.CodeOf(err) != agentlab.CodeUnavailable || !strings.Contains(err.Error(), "did not answer within 3m0s (Inspect)") {
			t.Errorf("Inspect: %v", err)
		}
		if _, err := b.Host.Taken(ctx, 1, 2); agentlab.CodeOf(err) != agentlab.CodeUnavailable {
			t.Errorf("Taken: %v", err)
		}
		if want := []agentlab.Code{agentlab.CodeUnknownOutcome, agentlab.CodeUnknownOutcome, agentlab.CodeUnavailable, agentlab.CodeUnavailable}; !slices.Equal(seen.codes, want) {
			t.Errorf("%v", seen.codes)
		}
		short, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		h.Inject(fake.Fault{Op: fake.OpList, Block: make(chan struct{})})
		for range 3 {
			if _, err := b.List(short); err == nil {
				t.Errorf("List: %v", err)
			}
		}
		if b.Down() != nil || len(seen.codes) != 4 {
			t.Errorf("%v, %v", b.Down(), seen.codes)
		}
	})
}

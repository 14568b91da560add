package daemon

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/backend/fake"
	"github.com/agentlab-vm/agentlab/internal/backend/registry"
	"github.com/agentlab-vm/agentlab/test/fakebackend"
	"github.com/agentlab-vm/agentlab/test/guard"
)

// startWithTwo starts a daemon with the backends good, the default, and hung, and returns the
// host of hung.
func startWithTwo(t *testing.T) (h *home, hung *fake.Host) {
	t.Helper()
	seen := fakebackend.Backend
	seen.Open = func(env registry.Env) (registry.Opened, error) {
		opened, err := fakebackend.Backend.Open(env)
		if err == nil && filepath.Base(env.State) == "hung" {
			hung = opened.Driver.(*fake.Driver).Host()
		}
		return opened, err
	}
	h = newHome(t)
	h.backends = registry.List{seen}
	h.configure(t, "backend: good\nbackends: {good: {driver: fake}, hung: {driver: fake}}\n")
	h.start(t)
	return h, hung
}

// A backend that hangs in one of its methods, each in turn, delays nothing on another one of
// the same daemon. What waits for it continues when it answers.
func TestHungBackend(t *testing.T) {
	h, hung := startWithTwo(t)
	for _, op := range []fake.Op{
		fake.OpTaken, fake.OpCreate, fake.OpStart, fake.OpListenGuest, fake.OpDialControl, fake.OpSetDeadline, fake.OpEgressLog, fake.OpList,
		fake.OpCreateVolume, fake.OpAttachVolume, fake.OpSaveSnapshot, fake.OpDeleteSnapshot, fake.OpSuspend, fake.OpResume, fake.OpInspect,
		fake.OpMemory, fake.OpStop, fake.OpDestroy, fake.OpDetachVolume, fake.OpDeleteVolume,
	} {
		t.Run(string(op), func(t *testing.T) {
			block, before := make(chan struct{}), hung.Calls(op)
			remove := hung.Inject(fake.Fault{Op: op, Block: block})
			done := make(chan error, 1)
			go func() { done <- h.life(guard.Context(t), "hung") }()
			guard.Until(t, "the backend hangs in "+string(op), func() bool { return hung.Calls(op) > before || len(done) > 0 })
			if err := h.life(guard.Context(t), "good"); err != nil {
				t.Errorf("on the other backend: %v", err)
			}
			remove()
			close(block)
			if err := <-done; err != nil {
				t.Errorf("after it answered: %v", err)
			}
		})
	}
}

// Sandboxes that boot or are destroyed on a backend that hangs, more than there are slots and
// workers, delay none on another one.
func TestManyHungSandboxes(t *testing.T) {
	h, hung := startWithTwo(t)
	const many, slots, workers = 40, 4, 32
	name := func(i int) string { return fmt.Sprintf("hung-%d", i) }
	while := func(op fake.Op, atOnce int, request func(i int) error, then func(i int)) {
		t.Helper()
		block, before := make(chan struct{}), hung.Calls(op)
		remove := hung.Inject(fake.Fault{Op: op, Block: block})
		for i := range many {
			if err := request(i); err != nil {
				t.Fatal(err)
			}
		}
		guard.Until(t, "all that may hang do", func() bool { return hung.Calls(op)-before >= atOnce })
		if err := h.life(guard.Context(t), "good"); err != nil {
			t.Error(err)
		}
		if n := hung.Calls(op) - before; n != atOnce {
			t.Errorf("%d calls of %s at the same time, want %d", n, op, atOnce)
		}
		remove()
		close(block)
		for i := range many {
			then(i)
		}
	}
	while(fake.OpCreate, slots, func(i int) error {
		_, err := h.client.CreateSandbox(t.Context(), api.SandboxCreate{Name: name(i), Backend: "hung"})
		return err
	}, func(i int) { h.await(t, name(i), agentlab.SandboxReady) })
	while(fake.OpDestroy, workers, func(i int) error {
		_, err := h.client.DestroySandbox(t.Context(), name(i))
		return err
	}, func(i int) {
		guard.Until(t, name(i)+" is destroyed", func() bool {
			_, err := h.client.Sandbox(t.Context(), name(i))
			return agentlab.CodeOf(err) == agentlab.CodeNotFound
		})
	})
}

// life uses a sandbox and a workspace on a backend in all ways that take a method of the
// driver, from their creation to their deletion.
func (h *home) life(ctx context.Context, on string) error {
	name, c := on+"-"+agentlab.NewUID()[:8], h.client
	try := func(_ any, err error) error { return err }
	in := func(states ...agentlab.SandboxState) error {
		for ; ; time.Sleep(5 * time.Millisecond) {
			sb, err := c.Sandbox(ctx, name)
			if agentlab.CodeOf(err) == agentlab.CodeNotFound { // a name means a sandbox that exists
				sb.State, err = string(agentlab.SandboxDestroyed), nil
			}
			if err != nil || slices.Contains(states, agentlab.SandboxState(sb.State)) {
				return err
			}
			if sb.State == string(agentlab.SandboxFailed) {
				return fmt.Errorf("%s is FAILED: %s", name, sb.Reason)
			}
		}
	}
	saved := func(gone bool) error {
		for ; ; time.Sleep(5 * time.Millisecond) {
			list, err := c.Snapshots(ctx, name)
			if err != nil || gone == (len(list.Items) == 0) && (gone || list.Items[0].State == string(agentlab.SnapshotReady)) {
				return err
			}
		}
	}
	deleted := func() error {
		for ; ; time.Sleep(5 * time.Millisecond) {
			if _, err := c.Workspace(ctx, name); err != nil {
				return map[bool]error{false: err}[agentlab.CodeOf(err) == agentlab.CodeNotFound]
			}
		}
	}
	for _, step := range []struct {
		name string
		do   func() error
	}{
		{"create", func() error {
			return try(c.CreateSandbox(ctx, api.SandboxCreate{Name: name, Backend: on}))
		}},
		{"ready", func() error { return in(agentlab.SandboxReady) }},
		{"save", func() error { return try(c.SaveSnapshot(ctx, name, api.SnapshotCreate{Name: "one"})) }},
		{"saved", func() error { return saved(false) }},
		{"delete the snapshot", func() error { return try(c.DeleteSnapshot(ctx, name, "one")) }},
		{"deleted", func() error { return saved(true) }},
		{"suspend", func() error { return try(c.SuspendSandbox(ctx, name, api.SandboxSuspend{})) }},
		{"suspended", func() error { return in(agentlab.SandboxSuspended) }},
		{"resume", func() error { return try(c.ResumeSandbox(ctx, name)) }},
		{"resumed", func() error { return in(agentlab.SandboxReady) }},
		{"status", func() error { return try(c.Status(ctx)) }},
		{"stop", func() error { return try(c.StopSandbox(ctx, name, api.SandboxStop{})) }},
		{"stopped", func() error { return in(agentlab.SandboxStopped) }},
		{"start", func() error { return try(c.StartSandbox(ctx, name)) }},
		{"started", func() error { return in(agentlab.SandboxReady) }},
		{"destroy", func() error { return try(c.DestroySandbox(ctx, name)) }},
		{"destroyed", func() error { return in(agentlab.SandboxDestroyed) }},
		{"create with a workspace", func() error {
			return try(c.CreateSandbox(ctx, api.SandboxCreate{Name: name, Backend: on, WorkspaceSelection: api.WorkspaceSelection{Workspace: name, WorkspaceCreate: &api.WorkspaceNew{SizeGB: 1}}}))
		}},
		{"ready with a workspace", func() error { return in(agentlab.SandboxReady) }},
		{"destroy with a workspace", func() error { return try(c.DestroySandbox(ctx, name)) }},
		{"destroyed with a workspace", func() error { return in(agentlab.SandboxDestroyed) }},
		{"delete the workspace", func() error { return try(c.DeleteWorkspace(ctx, name, true)) }},
		{"deleted", deleted},
	} {
		if err := step.do(); err != nil {
			return fmt.Errorf("%s: %w", step.name, err)
		}
	}
	return nil
}

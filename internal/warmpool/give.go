package warmpool

import (
	"context"
	"fmt"
	"slices"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/sandbox"
)

// HandOut implements sandbox.Pool.
func (p *Pool) HandOut(ctx context.Context, sb agentlab.Sandbox) (made agentlab.Sandbox, ok bool, err error) {
	if len(p.entries) == 0 || sb.From.Snapshot != "" {
		return sb, false, nil
	}
	waiting, err := p.store.Sandboxes(ctx, agentlab.SandboxFilter{States: []agentlab.SandboxState{agentlab.SandboxPooled}})
	if err != nil || len(waiting) == 0 {
		return sb, false, err
	}
	want := sb
	if want.Image, err = p.core.On(sb).Images.Current(ctx, sb.Image); err != nil {
		return sb, false, nil //nolint:nilerr // it must be built; the ordinary way reports what fails
	}
	sb.Start = agentlab.StartPool
	for _, w := range waiting {
		p.mu.Lock()
		mine := p.mine[w.VMID]
		p.mu.Unlock()
		if !mine || shapeKey(w) != shapeKey(want) || !p.core.Now().Before(w.LeaseExpiresAt) {
			continue
		}
		made, err = p.store.HandOutSandbox(ctx, w.VMID, sb, p.core.Limits().MaxSandboxes, sandbox.CreatedEvent(sb))
		switch agentlab.CodeOf(err) {
		case "":
			p.mu.Lock()
			delete(p.mine, w.VMID)
			delete(p.trouble, shapeKey(w))
			p.mu.Unlock()
			return made, true, nil
		case agentlab.CodeConflict, agentlab.CodeNotFound: // another request was faster, or it is destroyed
			continue
		}
		return sb, false, err
	}
	return sb, false, nil
}

// Quiet implements sandbox.Pool.
func (p *Pool) Quiet(ctx context.Context) {
	if len(p.entries) == 0 {
		return
	}
	p.mu.Lock()
	p.quiet = p.core.Now().Add(quietTime)
	making := p.making
	p.mu.Unlock()
	if making != 0 {
		p.Drop(ctx, making, "another sandbox starts")
	}
}

// GiveWay implements sandbox.Pool.
func (p *Pool) GiveWay(ctx context.Context, sb agentlab.Sandbox) {
	if len(p.entries) == 0 {
		return
	}
	p.Quiet(ctx)
	if agentlab.CodeOf(p.room(ctx, sb)) != agentlab.CodeNoSpace {
		return
	}
	if _, err := p.dropAll(ctx, fmt.Sprintf("the host needs its memory for sandbox %d", sb.VMID)); err != nil && ctx.Err() == nil {
		p.log.Warn("the warm pool was not destroyed", "err", err)
	}
}

// dropAll destroys all sandboxes of the pool, and returns their number.
func (p *Pool) dropAll(ctx context.Context, why string) (dropped int, err error) {
	rows, err := p.store.Sandboxes(ctx, agentlab.SandboxFilter{})
	for _, sb := range rows {
		if sb.Pooled() && !p.core.Elsewhere(sb) {
			p.Drop(ctx, sb.VMID, why)
			dropped++
		}
	}
	return dropped, err
}

// WithNumbers implements sandbox.Pool.
func (p *Pool) WithNumbers(ctx context.Context, on string, fn func(agentlab.Allocation) error) error {
	for again := false; ; again = true {
		a, err := p.core.Allocation(ctx, on)
		if err == nil {
			err = fn(a)
		}
		if again || agentlab.CodeOf(err) != agentlab.CodeLimit || !p.yieldNumbers(ctx) {
			return err
		}
	}
}

// yieldNumbers destroys the pool for a request that gets no number or address. It
// reports whether another attempt may succeed.
func (p *Pool) yieldNumbers(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, yieldTimeout)
	defer cancel()
	users, err := p.store.Sandboxes(ctx, agentlab.SandboxFilter{NoPooled: true})
	if err != nil || p.core.Limits().MaxSandboxes > 0 && len(users) >= p.core.Limits().MaxSandboxes {
		return false
	}
	for first := true; ; first = false {
		p.mu.Lock()
		removed := p.removed
		p.mu.Unlock()
		left, err := p.dropAll(ctx, "a request needs its number")
		if err != nil || left == 0 {
			return err == nil && !first
		}
		select {
		case <-removed:
		case <-ctx.Done():
			return false
		}
	}
}

// EntryStatus is the state of one entry of the warm pool.
type EntryStatus struct {
	Entry
	Ready   int    // that can be handed out now
	Problem string // why there are fewer, if that is not temporary
}

// Status returns the state of the warm pool, in the order of the configuration.
func (p *Pool) Status(ctx context.Context) (out []EntryStatus, err error) {
	if len(p.entries) == 0 {
		return nil, nil
	}
	waiting, err := p.store.Sandboxes(ctx, agentlab.SandboxFilter{States: []agentlab.SandboxState{agentlab.SandboxPooled}})
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	problems := p.problems
	waiting = slices.DeleteFunc(waiting, func(sb agentlab.Sandbox) bool { return !p.mine[sb.VMID] })
	p.mu.Unlock()
	for i, e := range p.entries {
		st := EntryStatus{Entry: e}
		if shape, err := p.shape(ctx, e); err == nil {
			st.Ready = keep(&waiting, nil, shape, e.Count)
		}
		if i < len(problems) && st.Ready < e.Count {
			st.Problem = problems[i]
		}
		out = append(out, st)
	}
	return out, nil
}

// Findings returns findings about entries of the pool that lack sandboxes.
func (p *Pool) Findings() (out []backend.Finding) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i, problem := range p.problems {
		if problem != "" {
			out = append(out, backend.Finding{
				Name: "warm pool", Level: backend.LevelWarn,
				Detail: fmt.Sprintf("no further sandbox of image %s can wait in the warm pool: %s", p.entries[i].Image, problem),
				Remedy: "sandboxes start without the pool until then; see warm_pool in config.yaml, and restart the daemon after a change",
			})
		}
	}
	return out
}

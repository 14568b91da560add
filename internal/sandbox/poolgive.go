package sandbox

import (
	"context"
	"fmt"
	"slices"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// handOut makes a sandbox of the pool the planned sandbox sb. ok is false if none
// fits. Codes: exists, limit.
func (s *Service) handOut(ctx context.Context, sb agentlab.Sandbox) (made agentlab.Sandbox, ok bool, err error) {
	if len(s.cfg.Pool) == 0 || sb.From.Snapshot != "" {
		return sb, false, nil
	}
	waiting, err := s.cfg.Store.Sandboxes(ctx, agentlab.SandboxFilter{States: []agentlab.SandboxState{agentlab.SandboxPooled}})
	if err != nil || len(waiting) == 0 {
		return sb, false, err
	}
	want := sb
	if want.Image, err = s.on(sb).Images.Current(ctx, sb.Image); err != nil {
		return sb, false, nil //nolint:nilerr // it must be built; the ordinary way reports what fails
	}
	sb.Start = agentlab.StartPool
	for _, p := range waiting {
		s.pool.mu.Lock()
		mine := s.pool.mine[p.VMID]
		s.pool.mu.Unlock()
		if !mine || shapeKey(p) != shapeKey(want) || !s.clock().Before(p.LeaseExpiresAt) {
			continue
		}
		made, err = s.cfg.Store.HandOutSandbox(ctx, p.VMID, sb, s.lim.MaxSandboxes, createdEvent(sb))
		switch agentlab.CodeOf(err) {
		case "":
			s.pool.mu.Lock()
			delete(s.pool.mine, p.VMID)
			delete(s.pool.trouble, shapeKey(p))
			s.pool.mu.Unlock()
			return made, true, nil
		case agentlab.CodeConflict, agentlab.CodeNotFound: // another request was faster, or it is destroyed
			continue
		}
		return sb, false, err
	}
	return sb, false, nil
}

// poolQuietNow delays the pool, and destroys the sandbox that is being made for it:
// a request comes first.
func (s *Service) poolQuietNow(ctx context.Context) {
	if len(s.cfg.Pool) == 0 {
		return
	}
	s.pool.mu.Lock()
	s.pool.quiet = s.clock().Add(poolQuiet)
	making := s.pool.making
	s.pool.mu.Unlock()
	if making != 0 {
		s.dropPooled(ctx, making, "another sandbox starts")
	}
}

// poolGivesWay delays the pool before the VM of sb is started, and destroys it if the
// host lacks memory or disk space for sb. It does not wait for that.
func (s *Service) poolGivesWay(ctx context.Context, sb agentlab.Sandbox) {
	if len(s.cfg.Pool) == 0 {
		return
	}
	s.poolQuietNow(ctx)
	if agentlab.CodeOf(s.poolRoom(ctx, sb)) != agentlab.CodeNoSpace {
		return
	}
	if _, err := s.dropPool(ctx, fmt.Sprintf("the host needs its memory for sandbox %d", sb.VMID)); err != nil && ctx.Err() == nil {
		s.log.Warn("the warm pool was not destroyed", "err", err)
	}
}

// dropPool destroys all sandboxes of the pool, and returns their number.
func (s *Service) dropPool(ctx context.Context, why string) (dropped int, err error) {
	rows, err := s.cfg.Store.Sandboxes(ctx, agentlab.SandboxFilter{})
	for _, sb := range rows {
		if sb.Pooled() && !s.elsewhere(sb) {
			s.dropPooled(ctx, sb.VMID, why)
			dropped++
		}
	}
	return dropped, err
}

// yieldNumbers destroys the pool for a request that gets no number or address. It
// reports whether another attempt may succeed.
func (s *Service) yieldNumbers(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, yieldTimeout)
	defer cancel()
	users, err := s.cfg.Store.Sandboxes(ctx, agentlab.SandboxFilter{NoPooled: true})
	if err != nil || s.lim.MaxSandboxes > 0 && len(users) >= s.lim.MaxSandboxes {
		return false
	}
	for first := true; ; first = false {
		s.pool.mu.Lock()
		removed := s.pool.removed
		s.pool.mu.Unlock()
		left, err := s.dropPool(ctx, "a request needs its number")
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

// PoolStatus is the state of one entry of the warm pool.
type PoolStatus struct {
	PoolEntry
	Ready   int    // that can be handed out now
	Problem string // why there are fewer, if that is not temporary
}

// Pool returns the state of the warm pool, in the order of the configuration.
func (s *Service) Pool(ctx context.Context) (out []PoolStatus, err error) {
	if len(s.cfg.Pool) == 0 {
		return nil, nil
	}
	waiting, err := s.cfg.Store.Sandboxes(ctx, agentlab.SandboxFilter{States: []agentlab.SandboxState{agentlab.SandboxPooled}})
	if err != nil {
		return nil, err
	}
	s.pool.mu.Lock()
	problems := s.pool.problems
	waiting = slices.DeleteFunc(waiting, func(sb agentlab.Sandbox) bool { return !s.pool.mine[sb.VMID] })
	s.pool.mu.Unlock()
	for i, e := range s.cfg.Pool {
		st := PoolStatus{PoolEntry: e}
		if shape, err := s.poolShape(ctx, e); err == nil {
			st.Ready = keepPooled(&waiting, nil, shape, e.Count)
		}
		if i < len(problems) && st.Ready < e.Count {
			st.Problem = problems[i]
		}
		out = append(out, st)
	}
	return out, nil
}

// findPool returns findings about entries of the pool that lack sandboxes.
func (s *Service) findPool() (out []backend.Finding) {
	s.pool.mu.Lock()
	defer s.pool.mu.Unlock()
	for i, problem := range s.pool.problems {
		if problem != "" {
			out = append(out, backend.Finding{
				Name: "warm pool", Level: backend.LevelWarn,
				Detail: fmt.Sprintf("no further sandbox of image %s can wait in the warm pool: %s", s.cfg.Pool[i].Image, problem),
				Remedy: "sandboxes start without the pool until then; see warm_pool in config.yaml, and restart the daemon after a change",
			})
		}
	}
	return out
}

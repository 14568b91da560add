package snapshot

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/sandbox"
)

// Fork creates sandboxes that continue the guest of a sandbox, each with its own
// identity, network and lease, and returns them in state REQUESTED. The source
// continues. They are allocated together or not at all; what happens later to one
// does not affect the others. Codes: not_found, invalid, exists, limit, conflict
// (state), no_space, unsupported.
//
// A fork of a sandbox that has received secrets is allowed, because the files
// with its memory exist only until the sandboxes are created. The event records
// it, and the secrets count as received by the new sandboxes too.
func (s *Service) Fork(ctx context.Context, vmid int, r agentlab.ForkRequest) ([]agentlab.Sandbox, error) {
	if r.Count < 1 || r.Count > agentlab.MaxFork {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "%d is not between 1 and %d", r.Count, agentlab.MaxFork).WithField("count")
	}
	src, err := s.store.Sandbox(ctx, vmid)
	if err == nil {
		_, err = s.core.On(src).NeedSnapshots()
	}
	if err != nil {
		return nil, err
	}
	if err := s.canSave(src); err != nil {
		return nil, err
	}
	if err := s.core.Admission(src.Backend); err != nil {
		return nil, err
	}
	prof, err := s.cfg.Profiles.Use(src.Profile)
	if err != nil {
		return nil, err
	}
	ttl, err := s.core.TTL(r.TTL, prof.TTL)
	if err != nil {
		return nil, err
	}
	names, err := s.forkNames(ctx, cmp.Or(r.NamePrefix, src.Name), r.Count)
	if err != nil {
		return nil, err
	}
	snap := snapshotOf(src)
	snap.UID, snap.Kind = agentlab.NewForkUID(), agentlab.SnapshotFork
	now := s.core.Now().UTC()
	var list []agentlab.Sandbox
	for _, name := range names {
		child := agentlab.Sandbox{
			UID: agentlab.NewUID(), Name: name, Backend: src.Backend, Profile: src.Profile, Image: src.Image,
			State: agentlab.SandboxRequested, Desired: agentlab.DesiredRunning,
			Resources: src.Resources, Options: src.Options, Network: src.Network, Keepalive: src.Keepalive,
			From: sandbox.OriginOf(snap), LeaseExpiresAt: now.Add(ttl), CreatedAt: now,
		}
		if err := s.core.On(child).Validate(sandbox.SpecOf(child)); err != nil {
			return nil, err
		}
		list = append(list, child)
	}
	s.cfg.Pool.Quiet(ctx)
	var made []agentlab.Sandbox
	err = s.cfg.Pool.WithNumbers(ctx, src.Backend, func(a agentlab.Allocation) (err error) {
		made, err = s.store.AllocateFork(ctx, snap, list, a, sandbox.CreatedEvent)
		return err
	})
	if err != nil {
		return nil, err
	}
	for _, sb := range made {
		s.core.Added(sb)
	}
	s.changed(vmid)
	return made, nil
}

// forkNames returns names PREFIX-1, PREFIX-2, … that no sandbox has.
func (s *Service) forkNames(ctx context.Context, prefix string, count int) ([]string, error) {
	live, err := s.core.List(ctx, agentlab.SandboxFilter{})
	if err != nil {
		return nil, err
	}
	var out []string
	for n := 1; len(out) < count; n++ {
		name := fmt.Sprintf("%s-%d", prefix, n)
		if err := agentlab.ValidateName(name); err != nil {
			return nil, agentlab.Errorf(agentlab.CodeInvalid, "the name of a new sandbox: %w", err).WithField("name_prefix").WithHint("%s", agentlab.HintOf(err))
		}
		if !slices.ContainsFunc(live, func(sb agentlab.Sandbox) bool { return sb.Name == name }) {
			out = append(out, name)
		}
	}
	return out, nil
}

// forkedEvent is the event of a fork, about its source.
func forkedEvent(src agentlab.Sandbox, made []agentlab.Sandbox, secrets bool) agentlab.Event {
	var vmids []int
	for _, sb := range made {
		vmids = append(vmids, sb.VMID)
	}
	what, text := "forked into "+agentlab.Plural(len(made), "sandbox"), ""
	switch {
	case src.Salvage:
		what = "saved to extract the work of its job"
	case len(made) == 0:
		what = "saved for the attempts of its job"
	}
	if secrets {
		text = "; it has received secrets, which the copies of its memory contain"
	}
	return sandbox.NewEvent(agentlab.EventSandboxForked, src, map[string]any{"sandboxes": vmids, "received_secrets": secrets}, "sandbox %s is %s%s", src.Name, what, text)
}

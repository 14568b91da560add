package sandbox

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// imageResult is the result of ensuring an image.
type imageResult struct {
	ref string
	err error
}

// imageBuilds holds the images that are being ensured, each once, regardless
// of how many sandboxes wait for it.
type imageBuilds struct {
	mu      sync.Mutex
	waiting map[string][]int // by image name
}

// resolveImage stores the reference of a sandbox's image in its row. It does
// not wait: the step runs again when the image is available.
func (s *Service) resolveImage(ctx context.Context, sb agentlab.Sandbox) (time.Duration, bool, error) {
	res := s.takeImage(sb)
	if res == nil {
		return 0, true, nil
	}
	if res.err != nil {
		return 0, false, s.markFailed(ctx, sb, "image %s: %s", sb.Image, agentlab.TextWithHint(res.err))
	}
	_, err := s.update(ctx, sb.VMID, func(now *agentlab.Sandbox) ([]agentlab.Event, error) {
		if now.State != sb.State || imageResolved(*now) {
			return nil, nil
		}
		s.beginLease(now)
		now.Image = res.ref
		return nil, nil
	})
	return 0, false, err
}

// beginLease starts the lease of a sandbox that waited for its image now, so
// that the build does not use up the lease.
func (s *Service) beginLease(sb *agentlab.Sandbox) {
	if end := s.clock().UTC().Add(sb.LeaseExpiresAt.Sub(sb.CreatedAt)); end.After(sb.LeaseExpiresAt) {
		sb.LeaseExpiresAt = end
	}
}

// takeImage returns the result for a sandbox. Without one it ensures the image in the
// background, which wakes the sandbox with the result, and returns nil.
func (s *Service) takeImage(sb agentlab.Sandbox) (res *imageResult) {
	b := &s.images
	b.mu.Lock() // so that no sandbox has neither a result nor waits for one
	defer b.mu.Unlock()
	s.withState(sb.VMID, func(m *runtimeState) { res, m.image = m.image, nil })
	waiting, running := b.waiting[sb.Image]
	if res != nil || slices.Contains(waiting, sb.VMID) {
		return res
	}
	if !running && !s.spawn(func(ctx context.Context) { s.ensureImage(ctx, sb.Image) }) {
		return nil // the service is ending; the next one continues
	}
	if b.waiting == nil {
		b.waiting = map[string][]int{}
	}
	b.waiting[sb.Image] = append(waiting, sb.VMID)
	return nil
}

func (s *Service) ensureImage(ctx context.Context, name string) {
	bctx, cancel := context.WithTimeout(ctx, s.lim.ImageTimeout)
	defer cancel()
	ref, err := s.cfg.Images.Ensure(bctx, name, func(line string) { s.imageProgress(bctx, name, line) })
	if err != nil && ctx.Err() == nil && bctx.Err() != nil {
		err = agentlab.Errorf(agentlab.CodeTimeout, "not built within %s: %w", s.lim.ImageTimeout, err)
	}
	s.images.mu.Lock()
	waiting := s.images.waiting[name]
	delete(s.images.waiting, name)
	if ctx.Err() != nil {
		waiting = nil // the service is ending: not a failure
	}
	for _, vmid := range waiting {
		s.withState(vmid, func(m *runtimeState) { m.image = &imageResult{ref, err} })
	}
	s.images.mu.Unlock()
	for _, vmid := range waiting {
		s.loop.Wake(vmid)
	}
}

// imageProgress writes an event of the progress of an image for each sandbox
// that waits for it.
func (s *Service) imageProgress(ctx context.Context, name, line string) {
	s.images.mu.Lock()
	waiting := slices.Clone(s.images.waiting[name])
	s.images.mu.Unlock()
	var evs []agentlab.Event
	for _, vmid := range waiting {
		sb, err := s.cfg.Store.Sandbox(ctx, vmid)
		if err != nil || sb.State.Final() {
			continue
		}
		evs = append(evs, event(agentlab.EventImageBuild, sb, map[string]any{"image": name}, "%s", agentlab.Reason(line)))
	}
	if err := s.cfg.Store.AppendEvents(ctx, evs...); err != nil && ctx.Err() == nil {
		s.log.Warn("progress of an image was not recorded", "image", name, "err", err)
	}
}

package sandbox

import (
	"context"
	"errors"
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
	running map[imageKey]*imageBuild
}

// imageKey identifies an image: each backend has its own.
type imageKey struct{ backend, image string }

func imageOf(sb agentlab.Sandbox) imageKey { return imageKey{sb.Backend, sb.Image} }

// imageBuild is one image that is being ensured. It is canceled when no sandbox
// is left that waits for it.
type imageBuild struct {
	waiting []int // VMIDs
	cancel  context.CancelFunc
}

// resolveImage stores the reference of a sandbox's image in its row. It does
// not wait: the step runs again when the image is available.
func (s *Service) resolveImage(ctx context.Context, sb agentlab.Sandbox) (time.Duration, bool, error) {
	res := s.takeImage(sb)
	if res == nil {
		return 0, true, nil
	}
	if res.err != nil {
		return 0, false, s.MarkFailed(ctx, sb, "image %s: %s", sb.Image, agentlab.TextWithHint(res.err))
	}
	_, err := s.Update(ctx, sb.VMID, func(now *agentlab.Sandbox) ([]agentlab.Event, error) {
		if now.State != sb.State || ImageResolved(*now) {
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
func (s *Core) beginLease(sb *agentlab.Sandbox) {
	if end := s.clock().UTC().Add(sb.LeaseExpiresAt.Sub(sb.CreatedAt)); end.After(sb.LeaseExpiresAt) {
		sb.LeaseExpiresAt = end
	}
}

// takeImage returns the result for a sandbox. Without one it ensures the image in the
// background, which wakes the sandbox with the result, and returns nil.
func (s *Service) takeImage(sb agentlab.Sandbox) (res *imageResult) {
	s.images.mu.Lock() // so that no sandbox has neither a result nor waits for one
	defer s.images.mu.Unlock()
	s.withState(sb.VMID, func(m *runtimeState) { res, m.image = m.image, nil })
	b := s.images.running[imageOf(sb)]
	if res != nil || b != nil && slices.Contains(b.waiting, sb.VMID) {
		return res
	}
	if b == nil {
		b = &imageBuild{}
		if !s.spawn(func(ctx context.Context) { s.ensureImage(ctx, imageOf(sb), b) }) {
			return nil // the service is ending; the next one continues
		}
		if s.images.running == nil {
			s.images.running = map[imageKey]*imageBuild{}
		}
		s.images.running[imageOf(sb)] = b
	}
	b.waiting = append(b.waiting, sb.VMID)
	return nil
}

// abandonImage ends the wait of a sandbox for its image.
func (s *Service) abandonImage(sb agentlab.Sandbox) {
	s.images.mu.Lock()
	defer s.images.mu.Unlock()
	b := s.images.running[imageOf(sb)]
	if b == nil {
		return
	}
	b.waiting = slices.DeleteFunc(b.waiting, func(vmid int) bool { return vmid == sb.VMID })
	if len(b.waiting) > 0 {
		return
	}
	delete(s.images.running, imageOf(sb))
	if b.cancel != nil {
		b.cancel()
	}
}

func (s *Service) ensureImage(ctx context.Context, key imageKey, b *imageBuild) {
	bctx, cancel := context.WithTimeout(ctx, s.lim.ImageTimeout)
	defer cancel()
	s.images.mu.Lock()
	b.cancel = cancel
	abandoned := len(b.waiting) == 0
	s.images.mu.Unlock()
	if abandoned {
		return
	}
	ref, err := s.cfg.Fleet.Of(key.backend).Images.Ensure(bctx, key.image, func(line string) { s.imageProgress(bctx, b, key.image, line) })
	if err != nil && ctx.Err() == nil && errors.Is(bctx.Err(), context.DeadlineExceeded) {
		err = agentlab.Errorf(agentlab.CodeTimeout, "not built within %s: %w", s.lim.ImageTimeout, err)
	}
	s.images.mu.Lock()
	waiting := b.waiting
	if len(waiting) > 0 { // otherwise another build may have the name
		delete(s.images.running, key)
	}
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
func (s *Service) imageProgress(ctx context.Context, b *imageBuild, name, line string) {
	s.images.mu.Lock()
	waiting := slices.Clone(b.waiting)
	s.images.mu.Unlock()
	var evs []agentlab.Event
	for _, vmid := range waiting {
		sb, err := s.cfg.Store.Sandbox(ctx, vmid)
		if err != nil || sb.State.Final() {
			continue
		}
		evs = append(evs, NewEvent(agentlab.EventImageBuild, sb, map[string]any{"image": name}, "%s", agentlab.Reason(line)))
	}
	if err := s.cfg.Store.AppendEvents(ctx, evs...); err != nil && ctx.Err() == nil {
		s.log.Warn("progress of an image was not recorded", "image", name, "err", err)
	}
}

package daemon

import (
	"context"
	"slices"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/image"
)

// builtImages are the images of the store, built if missing.
type builtImages struct{ *image.Store }

// Check implements sandbox.Images. It returns an error for an image that is
// missing and cannot be built on this machine.
func (s builtImages) Check(name string) error {
	ready, err := s.Readiness(context.Background(), name)
	if err == nil {
		err = ready.Err()
	}
	if err != nil && agentlab.CodeOf(err) != agentlab.CodeNotFound && agentlab.CodeOf(err) != agentlab.CodeInvalid {
		return agentlab.Errorf(agentlab.CodeOf(err), "image %s is not built, and cannot be: %w", name, err).WithHint("%s", agentlab.HintOf(err))
	}
	return err
}

// findings returns which of the images cannot be built on this machine. For
// the first, the default image, that is an error while it does not exist.
func (s builtImages) findings(ctx context.Context, names ...string) (all []backend.Finding) {
	for i, name := range slices.Compact(names) {
		f := backend.Finding{Name: "image " + name, Level: backend.LevelOK}
		ready, err := s.Readiness(ctx, name)
		built := ready.Built
		ready.Built = false
		if err == nil {
			err = ready.Err()
		}
		switch {
		case err != nil && built:
			f.Level, f.Detail = backend.LevelWarn, "it is built, but this machine could not build it again: "+err.Error()
		case err != nil:
			f.Level, f.Detail = backend.LevelWarn, "it is not built, and this machine cannot build it: "+err.Error()
			if i == 0 {
				f.Level = backend.LevelError
			}
		case built:
			f.Detail = "it is built"
		default:
			f.Detail = "it is built when it is needed first"
		}
		f.Remedy = agentlab.HintOf(err)
		all = append(all, f)
	}
	return all
}

// imageFinder is implemented by images that are built on this machine.
type imageFinder interface {
	findings(ctx context.Context, names ...string) []backend.Finding
}

// Ensure implements sandbox.Images.
func (s builtImages) Ensure(ctx context.Context, name string, progress func(string)) (string, error) {
	img, err := s.Store.Ensure(ctx, name, progress)
	if err != nil {
		return "", err
	}
	return img.Ref(), nil
}

package doctor

import (
	"context"
	"slices"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/image"
)

// Images are built on this machine; *image.Store implements it.
type Images interface {
	Readiness(ctx context.Context, ref string) (image.Readiness, error)
}

// imageFindings returns which of the images cannot be built on this machine. For
// the first, the default image, that is an error while it does not exist.
func imageFindings(ctx context.Context, images Images, names ...string) (all []backend.Finding) {
	for i, name := range slices.Compact(names) {
		f := backend.Finding{Name: "image " + name, Level: backend.LevelOK}
		ready, err := images.Readiness(ctx, name)
		built := ready.Built
		ready.Built = false
		if err == nil {
			err = ready.Err()
		}
		switch {
		case err != nil && built:
			f.Level, f.Detail = backend.LevelWarn, "the image is built, but this machine cannot build it again: "+err.Error()
		case err != nil:
			f.Level, f.Detail = backend.LevelWarn, "the image is not built, and this machine cannot build it: "+err.Error()
			if i == 0 {
				f.Level = backend.LevelError
			}
		case built:
			f.Detail = "the image is built"
		default:
			f.Detail = "the image will be built on first use"
		}
		f.Remedy = agentlab.HintOf(err)
		all = append(all, f)
	}
	return all
}

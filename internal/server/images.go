package server

import (
	"context"
	"maps"

	"github.com/danielgtaylor/huma/v2"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/image"
)

func (s *Server) listImages(ctx context.Context, _ *struct{}) ([]api.Image, error) {
	list, err := s.cfg.Services.Images.List(ctx)
	if err != nil {
		return nil, err
	}
	used, err := s.cfg.Services.ImageUse.ImagesInUse(ctx)
	return mapSlice(list, func(i image.Image) api.Image { return toImage(i, used) }), err
}

func (s *Server) listLayers(context.Context, *struct{}) ([]api.ImageLayer, error) {
	return mapSlice(s.cfg.Services.Images.Layers(), toLayer), nil
}

func (s *Server) removeLayers(context.Context, *struct{}) ([]api.ImageLayer, error) {
	removed, err := s.cfg.Services.Images.RemoveLayers()
	return mapSlice(removed, toLayer), err
}

func toLayer(l image.Layer) api.ImageLayer {
	return api.ImageLayer{Kind: l.Kind, DiskUsage: l.Bytes, UsedAt: l.LastUsed.UTC()}
}

func (s *Server) getImage(ctx context.Context, in *imageInput) (api.Image, error) {
	i, err := s.cfg.Services.Images.Resolve(ctx, in.Image)
	return s.oneImage(ctx, i, err)
}

func (s *Server) oneImage(ctx context.Context, i image.Image, err error) (api.Image, error) {
	if err != nil {
		return api.Image{}, err
	}
	used, err := s.cfg.Services.ImageUse.ImagesInUse(ctx)
	return toImage(i, used), err
}

func (s *Server) removeImage(ctx context.Context, in *imageInput) (none, error) {
	return none{}, s.cfg.Services.Images.Remove(ctx, in.Image)
}

type buildImageInput struct{ Body api.ImageBuild }

// buildImage builds an image. The build that a job waits for is another one, run
// by the daemon.
func (s *Server) buildImage(ctx context.Context, in *buildImageInput) (*huma.StreamResponse, error) {
	b := in.Body
	if b.Name == "" {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "it is empty").WithField("name")
	}
	if b.Sandbox != "" {
		if b.Recipe != "" || b.Force {
			return nil, agentlab.Errorf(agentlab.CodeInvalid, "an image of a sandbox has no recipe").WithField("sandbox")
		}
		if err := requireVerb(ctx, verbCopySandboxes, AccessAdmin); err != nil {
			return nil, err
		}
		return s.withProgress("image of sandbox "+b.Sandbox, func(ctx context.Context, progress func(string)) (any, error) {
			made, err := s.commitImage(ctx, b, progress)
			return s.oneImage(ctx, made, err)
		}), nil
	}
	return s.withProgress("build image "+b.Name, func(ctx context.Context, progress func(string)) (any, error) {
		built, err := s.cfg.Services.Images.Build(ctx, image.BuildRequest{Name: b.Name, Recipe: b.Recipe, Force: b.Force}, progress)
		return s.oneImage(ctx, built, err)
	}), nil
}

// commitImage makes an image with the disk of a sandbox.
func (s *Server) commitImage(ctx context.Context, b api.ImageBuild, progress func(string)) (image.Image, error) {
	sb, err := s.cfg.Services.Sandboxes.Get(ctx, b.Sandbox)
	if err != nil {
		return image.Image{}, err
	}
	base, err := s.cfg.Services.Images.Resolve(ctx, sb.Image)
	if err != nil {
		return image.Image{}, err
	}
	progress("copying the disk of sandbox " + sb.Name)
	return s.cfg.Services.Images.Commit(ctx, b.Name, base, func(ctx context.Context, path string) error {
		return s.cfg.Services.Snapshots.ExportDisk(ctx, sb.VMID, sb.UID, path)
	}, progress)
}

// withProgress answers 200 at once, so that the caller sees progress; the result
// of work is a message of kind done, and a failure one of kind error. The work
// ends when the caller disconnects.
func (s *Server) withProgress(what string, work func(ctx context.Context, progress func(line string)) (any, error)) *huma.StreamResponse {
	return &huma.StreamResponse{Body: func(hc huma.Context) {
		ctx, cancel := s.streamContext(hc.Context())
		defer cancel()
		out, err := newSSE(hc)
		if err != nil {
			return
		}
		done, err := work(ctx, func(line string) {
			if out.send("progress", "", api.ImageProgress{Line: line}) != nil {
				cancel()
			}
		})
		if err != nil {
			s.log.Warn("call failed", "call", what, "err", err)
			_ = out.send("error", "", problemOf(err))
			return
		}
		_ = out.send("done", "", done)
	}}
}

func toImage(i image.Image, used map[string]int) api.Image {
	versions := map[string]string{"kernel": i.KernelRelease, "builder": i.Builder, "distribution": i.Distribution}
	maps.Copy(versions, i.Versions)
	return api.Image{
		Name: i.Name, Digest: i.Digest, Arch: i.Arch, Suite: i.Suite, Size: i.SizeBytes, DiskUsage: i.DiskUsage(),
		CreatedAt: i.CreatedAt.UTC(), Versions: versions, InUse: used[i.Ref()] > 0, Current: i.Current,
	}
}

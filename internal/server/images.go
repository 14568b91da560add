package server

import (
	"context"

	"github.com/danielgtaylor/huma/v2"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
)

func (s *Server) listImages(ctx context.Context, _ *struct{}) (api.List[api.Image], error) {
	list, err := s.cfg.Services.Images.List(ctx)
	return api.List[api.Image]{Items: append([]api.Image{}, list...)}, err
}

func (s *Server) getImage(ctx context.Context, in *imageInput) (api.Image, error) {
	return s.cfg.Services.Images.Get(ctx, in.Image)
}

func (s *Server) removeImage(ctx context.Context, in *imageInput) (none, error) {
	return none{}, s.cfg.Services.Images.Remove(ctx, in.Image)
}

type buildImageInput struct{ Body api.ImageBuild }

// buildImage answers 200 at once, so that the caller sees progress; a failure
// is sent as a message of kind error. The build ends when the caller
// disconnects; the build that a job waits for is another one, run by the
// daemon.
func (s *Server) buildImage(_ context.Context, in *buildImageInput) (*huma.StreamResponse, error) {
	if in.Body.Name == "" {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "it is empty").WithField("name")
	}
	return &huma.StreamResponse{Body: func(hc huma.Context) {
		ctx, cancel := s.streamContext(hc.Context())
		defer cancel()
		out, err := newSSE(hc)
		if err != nil {
			return
		}
		img, err := s.cfg.Services.Images.Build(ctx, in.Body, func(line string) {
			if out.send("progress", "", api.ImageProgress{Line: line}) != nil {
				cancel()
			}
		})
		if err != nil {
			s.log.Warn("image build failed", "image", in.Body.Name, "err", err)
			_ = out.send("error", "", problemOf(err))
			return
		}
		_ = out.send("done", "", img)
	}}, nil
}

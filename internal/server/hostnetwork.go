package server

import (
	"context"
	"io"
	"strings"

	"github.com/danielgtaylor/huma/v2"

	"github.com/agentlab-vm/agentlab/api"
)

// HostNetwork manages the nftables rules of a host whose sandboxes are on a
// bridge.
type HostNetwork interface {
	Rules(ctx context.Context) (string, error) // in the format of 'nft -f'
	Apply(ctx context.Context) (api.HostNetwork, error)
	Remove(ctx context.Context) (api.HostNetwork, error)
	Status(ctx context.Context) (api.HostNetwork, error)
}

func (s *Server) hostNetwork(ctx context.Context, _ *struct{}) (api.HostNetwork, error) {
	return s.cfg.Services.HostNetwork.Status(ctx)
}

func (s *Server) hostNetworkRules(ctx context.Context, _ *struct{}) (*huma.StreamResponse, error) {
	return s.stream(ctx, func(ctx context.Context) (io.ReadCloser, map[string]string, error) {
		text, err := s.cfg.Services.HostNetwork.Rules(ctx)
		return io.NopCloser(strings.NewReader(text)), plain, err
	})
}

func (s *Server) applyHostNetwork(ctx context.Context, _ *struct{}) (api.HostNetwork, error) {
	return s.cfg.Services.HostNetwork.Apply(ctx)
}

func (s *Server) removeHostNetwork(ctx context.Context, _ *struct{}) (api.HostNetwork, error) {
	return s.cfg.Services.HostNetwork.Remove(ctx)
}

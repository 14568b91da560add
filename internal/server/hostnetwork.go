package server

import (
	"context"
	"io"
	"strings"

	"github.com/danielgtaylor/huma/v2"

	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/hostnet"
)

// HostNetwork manages the nftables rules of a host whose sandboxes are on a
// bridge; *hostnet.Local implements it.
type HostNetwork interface {
	Rules(ctx context.Context) (string, error) // in the format of 'nft -f'
	Apply(ctx context.Context) (hostnet.Status, error)
	Remove(ctx context.Context) (hostnet.Status, error)
	Status(ctx context.Context) (hostnet.Status, error)
}

func (s *Server) hostNetwork(ctx context.Context, _ *struct{}) (api.HostNetwork, error) {
	return toHostNetwork(s.cfg.Services.HostNetwork.Status(ctx))
}

func (s *Server) hostNetworkRules(ctx context.Context, _ *struct{}) (*huma.StreamResponse, error) {
	return s.stream(ctx, func(ctx context.Context) (io.ReadCloser, map[string]string, error) {
		text, err := s.cfg.Services.HostNetwork.Rules(ctx)
		return io.NopCloser(strings.NewReader(text)), textHeader, err
	})
}

func (s *Server) applyHostNetwork(ctx context.Context, _ *struct{}) (api.HostNetwork, error) {
	return toHostNetwork(s.cfg.Services.HostNetwork.Apply(ctx))
}

func (s *Server) removeHostNetwork(ctx context.Context, _ *struct{}) (api.HostNetwork, error) {
	return toHostNetwork(s.cfg.Services.HostNetwork.Remove(ctx))
}

func toHostNetwork(st hostnet.Status, err error) (api.HostNetwork, error) {
	if err != nil {
		return api.HostNetwork{}, err
	}
	out := api.HostNetwork{
		Applied: st.Applied(), Tables: nonNil(st.Tables), Drift: nonNil(st.Drift), Ports: nonNil(st.Ports), Sandboxes: st.Sandboxes,
		Bridge: st.Bridge, Subnet: st.Subnet4.String(), Serving: st.Serving,
	}
	if st.Subnet6.IsValid() {
		out.Subnet6 = st.Subnet6.String()
	}
	return out, nil
}

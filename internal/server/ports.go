package server

import (
	"context"
	"net/netip"

	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/internal/devproxy"
)

// Ports serves the ports of guests on this machine; *devproxy.Service implements it.
type Ports interface {
	Ports(vmid int) []devproxy.Port
	DNS() netip.AddrPort
	SetDNS(on bool) (netip.AddrPort, error)
}

// portRoutes returns the routes for ports of guests.
func (s *Server) portRoutes() []route {
	const dns = "/v1/dns"
	return []route{
		{get, "/v1/ports", AccessRead, "sandbox.read", byQuery, anyOrigin, 200, "ports", "List the TCP ports on which processes of sandboxes listen", listing(s.listPorts)},
		{get, dns, AccessRead, "daemon.read", noTarget, anyOrigin, 200, "dns", "Show the DNS responder for names of sandboxes", call(s.getDNS)},
		{post, dns, AccessAdmin, "daemon.dns", noTarget, localOnly, 200, "set-dns", "Start or stop the DNS responder for names of sandboxes", call(s.setDNS)},
	}
}

type listPortsInput struct {
	Sandbox string `query:"sandbox" doc:"Only ports of this sandbox (VMID or name)"`
}

func (s *Server) listPorts(ctx context.Context, in *listPortsInput) ([]api.Port, error) {
	vmid := 0
	if in.Sandbox != "" {
		sb, err := s.cfg.Services.Sandboxes.Get(ctx, in.Sandbox)
		if err != nil {
			return nil, err
		}
		vmid = sb.VMID
	}
	return mapSlice(s.cfg.Services.Ports.Ports(vmid), func(p devproxy.Port) api.Port {
		return api.Port{
			SandboxVMID: p.VMID, Sandbox: p.Sandbox, Session: p.Session, Port: int(p.Port), HostPort: int(p.HostPort),
			URL: p.URL, Program: p.Program, Worktree: p.Worktree, Problem: p.Problem,
		}
	}), nil
}

func toDNS(at netip.AddrPort) api.DNS {
	out := api.DNS{Domain: devproxy.DNSDomain}
	if at.IsValid() {
		out.Address = at.String()
	}
	return out
}

func (s *Server) getDNS(context.Context, *struct{}) (api.DNS, error) {
	return toDNS(s.cfg.Services.Ports.DNS()), nil
}

type setDNSInput struct{ Body api.DNSSet }

func (s *Server) setDNS(_ context.Context, in *setDNSInput) (api.DNS, error) {
	at, err := s.cfg.Services.Ports.SetDNS(in.Body.Enabled)
	return toDNS(at), err
}

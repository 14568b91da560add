package regcache

import (
	"net"
	"net/netip"
	"slices"
	"strconv"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/guestplane/outside"
)

// Settings returns what the guest of a sandbox needs to use the cache: the kinds of
// registries that its policy allows. It is nil if there are none.
func (s *Service) Settings(sb agentlab.Sandbox, prof agentlab.Profile) *guestapi.RegistryCache {
	if s == nil || prof.NoCache {
		return nil
	}
	p, err := egress.New(sb.Network)
	if err != nil {
		return nil
	}
	out := &guestapi.RegistryCache{URL: s.cfg.Base}
	for k, u := range s.upstreams {
		if u != nil && mayAsk(p, outside.HostPort(u)) {
			out.Kinds = append(out.Kinds, string(k))
		}
	}
	for _, m := range s.mirrors {
		if mayAsk(p, outside.HostPort(m)) {
			host, _, _ := net.SplitHostPort(aptHost(m))
			out.AptHosts = append(out.AptHosts, host)
		}
	}
	if len(out.AptHosts) > 0 {
		out.Kinds = append(out.Kinds, string(Apt))
	}
	if len(out.Kinds) == 0 {
		return nil
	}
	slices.Sort(out.Kinds)
	return out
}

// mayAsk reports whether a policy allows connections to HOST:PORT, as far as this
// is known without the addresses of the host.
func mayAsk(p *egress.Policy, at string) bool {
	host, portText, err := net.SplitHostPort(at)
	port, perr := strconv.ParseUint(portText, 10, 16)
	if err != nil || perr != nil {
		return false
	}
	t := egress.Target{Proto: egress.TCP, Port: uint16(port)}
	if a, err := netip.ParseAddr(host); err == nil {
		t.Addr = a
	} else {
		t.Name = host + "."
	}
	return p.Explain(t).Allow
}

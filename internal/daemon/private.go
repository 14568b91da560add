package daemon

import (
	"fmt"
	"os"
	"slices"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/config"
	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/profile"
)

// privateTargets returns the private destinations that the configuration
// allows for every sandbox.
func privateTargets(c config.Config) ([]agentlab.PrivateTarget, error) {
	var out []agentlab.PrivateTarget
	for _, p := range c.Network.Private {
		out = append(out, agentlab.PrivateTarget{Host: p.Host, Port: p.Port, Reason: p.Reason, Source: profile.SourceConfig})
	}
	all, err := egress.ParsePrivates(out)
	for i, p := range all {
		if p.Host && slices.Contains(c.APIPorts(), p.Port) {
			return nil, agentlab.Errorf(agentlab.CodeInvalid, "port %d of the host is AgentLab's own API, which no sandbox may reach", p.Port).
				WithField(fmt.Sprintf("network.private[%d].port", i))
		}
	}
	return out, err
}

// caCertificates reads the certificate files in the configuration.
func caCertificates(c config.Config) ([]string, error) {
	var out []string
	for _, path := range c.Guest.CACertificates {
		data, err := os.ReadFile(path)
		if err != nil {
			return nil, agentlab.Errorf(agentlab.CodeInvalid, "cannot read a certificate: %w", err).WithField("guest.ca_certificates")
		}
		list, err := profile.ParseCertificates(path, data)
		if err != nil {
			return nil, agentlab.Errorf(agentlab.CodeInvalid, "%w", err).WithField("guest.ca_certificates").WithHint("%s", agentlab.HintOf(err))
		}
		out = append(out, list...)
	}
	return out, nil
}

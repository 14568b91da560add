package config

import (
	"net/netip"
	"path/filepath"

	"github.com/agentlab-vm/agentlab"
)

// Metrics configures the port for Prometheus.
type Metrics struct {
	Listen    string `yaml:"listen" doctor:"show" doc:"ADDRESS:PORT on which the daemon serves its metrics over HTTP, at the path /metrics; only a loopback address, for example 127.0.0.1:9464. Empty means none; 'agentlab metrics' and GET /v1/metrics always work. See docs/metrics.md."`
	TokenFile string `yaml:"token_file" doctor:"secret-file" doc:"Absolute path of a file with the token that a client of metrics.listen must send, 32 to 256 printable characters in one line; other users must not be able to read the file. The daemon reads it when it starts."`
}

// validate checks every value and their combinations.
func (m Metrics) validate() error {
	if m.Listen == "" {
		if m.TokenFile != "" {
			return agentlab.Errorf(agentlab.CodeInvalid, "metrics.listen is not set, so the token is not used").WithField("metrics.token_file").
				WithHint("set metrics.listen, or remove token_file")
		}
		return nil
	}
	addr, err := netip.ParseAddrPort(m.Listen)
	switch {
	case err != nil:
		return agentlab.Errorf(agentlab.CodeInvalid, "%q is not an address with a port", m.Listen).WithField("metrics.listen").
			WithHint("write a loopback address and a port number, for example 127.0.0.1:9464")
	case !addr.Addr().Unmap().IsLoopback():
		return agentlab.Errorf(agentlab.CodeInvalid, "%s is not a loopback address", m.Listen).WithField("metrics.listen").
			WithHint("listen on 127.0.0.1 or [::1]; from another host, read the metrics over api.listen with TLS and a read token")
	case m.TokenFile == "":
		return agentlab.Errorf(agentlab.CodeInvalid, "metrics.listen needs a token").WithField("metrics.listen").
			WithHint("set metrics.token_file to a file with a random token")
	case !filepath.IsAbs(m.TokenFile):
		return agentlab.Errorf(agentlab.CodeInvalid, "%q is not an absolute path", m.TokenFile).WithField("metrics.token_file")
	}
	return nil
}

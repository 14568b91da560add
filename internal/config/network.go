package config

import (
	"net"
	"strconv"
	"strings"

	"github.com/agentlab-vm/agentlab"
)

// Network is what holds for the network of every sandbox.
type Network struct {
	Private []Private `yaml:"private" doc:"Private destinations that every sandbox may reach, although all others are denied: a list of {host, port, reason}. host is a full name, a private address, or host.agentlab.internal for the host itself; see network.md. A profile can have its own."`
}

// Private is one private destination.
type Private struct {
	Host   string `yaml:"host"`
	Port   int    `yaml:"port"`
	Reason string `yaml:"reason"`
}

// validate checks what can be checked without the language of policies, which
// the daemon knows.
func (n Network) validate() error {
	for _, p := range n.Private {
		if p.Host == "" || p.Port < 1 || p.Port > 65535 || strings.TrimSpace(p.Reason) == "" {
			return agentlab.Errorf(agentlab.CodeInvalid, "a private destination needs a host, a port between 1 and 65535 and a reason").WithField("network.private").
				WithHint("write {host: gateway.corp, port: 443, reason: our model gateway}")
		}
	}
	return nil
}

// APIPorts returns the ports of this host on which the control API is served.
func (c Config) APIPorts() []int {
	_, port, err := net.SplitHostPort(c.API.Listen)
	if err != nil {
		return nil
	}
	n, err := strconv.Atoi(port)
	if err != nil || n == 0 {
		return nil
	}
	return []int{n}
}

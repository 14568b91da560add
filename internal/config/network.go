package config

import (
	"net"
	"path/filepath"
	"strconv"

	"github.com/agentlab-vm/agentlab"
)

// Network configures the network of every sandbox.
type Network struct {
	Private []Private `yaml:"private" doctor:"show" doc:"Private destinations that every sandbox may reach; all other private destinations are denied. A list of {host, port, reason}; host is a full name, a private address, or host.agentlab.internal for the host itself. See network.md. A profile can add its own."`
}

// Private is one private destination. The daemon checks it, because this package
// does not know the language of policies.
type Private struct {
	Host   string `yaml:"host" doctor:"show"`
	Port   int    `yaml:"port" hint:"give one port; for several ports, write one entry for each"`
	Reason string `yaml:"reason" doctor:"show"`
}

// APIPorts returns the ports of this host on which the control API and the metrics
// are served.
func (c Config) APIPorts() (ports []uint16) {
	for _, listen := range []string{c.API.Listen, c.Metrics.Listen} {
		_, port, err := net.SplitHostPort(listen)
		if err != nil {
			continue
		}
		if n, err := strconv.ParseUint(port, 10, 16); err == nil && n != 0 {
			ports = append(ports, uint16(n))
		}
	}
	return ports
}

// Guest configures the guests of all sandboxes.
type Guest struct {
	CACertificates []string `yaml:"ca_certificates" doctor:"show" doc:"Absolute paths of PEM files with CA certificates that every guest trusts in addition to those of its image, for example the certificate of a proxy that decrypts TLS. The daemon reads them when it starts. A profile can name more."`
}

func (g Guest) validate() error {
	for _, p := range g.CACertificates {
		if !filepath.IsAbs(p) {
			return agentlab.Errorf(agentlab.CodeInvalid, "%q is not an absolute path", p).WithField("guest.ca_certificates")
		}
	}
	return nil
}

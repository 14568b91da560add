package config

import (
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
)

// defaultGroup is the group whose members may use the machine-wide daemon if
// api.groups is empty.
const defaultGroup = "agentlab"

// GroupRoles returns the roles of the members of groups for the machine-wide
// daemon.
func (a API) GroupRoles() map[string]agentlab.Role {
	if len(a.Groups) == 0 {
		return map[string]agentlab.Role{defaultGroup: agentlab.RoleWrite}
	}
	out := map[string]agentlab.Role{}
	for group, role := range a.Groups {
		out[group] = agentlab.Role(role)
	}
	return out
}

// validate checks every value and their combinations.
func (a API) validate() error {
	var roles []string
	for _, r := range agentlab.Roles {
		roles = append(roles, string(r))
	}
	for _, group := range slices.Sorted(maps.Keys(a.Groups)) {
		if group == "" || strings.ContainsAny(group, " :/\x00\n") {
			return agentlab.Errorf(agentlab.CodeInvalid, "%q is not the name of a group", group).WithField("api.groups")
		}
		if err := OneOf("api.groups."+group, a.Groups[group], roles); err != nil {
			return err
		}
	}
	for _, f := range []struct{ key, path string }{{"api.tls_cert", a.TLSCert}, {"api.tls_key", a.TLSKey}} {
		if f.path != "" && !filepath.IsAbs(f.path) {
			return agentlab.Errorf(agentlab.CodeInvalid, "%q is not an absolute path", f.path).WithField(f.key)
		}
	}
	if (a.TLSCert == "") != (a.TLSKey == "") {
		return agentlab.Errorf(agentlab.CodeInvalid, "tls_cert and tls_key must be set together").WithField(lone(a)).WithHint("set both, or remove both")
	}
	if a.Listen == "" {
		if a.TLSCert != "" {
			return agentlab.Errorf(agentlab.CodeInvalid, "api.listen is not set, so the certificate is not used").WithField("api.tls_cert").WithHint("set api.listen, or remove tls_cert and tls_key")
		}
		return nil
	}
	addr, err := netip.ParseAddrPort(a.Listen)
	if err != nil {
		return agentlab.Errorf(agentlab.CodeInvalid, "%q is not an address with a port", a.Listen).WithField("api.listen").
			WithHint("write an IP address and a port number, for example 127.0.0.1:8843 or [::1]:8843")
	}
	if a.TLSCert == "" && !addr.Addr().Unmap().IsLoopback() {
		return agentlab.Errorf(agentlab.CodeInvalid, "%s is not a loopback address, and TLS is not configured", a.Listen).WithField("api.listen").
			WithHint("set api.tls_cert and api.tls_key, or listen on 127.0.0.1 or [::1]")
	}
	return nil
}

func lone(a API) string {
	if a.TLSCert != "" {
		return "api.tls_cert"
	}
	return "api.tls_key"
}

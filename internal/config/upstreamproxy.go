package config

import (
	"net/netip"
	"net/url"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/agentlab-vm/agentlab"
)

// UpstreamProxy is the proxy of a host without direct access to the internet. An
// empty URL means that there is none.
type UpstreamProxy struct {
	URL             string `yaml:"url" doc:"http://HOST:PORT, https://HOST:PORT or socks5://HOST:PORT of the proxy through which sandboxes reach the internet; empty means direct connections. The proxy carries only TCP to IPv4 addresses, and some backends cannot use one; see network.md."`
	CredentialsFile string `yaml:"credentials_file" doctor:"secret-file" doc:"Absolute path of a file with USER:PASSWORD for the proxy, which only its owner can read (mode 0600). The file is read when a sandbox starts."`
	CAFile          string `yaml:"ca_file" doctor:"show" doc:"Absolute path of a PEM file with CA certificates that are trusted, in addition to those of the system, for an https proxy and for dns."`
	DNS             string `yaml:"dns" doc:"https://ADDRESS/dns-query of a resolver (DNS over HTTPS, RFC 8484) that is queried through the proxy; ADDRESS is an IP address. Empty means the name servers of the host."`
}

// validate checks the syntax; it reads no file.
func (p UpstreamProxy) validate() error {
	bad := func(key, format string, args ...any) *agentlab.Error {
		return agentlab.Errorf(agentlab.CodeInvalid, format, args...).WithField("upstream_proxy." + key)
	}
	if p.URL == "" {
		if p != (UpstreamProxy{}) {
			return bad("url", "missing, but other keys of upstream_proxy are set").WithHint("set it, or remove upstream_proxy")
		}
		return nil
	}
	u, err := url.Parse(p.URL)
	switch {
	case err != nil: // the error would contain a password
		return bad("url", "not a URL").WithHint("write http://proxy.corp:3128")
	case u.User != nil:
		return bad("url", "the URL must not contain credentials").WithHint("write USER:PASSWORD to a file with mode 0600 and set upstream_proxy.credentials_file to its path")
	case !slices.Contains([]string{"http", "https", "socks5"}, u.Scheme):
		return bad("url", "%q has an unsupported scheme", p.URL).WithHint("use http://, https:// or socks5://")
	case !hasPort(u) || u.Hostname() == "" || *u != (url.URL{Scheme: u.Scheme, Host: u.Host}):
		return bad("url", "%q is not SCHEME://HOST:PORT", p.URL).WithHint("write http://proxy.corp:3128")
	}
	for key, path := range map[string]string{"credentials_file": p.CredentialsFile, "ca_file": p.CAFile} {
		if path != "" && !filepath.IsAbs(path) {
			return bad(key, "%q is not an absolute path", path)
		}
	}
	if p.DNS != "" {
		u, err := url.Parse(p.DNS)
		if err != nil || u.Scheme != "https" || u.User != nil || u.RawQuery != "" || u.Fragment != "" || u.Port() != "" && !hasPort(u) {
			return bad("dns", "not https://ADDRESS/dns-query").WithHint("write https://1.1.1.1/dns-query")
		}
		if _, err := netip.ParseAddr(u.Hostname()); err != nil {
			return bad("dns", "%q is not an IP address", u.Hostname()).WithHint("the name of the resolver cannot be resolved: write its address, such as https://1.1.1.1/dns-query")
		}
	}
	return nil
}

// Refuse returns the error for a backend that does not support a proxy, nil if
// none is configured.
func (p UpstreamProxy) Refuse(backend string) error {
	if p.URL == "" {
		return nil
	}
	return agentlab.Errorf(agentlab.CodeUnsupported, "backend %s routes packets in the kernel, so a proxy cannot be used", backend).WithField("upstream_proxy.url").
		WithHint("use another backend, or remove upstream_proxy and route the sandboxes' network through a gateway")
}

func hasPort(u *url.URL) bool {
	n, err := strconv.ParseUint(u.Port(), 10, 16)
	return err == nil && n > 0
}

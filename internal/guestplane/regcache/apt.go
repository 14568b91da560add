package regcache

import (
	"net/http"
	"net/url"
	"strings"

	"github.com/agentlab-vm/agentlab/internal/lazyre"
)

var (
	aptByHash = lazyre.New(`(?:^|/)by-hash/(SHA256|SHA512)/([0-9a-f]{64,128})$`)
	aptPool   = lazyre.New(`(?:^|/)pool/.+\.(deb|udeb|ddeb|dsc|tar\.[a-z0-9]+)$`)
)

// aptTarget reads the request that apt sends to a proxy: GET http://MIRROR/PATH.
func (s *Service) aptTarget(r *http.Request) (*target, error) {
	if r.URL.Scheme != "http" || r.URL.RawQuery != "" {
		return nil, errNoObject
	}
	var mirror *url.URL
	for _, m := range s.cfg.Upstreams.Apt {
		if aptHost(m) == hostPort(&url.URL{Scheme: "http", Host: r.URL.Host}) {
			mirror = m
		}
	}
	if mirror == nil {
		return nil, bad(http.StatusForbidden, "the registry cache is no proxy for "+strings.ToLower(r.URL.Hostname())+": it is no mirror of cache.apt")
	}
	u := mirror.JoinPath(r.URL.Path)
	t := &target{kind: Apt, key: u.String(), url: u, index: !aptPool.MatchString(u.Path)}
	if m := aptByHash.FindStringSubmatch(u.Path); m != nil {
		d, ok := parseDigest(strings.ToLower(m[1]) + ":" + m[2])
		if !ok {
			return nil, errNoObject
		}
		t.digest, t.index = d, false
	}
	return t, nil
}

// aptHost returns HOST:PORT under which guests ask for a mirror. A mirror that the
// cache asks over https is asked for over http.
func aptHost(m *url.URL) string {
	u := url.URL{Scheme: "http", Host: m.Host}
	if m.Scheme == "https" && m.Port() == "" {
		u.Host = m.Hostname()
	}
	return hostPort(&u)
}

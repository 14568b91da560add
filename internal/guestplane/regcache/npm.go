package regcache

import (
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"io"
	"net/http"
	"net/url"
	"path"
	"strings"

	"github.com/agentlab-vm/agentlab/internal/lazyre"
)

const (
	npmName = `(@[A-Za-z0-9~._-]{1,214}/)?[A-Za-z0-9~_-][A-Za-z0-9~._-]{0,213}`
	// npmShort is the media type of an index with only what an installation needs.
	npmShort = "application/vnd.npm.install-v1+json"
)

var (
	npmPackage = lazyre.New(`^` + npmName + `$`)
	npmTarball = lazyre.New(`^(` + npmName + `)/-/([A-Za-z0-9~._+-]{1,300}\.tgz)$`)
)

// isTarballPath reports whether a path is that of a package of npm at the root of
// a registry. npm replaces the host of the public registry in an index by that of
// the configured one, without its path.
func isTarballPath(p string) bool { return npmTarball.MatchString(strings.TrimPrefix(p, "/")) }

// npmTarget reads NAME, @SCOPE/NAME or NAME/-/FILE.tgz. An index is passed on as
// it is: npm writes the URLs in it to package-lock.json.
func (s *Service) npmTarget(r *http.Request, rest string) (*target, error) {
	base := s.cfg.Upstreams.NPM
	if base == nil {
		return nil, errNoObject
	}
	if m := npmTarball.FindStringSubmatch(rest); m != nil {
		u := base.JoinPath(rest)
		return &target{kind: NPM, key: u.String(), url: u, expect: func(scope string) digest { return s.npmDigest(base, scope, m[1], m[3]) }}, nil
	}
	if !npmPackage.MatchString(rest) {
		return nil, errNoObject
	}
	return npmIndex(base, rest, strings.Contains(r.Header.Get("Accept"), npmShort)), nil
}

func npmIndex(base *url.URL, name string, short bool) *target {
	u := *base
	u.Path, u.RawPath = base.Path+"/"+name, base.EscapedPath()+"/"+strings.ReplaceAll(name, "/", "%2F")
	t := &target{kind: NPM, url: &u, index: true, accept: "application/json"}
	if short {
		t.accept = npmShort
	}
	t.key = t.accept + " " + u.String()
	return t
}

// npmDigest returns the digest of a tarball from a stored index of its package,
// the zero digest if there is none. Few indexes are in memory at the same time.
func (s *Service) npmDigest(base *url.URL, scope, name, file string) digest {
	s.rewrites <- struct{}{}
	defer func() { <-s.rewrites }()
	for _, short := range []bool{true, false} {
		o := s.store.open(NPM, scope+npmIndex(base, name, short).key)
		if o == nil {
			continue
		}
		var index struct {
			Versions map[string]struct {
				Dist struct{ Tarball, Integrity string }
			}
		}
		body := make([]byte, o.size)
		_, err := io.ReadFull(o.content(), body)
		o.close()
		if err != nil || json.Unmarshal(body, &index) != nil {
			continue
		}
		for _, v := range index.Versions {
			u, err := url.Parse(v.Dist.Tarball)
			if err == nil && path.Base(u.Path) == file {
				return integrity(v.Dist.Integrity)
			}
		}
	}
	return digest{}
}

// integrity returns the strongest known digest of a subresource integrity text.
func integrity(text string) digest {
	for _, one := range strings.Fields(text) {
		sum, ok := strings.CutPrefix(one, "sha512-")
		raw, err := base64.StdEncoding.DecodeString(sum)
		if d, valid := parseDigest("sha512:" + hex.EncodeToString(raw)); ok && err == nil && valid {
			return d
		}
	}
	return digest{}
}

package regcache

import (
	"cmp"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strings"

	"golang.org/x/mod/module"
	"golang.org/x/mod/semver"

	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/guestplane/outside"
	"github.com/agentlab-vm/agentlab/internal/lazyre"
)

// target is what a guest asks for.
type target struct {
	kind   Kind
	url    *url.URL // at the upstream
	accept string   // header of the request; "" means any
	key    string   // of the object in the store, without the scope; "": it changes and is not stored
	scope  string   // of the key: "" or scopePrivate
	digest digest   // of the content, if it is known
	repo   string   // of Docker: the repository, for the token

	tarball [2]string                                                     // of npm: the package and its file, whose digest is in the index of the package
	rewrite func(body []byte, contentType string) ([]byte, string, error) // of an index; nil: none
}

// scopePrivate is the scope of files from private addresses. A name can also have
// public ones, and most guests may reach only these.
const scopePrivate = "private "

// name is the key with the scope.
func (t *target) name() string { return t.scope + t.key }

// rule is a form of the requests of guests. What is stored has a URL whose content never
// changes, or a digest; everything else is passed on.
type rule struct {
	kind   Kind
	path   *lazyre.Regexp // the first group is the path below the URL of the upstream
	stored bool
	// fill completes a target, with the groups of path. Nil: nothing is missing.
	fill func(s *Service, t *target, m []string, r *http.Request) error
}

const (
	npmName = `((?:@[A-Za-z0-9~._-]{1,214}/)?[A-Za-z0-9~_-][A-Za-z0-9~._-]{0,213})`
	// npmShort is the media type of an index with only what an installation needs.
	npmShort = "application/vnd.npm.install-v1+json"
	pypiJSON = "application/vnd.pypi.simple.v1+json"

	underNPM, underPyPI, underGo = "^" + guestapi.PathCache + "npm/", "^" + guestapi.PathCache + "pypi/", "^" + guestapi.PathCache + "go/"

	sumdb = underGo + `(sumdb/[a-z0-9.-]{1,200}/`
	image = `^/(v2/((?:[a-z0-9]+(?:[._-]+[a-z0-9]+)*/){0,8}[a-z0-9]+(?:[._-]+[a-z0-9]+)*)/`
	// manifests are their media types.
	manifests = "application/vnd.oci.image.index.v1+json, application/vnd.docker.distribution.manifest.list.v2+json, " +
		"application/vnd.oci.image.manifest.v1+json, application/vnd.docker.distribution.manifest.v2+json"
)

// npmTarball is a package of npm. npm replaces the host of the public registry in an
// index by that of the configured one, without its path.
var npmTarball = lazyre.New(`^/(?:cache/npm/)?(` + npmName + `/-/([A-Za-z0-9~._+-]{1,300}\.tgz))$`)

// rules are all rules; the first one that matches applies. The path of a request to a
// proxy, as apt makes it, follows "proxy".
var rules = []rule{
	{NPM, npmTarball, true, (*Service).fillTarball},
	{NPM, lazyre.New(underNPM + `(` + npmName + `)$`), false, (*Service).fillNPM},
	{PyPI, lazyre.New(underPyPI + `simple/([A-Za-z0-9](?:[A-Za-z0-9._-]{0,200}[A-Za-z0-9])?)/?$`), false, (*Service).fillProject},
	{PyPI, lazyre.New(underPyPI + `files/((sha256:[0-9a-f]{64}|none)/([A-Za-z0-9.:-]{1,260})(/[^?#]+))$`), true, (*Service).fillFile},
	{Go, lazyre.New(sumdb + `tile/[0-9]{1,2}/[a-z0-9/.]{1,100})$`), true, nil},
	{Go, lazyre.New(sumdb + `(?:supported|latest|lookup/[^?#]{1,600}))$`), false, nil},
	{Go, lazyre.New(underGo + `(([^@]+)/@(?:latest|v/list))$`), false, (*Service).fillModule},
	{Go, lazyre.New(underGo + `(([^@]+)/@v/([^/]+)\.(?:info|mod|zip))$`), true, (*Service).fillModule},
	{Docker, lazyre.New(`^/(v2)/?$`), false, func(*Service, *target, []string, *http.Request) error { return pong }},
	{Docker, lazyre.New(image + `(manifests|blobs)/(sha[0-9]+:[0-9a-f]+))$`), true, (*Service).fillImage},
	{Docker, lazyre.New(image + `(manifests)/[A-Za-z0-9_][A-Za-z0-9._-]{0,127})$`), false, (*Service).fillImage},
	{Apt, lazyre.New(`^proxy(/(?:.*/)?by-hash/(SHA256|SHA512)/([0-9a-f]{64,128}))$`), true, (*Service).fillByHash},
	{Apt, lazyre.New(`^proxy(/(?:.*/)?pool/.+\.(?:deb|udeb|ddeb|dsc|tar\.[a-z0-9]+))$`), true, nil},
	{Apt, lazyre.New(`^proxy(/.*)$`), false, nil},
}

// target reads a request.
func (s *Service) target(r *http.Request) (*target, error) {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		return nil, bad(http.StatusMethodNotAllowed, "the registry cache only answers GET and HEAD")
	}
	for _, name := range []string{"Authorization", "Proxy-Authorization", "Cookie"} {
		if r.Header.Get(name) != "" {
			return nil, errCredentials
		}
	}
	if r.URL.User != nil {
		return nil, errCredentials
	}
	p := r.URL.Path
	if r.URL.IsAbs() {
		p = strings.ReplaceAll(p, "/./", "/") // apt asks so for repositories without suites
	}
	if p == "" || len(p) > 2048 || path.Clean(p) != strings.TrimSuffix(p, "/") && p != "/" || strings.ContainsFunc(p, func(c rune) bool { return c < ' ' || c == 0x7f || c == '\\' }) {
		return nil, errNoObject
	}
	mirror, err := s.mirror(r)
	if err != nil {
		return nil, err
	}
	if mirror != nil {
		p = "proxy" + p
	}
	for _, one := range rules {
		base := cmp.Or(mirror, s.upstreams[one.kind])
		m := one.path.FindStringSubmatch(p)
		if m == nil || base == nil {
			continue
		}
		t := &target{kind: one.kind, url: below(base, m[1])}
		if one.stored {
			t.key = t.url.String()
		}
		if one.fill != nil {
			err = one.fill(s, t, m, r)
		}
		return t, err
	}
	return nil, errNoObject
}

// below returns the URL of a path below a URL. It has a path that begins with a slash.
func below(base *url.URL, path string) *url.URL { return base.JoinPath("/").JoinPath(path) }

// mirror returns the mirror of a request that apt sends to a proxy: GET
// http://MIRROR/PATH. It is nil for other requests.
func (s *Service) mirror(r *http.Request) (*url.URL, error) {
	if !r.URL.IsAbs() {
		return nil, nil
	}
	if r.URL.Scheme != "http" || r.URL.RawQuery != "" {
		return nil, errNoObject
	}
	for _, m := range s.mirrors {
		if aptHost(m) == outside.HostPort(&url.URL{Scheme: "http", Host: r.URL.Host}) {
			return m, nil
		}
	}
	return nil, bad(http.StatusForbidden, "the registry cache is no proxy for "+strings.ToLower(r.URL.Hostname())+": it is no mirror of cache.apt")
}

func (s *Service) fillTarball(t *target, m []string, _ *http.Request) error {
	t.tarball = [2]string{m[2], m[3]}
	return nil
}

// fillNPM completes an index, which is passed on as it is: npm writes the URLs in it to
// package-lock.json.
func (s *Service) fillNPM(t *target, m []string, r *http.Request) error {
	t.url, t.accept = npmIndex(s.upstreams[NPM], m[1]), "application/json"
	if strings.Contains(r.Header.Get("Accept"), npmShort) {
		t.accept = npmShort
	}
	return nil
}

func npmIndex(base *url.URL, name string) *url.URL {
	u := *base
	u.Path, u.RawPath = base.Path+"/"+name, base.EscapedPath()+"/"+strings.ReplaceAll(name, "/", "%2F")
	return &u
}

// fillProject completes an index of Python, in which the files have URLs of the cache:
// files/DIGEST/HOST/PATH.
func (s *Service) fillProject(t *target, m []string, r *http.Request) error {
	t.url, t.accept = below(s.upstreams[PyPI], m[1]), "text/html"
	t.url.Path += "/"
	if strings.Contains(r.Header.Get("Accept"), pypiJSON) {
		t.accept = pypiJSON + ", text/html;q=0.1"
	}
	t.rewrite = func(body []byte, contentType string) ([]byte, string, error) {
		return s.rewriteIndex(t.url, body, contentType)
	}
	return nil
}

func (s *Service) fillFile(t *target, m []string, _ *http.Request) error {
	if !slices.Contains(s.pypiHosts(), m[3]) {
		return errNoObject
	}
	t.url, t.key = &url.URL{Scheme: s.upstreams[PyPI].Scheme, Host: m[3], Path: m[4]}, ""
	if d, ok := parseDigest(m[2]); ok && !strings.HasSuffix(m[4], ".metadata") { // whose digest is another one
		t.digest, t.key = d, d.String()
	}
	return nil
}

// fillModule completes a path of the protocol of Go proxies. The content of a version
// does not change; a branch or a prefix of a version names a commit that does.
func (s *Service) fillModule(t *target, m []string, _ *http.Request) error {
	if _, err := module.UnescapePath(m[2]); err != nil {
		return errNoObject
	}
	if t.key == "" {
		return nil
	}
	v, err := module.UnescapeVersion(m[3])
	if err != nil {
		return errNoObject
	}
	if c := semver.Canonical(v); c == "" || strings.TrimSuffix(v, "+incompatible") != c {
		t.key = ""
	}
	return nil
}

func (s *Service) fillImage(t *target, m []string, r *http.Request) error {
	if ns := r.URL.Query().Get("ns"); ns != "" && ns != "docker.io" {
		return bad(http.StatusNotFound, "the registry cache is a mirror of docker.io only")
	}
	t.repo = m[2]
	if m[3] == "manifests" {
		t.accept = manifests
	}
	if t.key == "" {
		return nil
	}
	var ok bool
	if t.digest, ok = parseDigest(m[4]); !ok {
		return errNoObject
	}
	t.key = "docker " + m[3] + " " + t.digest.String()
	return nil
}

func (s *Service) fillByHash(t *target, m []string, _ *http.Request) (err error) {
	var ok bool
	if t.digest, ok = parseDigest(strings.ToLower(m[2]) + ":" + m[3]); !ok {
		err = errNoObject
	}
	return err
}

// aptHost returns HOST:PORT under which guests ask for a mirror. A mirror that the
// cache asks over https is asked for over http.
func aptHost(m *url.URL) string {
	u := url.URL{Scheme: "http", Host: m.Host}
	if m.Scheme == "https" && m.Port() == "" {
		u.Host = m.Hostname()
	}
	return outside.HostPort(&u)
}

package regcache

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/lazyre"
)

// dockerAccept are the media types of manifests.
const dockerAccept = "application/vnd.oci.image.index.v1+json, application/vnd.docker.distribution.manifest.list.v2+json, " +
	"application/vnd.oci.image.manifest.v1+json, application/vnd.docker.distribution.manifest.v2+json"

var (
	dockerPath  = lazyre.New(`^/v2/((?:[a-z0-9]+(?:[._-]+[a-z0-9]+)*/){0,8}[a-z0-9]+(?:[._-]+[a-z0-9]+)*)/(manifests|blobs)/([A-Za-z0-9_][A-Za-z0-9._:-]{0,200})$`)
	dockerTag   = lazyre.New(`^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$`)
	dockerRealm = lazyre.New(`\brealm="([^"]*)"`)
	dockerName  = lazyre.New(`\bservice="([^"]*)"`)
)

// dockerTarget reads a path of the API of registries: the ping, for which it
// returns nil, /v2/NAME/manifests/REFERENCE and /v2/NAME/blobs/DIGEST.
func (s *Service) dockerTarget(r *http.Request) (*target, error) {
	base := s.cfg.Upstreams.Docker
	if base == nil {
		return nil, errNoObject
	}
	if strings.TrimSuffix(r.URL.Path, "/") == "/v2" {
		return nil, nil
	}
	if ns := r.URL.Query().Get("ns"); ns != "" && ns != "docker.io" {
		return nil, bad(http.StatusNotFound, "the registry cache is a mirror of docker.io only")
	}
	m := dockerPath.FindStringSubmatch(r.URL.Path)
	if m == nil {
		return nil, errNoObject
	}
	repo, what, ref := m[1], m[2], m[3]
	t := &target{kind: Docker, url: base.JoinPath("v2", repo, what, ref), repo: repo}
	d, isDigest := parseDigest(ref)
	switch {
	case isDigest:
		t.key, t.digest = "docker "+what+" "+d.String(), d
	case what == "manifests" && dockerTag.MatchString(ref):
		t.key, t.index = t.url.String(), true
	default:
		return nil, errNoObject
	}
	if what == "manifests" {
		t.accept, t.hash = dockerAccept, true
	}
	t.header = func(h http.Header, m meta) {
		h.Set("Docker-Distribution-Api-Version", "registry/2.0")
		switch {
		case isDigest:
			h.Set("Docker-Content-Digest", d.String())
		case m.Digest != "":
			h.Set("Docker-Content-Digest", m.Digest)
		}
	}
	return t, nil
}

// pong answers the ping of Docker.
func (w *stallWriter) pong() error {
	w.Header().Set("Docker-Distribution-Api-Version", "registry/2.0")
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusOK)
	_, err := io.WriteString(w, "{}")
	return err
}

// tokens are the tokens for anonymous downloads, by repository.
type tokens struct {
	mu    sync.Mutex
	known map[string]token
}

type token struct {
	text string
	ends time.Time
}

const (
	maxTokens     = 256
	maxTokenBody  = 64 << 10
	tokenLifetime = time.Minute // at least, according to the protocol
)

// dockerToken returns a token for anonymous downloads from a repository, which
// the server that a challenge names gives to anybody.
func (s *Service) dockerToken(ctx context.Context, g *guest, t *target, challenge string) (string, error) {
	auth := s.cfg.Upstreams.DockerAuth
	if auth == nil {
		return "", agentlab.Errorf(agentlab.CodeDenied, "the Docker registry wants a token, and cache.docker_auth is not set")
	}
	param := func(re *lazyre.Regexp) string {
		if m := re.FindStringSubmatch(challenge); m != nil {
			return m[1]
		}
		return ""
	}
	realm, err := url.Parse(param(dockerRealm))
	if err != nil || !strings.HasPrefix(strings.ToLower(challenge), "bearer ") || realm.Scheme != auth.Scheme || hostPort(realm) != hostPort(auth) {
		return "", agentlab.Errorf(agentlab.CodeDenied, "the Docker registry wants credentials from a server that is not cache.docker_auth")
	}
	srv, err := g.permit(ctx, hostPort(auth))
	if err != nil {
		return "", err
	}
	s.tokens.mu.Lock()
	have := s.tokens.known[t.scope+t.repo]
	s.tokens.mu.Unlock()
	if time.Now().Before(have.ends) {
		return have.text, nil
	}
	realm.RawQuery = url.Values{"service": {param(dockerName)}, "scope": {"repository:" + t.repo + ":pull"}}.Encode()
	got, err := s.askToken(ctx, srv, realm.String())
	if err != nil {
		return "", err
	}
	s.tokens.mu.Lock()
	defer s.tokens.mu.Unlock()
	if len(s.tokens.known) >= maxTokens {
		clear(s.tokens.known)
	}
	s.tokens.known[t.scope+t.repo] = got
	return got.text, nil
}

func (s *Service) askToken(ctx context.Context, srv server, at string) (token, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, at, nil)
	if err != nil {
		return token{}, err
	}
	resp, err := s.roundTrip(req, srv)
	if err != nil {
		return token{}, err
	}
	defer discard(resp)
	var answer struct {
		Token       string `json:"token"`
		AccessToken string `json:"access_token"`
		ExpiresIn   int    `json:"expires_in"`
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxTokenBody)).Decode(&answer); err != nil || resp.StatusCode != http.StatusOK {
		return token{}, fmt.Errorf("%s gives no token: status %d", req.URL.Host, resp.StatusCode)
	}
	if answer.Token == "" {
		answer.Token = answer.AccessToken
	}
	life := min(max(time.Duration(answer.ExpiresIn)*time.Second, tokenLifetime), 5*time.Minute)
	return token{answer.Token, time.Now().Add(life - 10*time.Second)}, nil
}

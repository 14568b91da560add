package regcache

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/guestplane/outside"
	"github.com/agentlab-vm/agentlab/internal/lazyre"
)

var (
	dockerRealm = lazyre.New(`\brealm="([^"]*)"`)
	dockerName  = lazyre.New(`\bservice="([^"]*)"`)
)

// token is a token for anonymous downloads from a repository. The cache gets it itself:
// with the token of a guest, layers that only this guest may read would be stored for
// others.
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
func (s *Service) dockerToken(ctx context.Context, g *outside.Guest, t *target, challenge string) (string, error) {
	auth := s.dockerAuth
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
	if err != nil || !strings.HasPrefix(strings.ToLower(challenge), "bearer ") || realm.Scheme != auth.Scheme || outside.HostPort(realm) != outside.HostPort(auth) {
		return "", agentlab.Errorf(agentlab.CodeDenied, "the Docker registry wants credentials from a server that is not cache.docker_auth")
	}
	srv, err := g.Permit(ctx, outside.HostPort(auth))
	if err != nil {
		return "", err
	}
	s.mu.Lock()
	have := s.tokens[t.scope+t.repo]
	s.mu.Unlock()
	if time.Now().Before(have.ends) {
		return have.text, nil
	}
	realm.RawQuery = url.Values{"service": {param(dockerName)}, "scope": {"repository:" + t.repo + ":pull"}}.Encode()
	got, err := askToken(ctx, srv, realm.String())
	if err != nil {
		return "", err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.tokens) >= maxTokens {
		clear(s.tokens)
	}
	s.tokens[t.scope+t.repo] = got
	return got.text, nil
}

func askToken(ctx context.Context, srv outside.Server, at string) (token, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, at, nil)
	if err != nil {
		return token{}, err
	}
	resp, err := srv.Do(req)
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

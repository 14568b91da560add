package regcache

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/guestplane/outside"
)

const (
	maxRedirects = 5
	maxErrorBody = 16 << 10 // how much of an error answer of an upstream is passed on
)

// scope is the scope of the files of a server.
func scope(srv outside.Server) string {
	if srv.Private {
		return scopePrivate
	}
	return ""
}

// permitVia checks that the policy of a guest allows all servers that an object came
// from.
func permitVia(ctx context.Context, g *outside.Guest, t *target, via []string) error {
	for _, step := range via {
		at, private := strings.CutPrefix(step, scopePrivate)
		if step == t.scope+outside.HostPort(t.url) {
			continue // it was checked
		}
		srv, err := g.Permit(ctx, at)
		if err == nil && private && !srv.Private {
			err = &egress.DeniedError{Rule: egress.RuleRebinding}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// fetch sends a request to the upstream, and follows redirects to servers that the
// policy of the guest allows. It returns an answer with the content, or that it has not
// changed since, and the servers that were asked; other answers are an *answer.
func (s *Service) fetch(ctx context.Context, g *outside.Guest, t *target, method string, header http.Header) (*http.Response, []string, error) {
	u, via, bearer := t.url, []string{}, ""
	header.Set("User-Agent", "agentlab-registry-cache")
	if t.accept != "" {
		header.Set("Accept", t.accept)
	}
	for range maxRedirects + 1 {
		at := outside.HostPort(u)
		srv, err := g.Permit(ctx, at)
		if err != nil {
			return nil, nil, err
		}
		if step := scope(srv) + at; !slices.Contains(via, step) {
			via = append(via, step)
		}
		req := (&http.Request{Method: method, URL: u, Header: header.Clone()}).WithContext(ctx)
		if bearer != "" && at == outside.HostPort(t.url) {
			req.Header.Set("Authorization", "Bearer "+bearer)
		}
		resp, err := srv.Do(req)
		if err != nil {
			return nil, nil, fmt.Errorf("%s: %w", u.Host, err)
		}
		switch status := resp.StatusCode; {
		case status == http.StatusOK, status == http.StatusNotModified && (header.Get("If-None-Match") != "" || header.Get("If-Modified-Since") != ""):
			return resp, via, nil
		case status == http.StatusUnauthorized && t.repo != "" && bearer == "":
			discard(resp)
			if bearer, err = s.dockerToken(ctx, g, t, resp.Header.Get("Www-Authenticate")); err != nil {
				return nil, nil, err
			}
		case slices.Contains([]int{http.StatusMovedPermanently, http.StatusFound, http.StatusSeeOther, http.StatusTemporaryRedirect, http.StatusPermanentRedirect}, status):
			discard(resp)
			if u, err = redirect(u, resp.Header.Get("Location")); err != nil {
				return nil, nil, err
			}
		default:
			return nil, nil, refused(resp)
		}
	}
	return nil, nil, errors.New("the upstream redirects too often")
}

// redirect returns the target of a redirect. It never leads from https to http.
func redirect(from *url.URL, location string) (*url.URL, error) {
	to, err := from.Parse(location)
	if err != nil || location == "" {
		return nil, errors.New("the upstream redirects to an invalid URL")
	}
	if to.Scheme != "https" && (to.Scheme != "http" || from.Scheme != "http") || to.User != nil || to.Hostname() == "" {
		return nil, fmt.Errorf("the upstream redirects to %s://%s, which is not followed", to.Scheme, to.Host)
	}
	to.Fragment = ""
	return to, nil
}

func discard(resp *http.Response) {
	_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, maxErrorBody))
	_ = resp.Body.Close()
}

// refused returns the answer of an upstream that does not have the content.
func refused(resp *http.Response) error {
	defer func() { _ = resp.Body.Close() }()
	body, _ := io.ReadAll(io.LimitReader(resp.Body, maxErrorBody))
	status, contentType := resp.StatusCode, resp.Header.Get("Content-Type")
	if status < 400 || status == http.StatusUnauthorized || status == http.StatusProxyAuthRequired {
		status, contentType = http.StatusForbidden, "" // the cache has no credentials, and the guest's are not accepted
	}
	if contentType == "" {
		return text(status, ResultError, fmt.Sprintf("the upstream answers %d", resp.StatusCode))
	}
	return &answer{status, ResultError, contentType, string(body)}
}

func metaOf(t *target, resp *http.Response, via []string) meta {
	m := meta{URL: agentlab.OneLine(t.url.String(), 2048), Via: via, ETag: resp.Header.Get("Etag"), ContentType: resp.Header.Get("Content-Type")}
	if at, err := http.ParseTime(resp.Header.Get("Last-Modified")); err == nil {
		m.Modified = at
	}
	return m
}

package regcache

import (
	"context"
	"crypto/sha256"
	"crypto/sha512"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
)

// target is an object that a guest may ask for.
type target struct {
	kind   Kind
	key    string   // of the object in the store, without the scope
	scope  string   // of the key: "" or scopePrivate
	url    *url.URL // of the object at its upstream
	accept string   // header of the request; "" means any
	index  bool     // it changes: the upstream is asked again after Limits.Fresh
	digest digest   // of the content, if it is known
	repo   string   // of Docker: the repository, for the token
	hash   bool     // meta.Digest is wanted

	expect  func(scope string) digest                                     // digest for an object whose digest is known from an index; nil: none
	rewrite func(body []byte, contentType string) ([]byte, string, error) // of an index; nil: none
	header  func(h http.Header, m meta)                                   // further headers of the answer; nil: none
}

// scopePrivate is the scope of what came from private addresses. A name can also have
// public ones, and most guests may reach only these.
const scopePrivate = "private "

// name is the key with the scope.
func (t *target) name() string { return t.scope + t.key }

// whole reports whether an object must be in memory to be served.
func (t *target) whole() bool { return t.rewrite != nil || t.hash }

// digest is the expected digest of a content. The zero digest expects nothing.
type digest struct{ algorithm, hex string }

// parseDigest reads ALGORITHM:HEX.
func parseDigest(text string) (digest, bool) {
	algorithm, sum, _ := strings.Cut(text, ":")
	d := digest{algorithm, sum}
	raw, err := hex.DecodeString(sum)
	ok := err == nil && strings.ToLower(sum) == sum && (algorithm == "sha256" && len(raw) == sha256.Size || algorithm == "sha512" && len(raw) == sha512.Size)
	return d, ok
}

// String returns ALGORITHM:HEX.
func (d digest) String() string { return d.algorithm + ":" + d.hex }

func (d digest) hash() hash.Hash {
	if d.algorithm == "sha512" {
		return sha512.New()
	}
	return sha256.New()
}

func (d digest) verify(sum hash.Hash) error {
	if got := hex.EncodeToString(sum.Sum(nil)); d.hex != "" && got != d.hex {
		return fmt.Errorf("the digest of the content is %s, not %s: it is not used", got, d.hex)
	}
	return nil
}

// approvalKey is the key of the server in the context of a request.
type approvalKey struct{}

// roundTrip sends a request to a server that a policy allows. Connections to private
// addresses are not used for other guests.
func (s *Service) roundTrip(req *http.Request, srv server) (*http.Response, error) {
	tr := s.public
	if srv.private {
		tr = s.private
	}
	return tr.RoundTrip(req.WithContext(context.WithValue(req.Context(), approvalKey{}, srv)))
}

// transport returns a transport that connects only to the server that the context
// of a request has. It ignores proxies in the environment: they would resolve names
// themselves.
func (s *Service) transport() *http.Transport {
	roots, err := x509.SystemCertPool()
	if err != nil {
		roots = x509.NewCertPool()
	}
	for _, pem := range s.cfg.Certificates {
		roots.AppendCertsFromPEM([]byte(pem))
	}
	return &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			srv, ok := ctx.Value(approvalKey{}).(server)
			err := error(agentlab.Errorf(agentlab.CodeInternal, "a connection without a decision"))
			if !ok {
				return nil, err
			}
			for _, to := range srv.addrs {
				var conn net.Conn
				if conn, err = s.cfg.Outside.Dial(ctx, to, srv.private); err == nil || ctx.Err() != nil {
					return conn, err
				}
			}
			return nil, err
		},
		TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots}, ForceAttemptHTTP2: true, MaxIdleConnsPerHost: 8, IdleConnTimeout: time.Minute,
		TLSHandshakeTimeout: 20 * time.Second, ResponseHeaderTimeout: s.cfg.Limits.Stall, MaxResponseHeaderBytes: 64 << 10,
	}
}

// hostPort returns HOST:PORT of a URL.
func hostPort(u *url.URL) string {
	port := u.Port()
	if port == "" {
		port = "443"
		if u.Scheme == "http" {
			port = "80"
		}
	}
	return net.JoinHostPort(strings.ToLower(u.Hostname()), port)
}

const maxRedirects = 5

// fetch sends a request to the upstream, and follows redirects to servers that the
// policy of the guest allows. It returns the answer and the servers that were asked.
func (s *Service) fetch(ctx context.Context, g *guest, t *target, old *object) (*http.Response, []string, error) {
	u, via := t.url, []string{}
	bearer := ""
	for range maxRedirects + 1 {
		at := hostPort(u)
		srv, err := g.permit(ctx, at)
		if err != nil {
			return nil, nil, err
		}
		if step := srv.scope() + at; !slices.Contains(via, step) {
			via = append(via, step)
		}
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
		if err != nil {
			return nil, nil, err
		}
		s.describe(req, t, old)
		if bearer != "" && at == hostPort(t.url) {
			req.Header.Set("Authorization", "Bearer "+bearer)
		}
		resp, err := s.roundTrip(req, srv)
		if err != nil {
			return nil, nil, fmt.Errorf("%s: %w", u.Host, err)
		}
		switch resp.StatusCode {
		case http.StatusUnauthorized:
			if t.repo == "" || bearer != "" {
				return resp, via, nil
			}
			discard(resp)
			if bearer, err = s.dockerToken(ctx, g, t, resp.Header.Get("Www-Authenticate")); err != nil {
				return nil, nil, err
			}
		case http.StatusMovedPermanently, http.StatusFound, http.StatusSeeOther, http.StatusTemporaryRedirect, http.StatusPermanentRedirect:
			discard(resp)
			if u, err = redirect(u, resp.Header.Get("Location")); err != nil {
				return nil, nil, err
			}
		default:
			return resp, via, nil
		}
	}
	return nil, nil, errors.New("the upstream redirects too often")
}

func (s *Service) describe(req *http.Request, t *target, old *object) {
	req.Header.Set("User-Agent", "agentlab-registry-cache")
	if t.accept != "" {
		req.Header.Set("Accept", t.accept)
	}
	if !t.index {
		req.Header.Set("Accept-Encoding", "identity") // the digest is that of the file as it is
	}
	if old != nil && old.meta.ETag != "" {
		req.Header.Set("If-None-Match", old.meta.ETag)
	} else if old != nil && !old.meta.Modified.IsZero() {
		req.Header.Set("If-Modified-Since", old.meta.Modified.UTC().Format(http.TimeFormat))
	}
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

// maxErrorBody is how much of an error answer of an upstream is passed on.
const maxErrorBody = 16 << 10

// fly joins the download of an object from the same URL, or starts one for a guest: with
// share if there is none, and otherwise one that no other guest joins. The caller must
// leave it.
func (s *Service) fly(g *guest, t *target, share bool) (f *flight, joined bool) {
	full := string(t.kind) + "/" + t.name() + " " + t.url.String()
	s.mu.Lock()
	defer s.mu.Unlock()
	if f = s.flights[full]; share && f != nil && f.join() {
		return f, true
	}
	ctx, cancel := context.WithCancel(context.Background())
	f = newFlight(cancel)
	f.join()
	if share {
		s.flights[full] = f
	}
	go func() {
		defer f.over()
		defer cancel()
		s.download(ctx, g, t, f)
		s.mu.Lock()
		if s.flights[full] == f {
			delete(s.flights, full)
		}
		s.mu.Unlock()
	}()
	return f, false
}

// download performs a flight.
func (s *Service) download(ctx context.Context, g *guest, t *target, f *flight) {
	select {
	case s.slots <- struct{}{}:
		defer func() { <-s.slots }()
	case <-ctx.Done():
		f.fail(ctx.Err())
		return
	}
	var old *object
	if t.index {
		if old = s.store.open(t.kind, t.name()); old != nil {
			defer old.close()
			if g.permitVia(ctx, t, old.meta.Via) != nil {
				old = nil // this guest must not get it
			}
		}
	}
	resp, via, err := s.fetch(ctx, g, t, old)
	if err != nil {
		f.fail(err)
		return
	}
	body := s.timed(f, resp.Body)
	defer body.close()
	switch {
	case resp.StatusCode == http.StatusNotModified && old != nil:
		s.store.touch(t.kind, t.name())
		f.begin(resp, old.meta)
	case resp.StatusCode == http.StatusOK && t.whole():
		s.receiveWhole(t, f, resp, via, body)
	case resp.StatusCode == http.StatusOK:
		s.receive(ctx, t, f, resp, via, body)
	default:
		f.body, _ = io.ReadAll(io.LimitReader(body, maxErrorBody))
		f.begin(resp, meta{Via: via, ContentType: resp.Header.Get("Content-Type")})
	}
}

func metaOf(t *target, resp *http.Response, via []string) meta {
	m := meta{URL: agentlab.OneLine(t.url.String(), 2048), Via: via, ETag: resp.Header.Get("Etag"), ContentType: resp.Header.Get("Content-Type")}
	if at, err := http.ParseTime(resp.Header.Get("Last-Modified")); err == nil {
		m.Modified = at
	}
	return m
}

// receiveWhole reads the content of an answer to memory, and stores it if possible.
func (s *Service) receiveWhole(t *target, f *flight, resp *http.Response, via []string, body io.Reader) {
	content, err := io.ReadAll(io.LimitReader(body, s.cfg.Limits.Whole+1))
	s.cfg.Metrics.CacheBytes(true, int64(len(content)))
	sum := t.digest.hash()
	_, _ = sum.Write(content)
	switch {
	case err != nil:
	case int64(len(content)) > s.cfg.Limits.Whole:
		err = fmt.Errorf("the index has more than %d bytes", s.cfg.Limits.Whole)
	default:
		err = t.digest.verify(sum)
	}
	if err != nil {
		f.fail(err)
		return
	}
	m := metaOf(t, resp, via)
	if s.store.space.Keep() == nil {
		d, err := s.store.create(m)
		if err == nil {
			d.size = int64(len(content))
			if _, err = d.file.WriteAt(content, d.off); err != nil {
				d.drop()
			} else {
				err = d.keep(t.kind, t.name())
			}
			_ = d.file.Close()
		}
		if err != nil {
			s.log.Warn("an object of the registry cache is not stored", "err", err)
		}
	}
	f.body = content
	f.begin(resp, m)
}

// receive stores the content of an answer.
func (s *Service) receive(ctx context.Context, t *target, f *flight, resp *http.Response, via []string, body io.Reader) {
	m := metaOf(t, resp, via)
	want, most := t.digest, s.cfg.Limits.Object
	if t.expect != nil {
		want = t.expect(t.scope)
	}
	if t.index {
		most = s.cfg.Limits.Index
	}
	if s.store.space.Keep() == nil && resp.ContentLength <= most {
		d, err := s.store.create(m)
		if err != nil {
			s.log.Warn("an object of the registry cache is not stored", "err", err)
		}
		f.draft = d
	}
	f.begin(resp, m)
	err := f.receive(ctx, body, want, most, func(n int64) { s.cfg.Metrics.CacheBytes(true, n) })
	f.finish(t, err)
	if err != nil && !errors.Is(err, errTaken) && ctx.Err() == nil {
		s.log.Warn("a download of the registry cache failed", "kind", t.kind, "url", m.URL, "err", err)
	}
}

// finish keeps what was received, or deletes it, and ends the readers.
func (f *flight) finish(t *target, err error) {
	if f.draft != nil {
		f.draft.size = f.written
		if err != nil {
			f.draft.drop()
		} else if kerr := f.draft.keep(t.kind, t.name()); kerr != nil {
			err = nil // the readers have it, and the next request downloads it again
		}
	}
	f.update(func() { f.done, f.err = err == nil, err })
}

// timedBody cancels a flight when its upstream sends nothing for too long.
type timedBody struct {
	io.ReadCloser
	timer *time.Timer
	stall time.Duration
}

func (s *Service) timed(f *flight, body io.ReadCloser) *timedBody {
	stall := s.cfg.Limits.Stall
	return &timedBody{body, time.AfterFunc(stall, f.cancel), stall}
}

// Read implements io.Reader.
func (b *timedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.timer.Reset(b.stall)
	return n, err
}

func (b *timedBody) close() {
	b.timer.Stop()
	_ = b.Close()
}

// asDenied returns the denial in an error.
func asDenied(err error) (*egress.DeniedError, bool) { return errors.AsType[*egress.DeniedError](err) }

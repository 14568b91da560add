package devproxy

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
)

const (
	// maxGuestHeader is the maximum size of the header of a guest's response.
	maxGuestHeader = 256 << 10
	// maxGuestConns is the maximum number of connections to one port of a guest.
	maxGuestConns = 256
	maxGuestIdle  = 16
	guestIdle     = 30 * time.Second
	dialTimeout   = 10 * time.Second
	copyBuffer    = 32 << 10
)

// transports forward requests with the protocol of the client.
type transports struct{ http1, http2 *http.Transport }

// RoundTrip implements http.RoundTripper.
func (t transports) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.ProtoMajor == 2 {
		return t.http2.RoundTrip(r)
	}
	return t.http1.RoundTrip(r)
}

func (t transports) close() {
	t.http1.CloseIdleConnections()
	t.http2.CloseIdleConnections()
}

func (s *Service) newProxy() {
	for _, v := range []struct {
		t *(*http.Transport)
		p func(*http.Protocols)
	}{
		{&s.plain.http1, func(p *http.Protocols) { p.SetHTTP1(true) }},
		{&s.plain.http2, func(p *http.Protocols) { p.SetUnencryptedHTTP2(true) }},
	} {
		protocols := new(http.Protocols)
		v.p(protocols)
		*v.t = &http.Transport{
			DialContext: s.dial, Protocols: protocols, DisableCompression: true,
			MaxIdleConnsPerHost: maxGuestIdle, MaxConnsPerHost: maxGuestConns, IdleConnTimeout: guestIdle,
			MaxResponseHeaderBytes: maxGuestHeader, ExpectContinueTimeout: time.Second,
		}
	}
	s.proxy = &httputil.ReverseProxy{
		Transport: s.plain, Rewrite: rewrite, ModifyResponse: modify, ErrorHandler: failed, BufferPool: &buffers{},
		ErrorLog: slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}
}

// buffers is an httputil.BufferPool.
type buffers struct{ pool sync.Pool }

// Get implements httputil.BufferPool.
func (b *buffers) Get() []byte {
	if p, ok := b.pool.Get().(*[]byte); ok {
		return *p
	}
	return make([]byte, copyBuffer)
}

// Put implements httputil.BufferPool.
func (b *buffers) Put(p []byte) { b.pool.Put(&p) }

func targetOf(r *http.Request) target {
	t, _ := r.Context().Value(targetKey{}).(target) // serve has set it
	return t
}

// address is the host in the URL of a forwarded request. Connections are reused for the
// same address, so it names one port of one sandbox for all times.
func (t target) address() string {
	how := "n"
	if t.listener.Local {
		how = "l"
	}
	return t.project.sandbox.UID + "." + strconv.Itoa(t.project.sandbox.VMID) + "." + how + ":" + strconv.Itoa(int(t.listener.Port))
}

// dial opens a connection to an address of target.address.
func (s *Service) dial(ctx context.Context, _, address string) (net.Conn, error) {
	host, text, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	uid, rest, _ := strings.Cut(host, ".")
	number, how, _ := strings.Cut(rest, ".")
	port, perr := strconv.ParseUint(text, 10, 16)
	vmid, verr := strconv.Atoi(number)
	if perr != nil || verr != nil {
		return nil, agentlab.Errorf(agentlab.CodeInternal, "%q is not an address of a guest", address)
	}
	s.mu.Lock()
	w := s.watchers[uid]
	s.mu.Unlock()
	if w == nil || w.vmid != vmid { // the number may be that of another sandbox now
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "the sandbox does not run")
	}
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	if how == "l" {
		return s.cfg.Sandboxes.DialLocal(ctx, vmid, uint16(port))
	}
	return s.cfg.Sandboxes.DialGuest(ctx, vmid, uint16(port))
}

// rewrite makes the request for the guest. Its Host is that of the client, because
// servers for development accept all names below localhost and compare it with Origin;
// names below DNSDomain become such.
func rewrite(pr *httputil.ProxyRequest) {
	t := targetOf(pr.In)
	pr.Out.URL.Scheme, pr.Out.URL.Host = "http", t.address()
	pr.Out.URL.RawQuery = pr.In.URL.RawQuery // unchanged, also if it is not a list of values
	pr.Out.Host = t.host
	if t.local == "" {
		return
	}
	for _, key := range []string{"Origin", "Referer"} {
		if v := pr.Out.Header.Get(key); v != "" {
			pr.Out.Header.Set(key, moveHost(v, t.local, t.host))
		}
	}
}

// moveHost returns a URL with another host, if it has this one.
func moveHost(raw, from, to string) string {
	u, err := url.Parse(raw)
	if err != nil || !strings.EqualFold(u.Host, from) {
		return raw
	}
	u.Host = to
	return u.String()
}

// modify changes a response of a guest.
func modify(resp *http.Response) error {
	t := targetOf(resp.Request)
	resp.Header.Del("Alt-Svc") // another port of this machine is not the guest's to name
	if cookies := resp.Header["Set-Cookie"]; len(cookies) > 0 {
		for i, c := range cookies {
			cookies[i] = confineCookie(c, t.project.label)
		}
	}
	if t.local == "" {
		return nil
	}
	for _, key := range []string{"Location", "Access-Control-Allow-Origin"} {
		if v := resp.Header.Get(key); v != "" {
			resp.Header.Set(key, moveHost(v, t.host, t.local))
		}
	}
	return nil
}

// confineCookie removes the attribute Domain of a cookie that names more than the
// project: other sandboxes would receive the cookie, or get one that is not theirs.
func confineCookie(cookie, label string) string {
	parts := strings.Split(cookie, ";")
	out := parts[:1]
	for _, part := range parts[1:] {
		name, value, _ := strings.Cut(part, "=")
		if strings.EqualFold(strings.TrimSpace(name), "domain") {
			domain := strings.TrimPrefix(strings.TrimSpace(value), ".")
			if _, l, _, ok := parseHost(domain, true); !ok || l != label {
				continue
			}
		}
		out = append(out, part)
	}
	return strings.Join(out, ";")
}

// failed answers a request that the guest did not answer.
func failed(w http.ResponseWriter, r *http.Request, err error) {
	t := targetOf(r)
	text := "The process on port " + strconv.Itoa(int(t.listener.Port)) + " of sandbox " + t.project.sandbox.Name + " did not answer: "
	(&page{Status: http.StatusBadGateway, Title: "No answer", Text: text + agentlab.OneLine(err.Error(), 200)}).write(w, r)
}

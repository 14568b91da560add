package devproxy

import (
	"context"
	"html/template"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
)

const (
	headerTimeout  = 10 * time.Second
	idleTimeout    = 2 * time.Minute
	maxHeaderBytes = 128 << 10
)

type frontKey struct{}

// newServer makes the server of all ports of this machine. Its requests end with ctx.
func (s *Service) newServer(ctx context.Context) {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true)
	s.http = &http.Server{
		Handler: http.HandlerFunc(s.serve), Protocols: protocols,
		ReadHeaderTimeout: headerTimeout, IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeaderBytes,
		ErrorLog: slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
		BaseContext: func(l net.Listener) context.Context {
			if f, ok := l.(*frontListener); ok {
				return context.WithValue(ctx, frontKey{}, f.front)
			}
			return ctx
		},
	}
}

// target is where a request goes.
type target struct {
	project  *project
	listener guestapi.Listener
	host     string // name and port of this machine, below localhostDomain
	local    string // the Host that the client sent, if it is below DNSDomain
}

type targetKey struct{}

// serve answers or forwards one request.
func (s *Service) serve(w http.ResponseWriter, r *http.Request) {
	f, ok := r.Context().Value(frontKey{}).(*front)
	if !ok || r.Method == http.MethodConnect {
		http.Error(w, "not supported", http.StatusMethodNotAllowed)
		return
	}
	t, refused := s.route(f, r.Host)
	if refused == nil && t.local != "" && s.unjudged(r, t.project) {
		if (r.Method == http.MethodGet || r.Method == http.MethodHead) && r.Header.Get("Upgrade") == "" {
			w.Header().Set("Cache-Control", "no-store")
			to := url.URL{Scheme: "http", Host: t.host, Path: r.URL.Path, RawPath: r.URL.RawPath, RawQuery: r.URL.RawQuery}
			http.Redirect(w, r, to.String(), http.StatusTemporaryRedirect)
			return
		}
		refused = &page{
			Status: http.StatusForbidden, Title: "Request without an origin",
			Text: "Browsers do not say which page sends this request to a name below " + DNSDomain + ". Use http://" + t.host + "/ instead.",
		}
	}
	if refused == nil && s.foreign(r, t.project) {
		refused = &page{Status: http.StatusForbidden, Title: "Request from another sandbox", Text: "A page of one sandbox must not send requests to another sandbox."}
	}
	if refused != nil {
		refused.write(w, r)
		return
	}
	if !strings.EqualFold(r.Header.Get("Upgrade"), "websocket") {
		r.Header.Del("Upgrade") // a tunnel of another protocol would have requests that are not checked
	}
	s.proxy.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), targetKey{}, t)))
}

// route returns the target of a request with this Host header. The name is the only
// protection against a page of the Web whose name resolves to this machine, so that
// nothing is said to any other name.
func (s *Service) route(f *front, hostport string) (target, *page) {
	host, port, err := net.SplitHostPort(hostport)
	if err != nil {
		host, port = hostport, "80"
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	branch, label, local, ok := parseHost(host, s.dnsPort != 0)
	if !ok || port != strconv.Itoa(int(f.host)) {
		return target{}, &page{
			Status: http.StatusMisdirectedRequest, Title: "Not a name of a sandbox",
			Text: "This port belongs to AgentLab. Its names are PROJECT." + localhostDomain + ":" + strconv.Itoa(int(f.host)) + ".",
			Hint: "agentlab port list",
		}
	}
	p := s.byLabel[label]
	if p == nil {
		return target{}, &page{
			Status: http.StatusNotFound, Title: "No such sandbox", Text: "No session and no sandbox has the name " + label + ".",
			Hint: "agentlab sandbox list",
		}
	}
	if !p.live() {
		return target{}, notRunning(p)
	}
	listeners := s.listenersOf(p)
	at := slices.IndexFunc(listeners, func(l guestapi.Listener) bool { return l.Port == f.guest && branchLabel(l.Worktree) == branch })
	if at < 0 {
		return target{}, s.nothingListens(p, f.guest, listeners)
	}
	t := target{project: p, listener: listeners[at], host: net.JoinHostPort(joinHost(branch, label), port)}
	if local {
		t.local = hostport
	}
	return t, nil
}

// unjudged reports whether a request to a name below DNSDomain can be that of a page of any
// sandbox, in the name of the user: browsers send Sec-Fetch headers only to https and to
// names below localhost. Such a request has cookies or credentials, or opens a page, whose
// cookies would come next: it gets the name below localhost. A page can neither set the
// User-Agent or the Referer of a request without Origin.
func (s *Service) unjudged(r *http.Request, p *project) bool {
	if origin := r.Header.Get("Origin"); r.Header.Get("Sec-Fetch-Site") != "" || origin != "" && origin != "null" {
		return false
	}
	if from, known := s.projectOf(r.Header.Get("Referer")); known && from == p.label {
		return false
	}
	return r.Header.Get("Cookie") != "" || r.Header.Get("Authorization") != "" || strings.HasPrefix(r.UserAgent(), "Mozilla/")
}

// foreign reports whether a page of another sandbox sends a request in the name of the
// user. To a browser all names below localhostDomain are one site, so that its own protection,
// and cookies with SameSite, do not separate them. Other sites are those servers'
// business as without AgentLab. A browser without Sec-Fetch headers says it by the Referer,
// unless the page prevents it.
func (s *Service) foreign(r *http.Request, p *project) bool {
	if r.Header.Get("Sec-Fetch-Mode") == "navigate" && (r.Method == http.MethodGet || r.Method == http.MethodHead) {
		return false
	}
	from, known := s.projectOf(r.Header.Get("Origin"))
	if !known {
		site := r.Header.Get("Sec-Fetch-Site")
		if site != "" && site != "same-site" {
			return false
		}
		if from, known = s.projectOf(r.Header.Get("Referer")); !known {
			return site != ""
		}
	}
	return from != p.label
}

// projectOf returns the project in the URL of one of its pages.
func (s *Service) projectOf(page string) (label string, ok bool) {
	u, err := url.Parse(page)
	if err != nil || u.Host == "" {
		return "", false
	}
	_, label, _, ok = parseHost(u.Hostname(), true)
	return label, ok
}

// page is an answer of the proxy itself.
type page struct {
	Status            int
	Title, Text, Hint string
	Links             []string
}

var pageHTML = template.Must(template.New("page").Parse(`<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{.Title}}</title>
<style>body{font:16px/1.5 system-ui,sans-serif;max-width:40em;margin:4em auto;padding:0 1em}code{background:#8883;padding:.2em .4em}</style></head>
<body><h1>{{.Title}}</h1><p>{{.Text}}</p>{{with .Hint}}<p><code>{{.}}</code></p>{{end}}{{with .Links}}<ul>{{range .}}<li><a href="{{.}}">{{.}}</a></li>{{end}}</ul>{{end}}</body></html>
`))

func (p *page) write(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'")
	if strings.Contains(r.Header.Get("Accept"), "text/html") {
		h.Set("Content-Type", "text/html; charset=utf-8")
		w.WriteHeader(p.Status)
		_ = pageHTML.Execute(w, p)
		return
	}
	lines := append([]string{p.Title + ": " + p.Text}, p.Links...)
	if p.Hint != "" {
		lines = append(lines, "→ "+p.Hint)
	}
	h.Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(p.Status)
	_, _ = w.Write([]byte(strings.Join(lines, "\n") + "\n")) //nolint:gosec // plain text, with nosniff
}

// notRunning is the page of a project whose guest cannot be reached.
func notRunning(p *project) *page {
	out := &page{Status: http.StatusServiceUnavailable, Title: "Sandbox not running"}
	switch {
	case !p.exists:
		out.Text = "Session " + p.session + " has no sandbox."
	case p.sandbox.Desired != agentlab.DesiredRunning && p.sandbox.State.HasVM() && p.sandbox.State != agentlab.SandboxSuspended:
		out.Text = "Sandbox " + p.sandbox.Name + " is being stopped."
	default:
		out.Text = "Sandbox " + p.sandbox.Name + " is " + string(p.sandbox.State) + "."
	}
	switch {
	case p.session != "":
		out.Text += " Run 'agentlab start' in its repository, or anywhere:"
		out.Hint = "agentlab session resume " + p.session
	case p.sandbox.State.HasVM():
		out.Hint = "agentlab sandbox show " + p.sandbox.Name
	default:
		out.Hint = "agentlab sandbox start " + p.sandbox.Name
	}
	if p.session == "" && p.sandbox.Desired.Suspended() {
		out.Hint = "agentlab sandbox resume " + p.sandbox.Name
	}
	return out
}

// nothingListens is the page of a running guest without such a listener. s.mu is locked.
func (s *Service) nothingListens(p *project, port uint16, listeners []guestapi.Listener) *page {
	out := &page{
		Status: http.StatusNotFound, Title: "Nothing listens here",
		Text: "No process with this name listens on port " + strconv.Itoa(int(port)) + " of sandbox " + p.sandbox.Name + ".",
	}
	for _, l := range listeners {
		if u := s.urlOf(p, l); u != "" {
			out.Links = append(out.Links, u)
		}
	}
	return out
}

// urlOf returns the address of a listener, "" if it is not served. s.mu is locked.
func (s *Service) urlOf(p *project, l guestapi.Listener) string {
	f := s.fronts[l.Port]
	if f == nil || f.host == 0 {
		return ""
	}
	return "http://" + net.JoinHostPort(p.hostOf(l), strconv.Itoa(int(f.host))) + "/"
}

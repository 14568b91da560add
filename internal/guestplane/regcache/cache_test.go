package regcache_test

import (
	"context"
	"crypto/sha512"
	"encoding/base64"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/config"
	"github.com/agentlab-vm/agentlab/internal/egress/gate"
	"github.com/agentlab-vm/agentlab/internal/guestplane/outside"
	"github.com/agentlab-vm/agentlab/internal/guestplane/regcache"
	"github.com/agentlab-vm/agentlab/test/fakenet"
	"github.com/agentlab-vm/agentlab/test/guard"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// The sandboxes of a world, by their policies.
const (
	open   = 1001 // nat
	second = 1002 // nat
	listed = 1003 // only the registry itself, by an allowlist
	closed = 1004 // off
	outed  = 1005 // nat, with a profile that does not use the cache
)

// world is a cache with sandboxes and a fake internet.
type world struct {
	testing.TB
	net   *fakenet.Net
	ca    *fakenet.CA
	cfg   regcache.Config
	out   outside.Config
	cache *regcache.Service
	base  map[int]string // URLs of the cache, by sandbox

	mu      sync.Mutex
	rows    map[int]agentlab.Sandbox
	records []agentlab.EgressRecord
	results map[string]int
	asked   map[string]int // requests at upstreams, by "HOST PATH"
	read    func(vmid int) // is called after the row of a sandbox was read; nil: nothing
}

func newWorld(t testing.TB, change ...func(*regcache.Config)) *world {
	t.Helper()
	w := &world{TB: t, net: fakenet.New(), results: map[string]int{}, asked: map[string]int{}, base: map[int]string{}}
	t.Cleanup(w.net.Close)
	var err error
	if w.ca, err = fakenet.NewCA(); err != nil {
		t.Fatal(err)
	}
	nat := agentlab.Network{Mode: agentlab.NetworkNAT}
	w.rows = map[int]agentlab.Sandbox{
		open:   {Network: nat, Profile: "default"},
		second: {Network: nat, Profile: "default"},
		listed: {Network: agentlab.Network{Mode: agentlab.NetworkAllowlist, Allow: []agentlab.NetworkRule{{Rule: "registry.test"}}}, Profile: "default"},
		closed: {Network: agentlab.Network{Mode: agentlab.NetworkOff}, Profile: "default"},
		outed:  {Network: nat, Profile: "no-cache"},
	}
	for vmid, sb := range w.rows {
		sb.VMID, sb.UID = vmid, fmt.Sprint("uid-", vmid)
		w.rows[vmid] = sb
	}
	w.cfg = regcache.Config{
		MaxBytes: 64 << 20, Base: "http://10.77.0.1:8844",
		Cache: config.Cache{
			Dir: t.TempDir(), NPM: "https://registry.test", PyPI: "https://registry.test/simple", PyPIFiles: []string{"files.test"},
			Go: "https://registry.test/go", Apt: []string{"http://mirror.test"}, Docker: "https://registry.test", DockerAuth: "https://auth.test",
		},
		Profiles: w, Metrics: w,
	}
	w.out = outside.Config{Network: gate.OutsideThrough(w.net), Sandboxes: w, Audit: w, Certificates: []string{string(w.ca.PEM())}}
	for _, fn := range change {
		fn(&w.cfg)
	}
	w.out.Stall = w.cfg.Limits.Stall
	w.cfg.Outside = outside.New(w.out)
	t.Cleanup(func() { _ = w.cfg.Outside.Close() })
	w.start()
	t.Cleanup(func() { _ = w.cache.Close() })
	for vmid := range w.rows {
		srv := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			if !w.cache.Wants(r) {
				http.Error(rw, "not for the cache", http.StatusTeapot)
				return
			}
			w.cache.Serve(vmid, rw, r)
		}))
		t.Cleanup(srv.Close)
		w.base[vmid] = srv.URL
	}
	return w
}

// start opens the cache, as a new process does.
func (w *world) start() {
	w.Helper()
	c, err := regcache.New(w.cfg)
	if err != nil {
		w.Fatal(err)
	}
	w.cache = c
}

func parse(text string) *url.URL {
	u, err := url.Parse(text)
	if err != nil {
		panic(err)
	}
	return u
}

// Sandbox implements outside.Sandboxes.
func (w *world) Sandbox(_ context.Context, vmid int) (agentlab.Sandbox, error) {
	w.mu.Lock()
	sb, ok := w.rows[vmid]
	read := w.read
	w.mu.Unlock()
	if read != nil {
		read(vmid)
	}
	if !ok {
		return sb, agentlab.Errorf(agentlab.CodeNotFound, "no sandbox %d", vmid)
	}
	return sb, nil
}

// Use implements regcache.Profiles.
func (w *world) Use(name string) (agentlab.Profile, error) {
	return agentlab.Profile{Name: name, NoCache: name == "no-cache"}, nil
}

// RecordEgress implements outside.Audit.
func (w *world) RecordEgress(_ context.Context, sb agentlab.Sandbox, r agentlab.EgressRecord) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	_, _ = fmt.Sscanf(sb.UID, "uid-%d", &r.VMID)
	w.records = append(w.records, r)
	return nil
}

// CacheRequest implements regcache.Metrics.
func (w *world) CacheRequest(result string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.results[result]++
}

// CacheBytes implements regcache.Metrics.
func (w *world) CacheBytes(bool, int64) {}

// record returns the first record of a sandbox with a name, and waits for it.
func (w *world) record(vmid int, name string) agentlab.EgressRecord {
	w.Helper()
	for end := time.Now().Add(guard.Patience); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		w.mu.Lock()
		for _, r := range w.records {
			if r.VMID == vmid && r.Name == name {
				w.mu.Unlock()
				return r
			}
		}
		w.mu.Unlock()
	}
	w.Fatalf("no record of sandbox %d about %s: %+v", vmid, name, w.records)
	return agentlab.EgressRecord{}
}

// upstream serves a host over TLS and counts its requests.
func (w *world) upstream(host string, h http.HandlerFunc) {
	w.Helper()
	count := http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		w.mu.Lock()
		w.asked[host+" "+r.URL.Path]++
		w.mu.Unlock()
		h(rw, r)
	})
	if _, err := w.net.HandleHTTPS(host, 443, w.ca, count); err != nil {
		w.Fatal(err)
	}
}

func (w *world) times(what string) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.asked[what]
}

// get asks the cache as a sandbox. headers are pairs.
func (w *world) get(vmid int, path string, headers ...string) (int, string, http.Header) {
	w.Helper()
	status, body, h, err := w.try(w.Context(), http.MethodGet, vmid, path, headers...)
	if err != nil {
		w.Fatalf("%s: %v", path, err)
	}
	return status, body, h
}

func (w *world) try(ctx context.Context, method string, vmid int, path string, headers ...string) (int, string, http.Header, error) {
	proxied := strings.HasPrefix(path, "http://") // as apt asks a proxy
	target := w.base[vmid] + path
	if proxied {
		target = path
	}
	req, err := http.NewRequestWithContext(ctx, method, target, nil)
	if err != nil {
		return 0, "", nil, err
	}
	for i := 0; i+1 < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	tr := &http.Transport{DisableCompression: true, DisableKeepAlives: true}
	if proxied {
		tr.Proxy = http.ProxyURL(parse(w.base[vmid]))
	}
	resp, err := (&http.Client{Transport: tr, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}).Do(req)
	if err != nil {
		return 0, "", nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(body), resp.Header, err
}

func text(s string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, s) }
}

func npmIndex(content string) string {
	sum := sha512.Sum512([]byte(content))
	return `{"name":"left","versions":{"1.0.0":{"dist":{"tarball":"https://registry.npmjs.org/left/-/left-1.0.0.tgz","integrity":"sha512-` +
		base64.StdEncoding.EncodeToString(sum[:]) + `"}}}}`
}

// Ten guests download once; the policy of each decides on each request, whether or
// not the object is stored, and each request is in the egress log.
func TestOneDownloadForAll(t *testing.T) {
	w := newWorld(t)
	release := make(chan struct{})
	w.upstream("registry.test", func(rw http.ResponseWriter, _ *http.Request) {
		<-release
		_, _ = io.WriteString(rw, "module content")
	})
	const path = "/cache/go/example.com/mod/@v/v1.0.0.zip"
	var wg sync.WaitGroup
	for i := range 10 {
		wg.Go(func() {
			status, body, _, err := w.try(t.Context(), http.MethodGet, []int{open, second, listed}[i%3], path)
			if status != 200 || body != "module content" || err != nil {
				t.Errorf("%d %q %v", status, body, err)
			}
		})
	}
	for w.times("registry.test /go/example.com/mod/@v/v1.0.0.zip") == 0 {
		time.Sleep(time.Millisecond)
	}
	close(release)
	wg.Wait()
	for _, vmid := range []int{closed, outed} {
		if status, body, _ := w.get(vmid, path); status != 403 || !strings.Contains(body, "sandbox") {
			t.Errorf("sandbox %d: %d %q", vmid, status, body)
		}
	}
	if n := w.times("registry.test /go/example.com/mod/@v/v1.0.0.zip"); n != 1 {
		t.Errorf("%d downloads", n)
	}
	if r := w.record(closed, "registry.test"); r.Allow || r.Rule != "mode.off" || r.Port != 443 {
		t.Errorf("the denial: %+v", r)
	}
	if r := w.record(listed, "registry.test"); !r.Allow || r.Rule != "allow:registry.test" || r.Addr == "" {
		t.Errorf("the request: %+v", r)
	}
	// A narrower policy is in force at the next request.
	w.mu.Lock()
	sb := w.rows[second]
	sb.Network.Deny = []agentlab.NetworkRule{{Rule: "registry.test"}}
	w.rows[second] = sb
	w.mu.Unlock()
	if status, body, _ := w.get(second, path); status != 403 || !strings.Contains(body, "deny:registry.test") {
		t.Errorf("after the change: %d %q", status, body)
	}
}

// npm's tarballs are verified with what the index says, an index is passed on, and the
// root path that npm uses works.
func TestNPM(t *testing.T) {
	w := newWorld(t)
	content := "the tarball"
	w.upstream("registry.test", func(rw http.ResponseWriter, r *http.Request) {
		switch r.URL.EscapedPath() {
		case "/left", "/@scope%2Fleft":
			rw.Header().Set("Etag", `"1"`)
			if r.Header.Get("If-None-Match") == `"1"` {
				rw.WriteHeader(http.StatusNotModified)
				return
			}
			rw.Header().Set("Content-Type", r.Header.Get("Accept"))
			_, _ = io.WriteString(rw, npmIndex("the tarball"))
		case "/left/-/left-1.0.0.tgz", "/@scope/left/-/left-1.0.0.tgz":
			_, _ = io.WriteString(rw, content)
		default:
			http.Error(rw, "not found", 404)
		}
	})
	for range 3 {
		if status, body, h := w.get(open, "/cache/npm/left", "Accept", "application/vnd.npm.install-v1+json; q=1.0, */*"); status != 200 || body != npmIndex("the tarball") || h.Get("Content-Type") != "application/vnd.npm.install-v1+json" {
			t.Errorf("index: %d %s %v", status, body, h)
		}
	}
	if status, _, _ := w.get(open, "/cache/npm/left", "Accept", "application/vnd.npm.install-v1+json", "If-None-Match", `"1"`); status != 304 {
		t.Errorf("a client that has the index gets %d", status)
	}
	content = "poisoned!!!"
	if status, body, _, err := w.try(t.Context(), http.MethodGet, open, "/left/-/left-1.0.0.tgz"); err == nil && status == 200 {
		t.Errorf("a tarball with another digest than in the index is served: %q", body)
	}
	content = "the tarball"
	for _, path := range []string{"/left/-/left-1.0.0.tgz", "/cache/npm/left/-/left-1.0.0.tgz"} {
		if status, body, _ := w.get(open, path); status != 200 || body != content {
			t.Errorf("%s: %d %q", path, status, body)
		}
	}
	if status, _, _ := w.get(open, "/cache/npm/@scope%2fleft"); status != 200 {
		t.Errorf("a scope: %d", status)
	}
	if n := w.times("registry.test /left/-/left-1.0.0.tgz"); n != 2 {
		t.Errorf("the tarball was downloaded %d times, want the poisoned one and one more", n)
	}
	if status, _, _ := w.get(open, "/cache/npm/absent"); status != 404 {
		t.Errorf("an absent package: %d", status)
	}
}

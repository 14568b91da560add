package regcache_test

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/config"
	"github.com/agentlab-vm/agentlab/internal/guestplane/regcache"
	"github.com/agentlab-vm/agentlab/test/guard"
)

const module = "/cache/go/example.com/mod/@v/v1.0.0.zip"

// Requests that name no object of an upstream reach none.
func TestRefusedRequests(t *testing.T) {
	w := newWorld(t)
	w.upstream("registry.test", text("secret"))
	for _, c := range []struct {
		method, path string
		header       []string
		want         int
	}{
		{"POST", module, nil, 405},
		{"PUT", module, nil, 405},
		{"DELETE", "/v2/library/alpine/manifests/latest", nil, 405},
		{"GET", module, []string{"Authorization", "Bearer x"}, 403},
		{"GET", module, []string{"Cookie", "a=b"}, 403},
		{"GET", module, []string{"Proxy-Authorization", "Basic eDp5"}, 403},
		{"GET", "/cache/go/../../etc/passwd", nil, 404},
		{"GET", "/cache/go/example.com/mod/@v/../../../x.zip", nil, 404},
		{"GET", "/cache/go/example.com/mod/@v/%2e%2e%2fx.zip", nil, 404},
		{"GET", "/cache/go/EXAMPLE.com/mod/@v/v1.0.0.zip", nil, 404},
		{"GET", "/cache/go/example.com/mod/@v/v1.0.0.exe", nil, 404},
		{"GET", "/cache/go/sumdb/evil.test:1/latest", nil, 404},
		{"GET", "/cache/npm/-/all", nil, 404},
		{"GET", "/cache/npm/a/b/c", nil, 404},
		{"GET", "/cache/npm/%00", nil, 404},
		{"GET", "/cache/pypi/files/none/evil.test:443/x", nil, 404},
		{"GET", "/cache/pypi/files/none/10.0.0.1:443/x", nil, 404},
		{"GET", "/cache/pypi/files/none/files.test@10.0.0.1/x", nil, 404},
		{"GET", "/cache/other/x", nil, 404},
		{"GET", "/cache/", nil, 404},
		{"GET", "/v2/_catalog", nil, 404},
		{"GET", "/v2/library/alpine/tags/list", nil, 404},
		{"GET", "/v2/../x/manifests/latest", nil, 404},
		{"GET", "/v2/library/alpine/blobs/latest", nil, 404},
		{"GET", "/v2/library/alpine/manifests/latest?ns=ghcr.io", nil, 404},
		{"GET", "http://10.0.0.1/x", nil, 403},
		{"GET", "http://evil.test/x", nil, 403},
		{"GET", "http://mirror.test:81/x", nil, 403},
	} {
		status, body, _, err := w.try(t.Context(), c.method, open, c.path, c.header...)
		if err != nil || status != c.want || strings.Contains(body, "secret") {
			t.Errorf("%s %s %v: %d %q %v, want %d", c.method, c.path, c.header, status, body, err, c.want)
		}
	}
	if len(w.asked) > 0 {
		t.Errorf("upstreams were asked: %v", w.asked)
	}
}

// A redirect is followed only to servers that the policy of the guest allows, and
// a stored object that came from such a server is refused to other guests.
func TestRedirects(t *testing.T) {
	w := newWorld(t)
	to := ""
	w.upstream("registry.test", func(rw http.ResponseWriter, r *http.Request) { http.Redirect(rw, r, to, http.StatusFound) })
	w.upstream("cdn.test", text("from the CDN"))
	w.net.SetName("inside.test", netip.MustParseAddr("10.0.0.1"))
	w.net.SetName("loop.test", netip.MustParseAddr("127.0.0.1"))
	for i, target := range []string{
		"https://10.0.0.1/x", "https://127.0.0.1:8443/", "https://169.254.169.254/latest", "https://inside.test/x", "https://loop.test/x",
		"https://[::1]/", "http://cdn.test/x", "file:///etc/passwd", "https://user:pw@cdn.test/x", "",
	} {
		to = target
		status, body, _ := w.get(open, fmt.Sprintf("/cache/go/example.com/mod/@v/v1.0.%d.zip", i))
		if status != 403 && status != 502 || strings.Contains(body, "CDN") {
			t.Errorf("to %q: %d %q", target, status, body)
		}
	}
	to = "https://registry.test/again"
	if status, _, _ := w.get(open, "/cache/go/example.com/mod/@v/v2.0.0.zip"); status != 502 {
		t.Errorf("endless redirects: %d", status)
	}
	to = "https://cdn.test/x"
	if status, body, _ := w.get(listed, module); status != 403 || !strings.Contains(body, "mode.allowlist") {
		t.Errorf("to a server that the allowlist does not have: %d %q", status, body)
	}
	if r := w.record(listed, "cdn.test"); r.Allow {
		t.Errorf("%+v", r)
	}
	for range 2 {
		if status, body, _ := w.get(open, module); status != 200 || body != "from the CDN" {
			t.Errorf("an allowed redirect: %d %q", status, body)
		}
	}
	if status, _, _ := w.get(listed, module); status != 403 {
		t.Errorf("the stored object from another server: %d", status)
	}
	if n := w.times("cdn.test /x"); n != 1 {
		t.Errorf("%d downloads", n)
	}
}

// An upstream on a private address is reached only by sandboxes whose policy opens
// it.
func TestPrivateUpstream(t *testing.T) {
	w := newWorld(t)
	w.net.SetName("registry.test", netip.MustParseAddr("10.1.2.3"))
	w.upstream("registry.test", text("private"))
	sb := w.rows[second]
	sb.Network.Private = []agentlab.PrivateTarget{{Host: "registry.test", Port: 443, Reason: "our registry"}}
	w.rows[second] = sb
	if status, body, _ := w.get(open, module); status != 403 || !strings.Contains(body, "always.rebinding") {
		t.Errorf("without an entry: %d %q", status, body)
	}
	if status, body, _ := w.get(second, module); status != 200 || body != "private" {
		t.Errorf("with an entry: %d %q", status, body)
	}
	if status, _, _ := w.get(open, module); status != 403 {
		t.Errorf("the stored object without an entry: %d", status)
	}
}

// An object that is too large is passed on and not stored; an index that is too
// large is an error.
func TestOversize(t *testing.T) {
	w := newWorld(t, func(c *regcache.Config) { c.Limits.Object, c.Limits.Whole = 100<<10, 100<<10 })
	big := strings.Repeat("x", 300<<10)
	chunked := false
	w.upstream("registry.test", func(rw http.ResponseWriter, _ *http.Request) {
		if !chunked {
			rw.Header().Set("Content-Length", fmt.Sprint(len(big)))
		}
		_, _ = io.WriteString(rw, big)
	})
	for range 2 {
		if status, body, _ := w.get(open, module); status != 200 || body != big {
			t.Errorf("chunked %t: %d, %d bytes", chunked, status, len(body))
		}
		if status, _, _ := w.get(open, "/cache/pypi/simple/x/"); status != 502 {
			t.Errorf("a large index: %d", status)
		}
		chunked = true
	}
	// Each guest downloads again what turns out to be too large while it is stored.
	if use, _ := w.cache.Status(); use[2].Objects != 0 || w.times("registry.test /go/example.com/mod/@v/v1.0.0.zip") != 4 {
		t.Errorf("large objects are stored: %+v", use)
	}
}

// While the disk is full, everything is passed on and nothing is stored.
func TestFullDisk(t *testing.T) {
	w := newWorld(t, func(c *regcache.Config) { c.MinFree = 1 << 60 })
	w.upstream("registry.test", text("module content"))
	for range 2 {
		for _, path := range []string{module, "/cache/pypi/simple/x/"} {
			if status, body, _ := w.get(open, path); status != 200 || body != "module content" {
				t.Errorf("%s: %d %q", path, status, body)
			}
		}
	}
	if use, _ := w.cache.Status(); use[1].Objects+use[2].Objects != 0 {
		t.Errorf("stored: %+v", use)
	}
	if f := w.cache.Findings(); f[0].Level != backend.LevelWarn {
		t.Errorf("%+v", f)
	}
}

// An upstream that sends nothing, or too little, is given up, and a part of an
// object is never served as a whole one.
func TestSlowAndBrokenUpstream(t *testing.T) {
	w := newWorld(t, func(c *regcache.Config) { c.Limits.Stall = 300 * time.Millisecond })
	var mode atomic.Value // a busy CPU can run a handler after its request was given up
	mode.Store("")
	w.upstream("registry.test", func(rw http.ResponseWriter, r *http.Request) {
		rw.Header().Set("Content-Length", "14")
		switch mode.Load() {
		case "stall":
			_, _ = io.WriteString(rw, "module")
			_ = http.NewResponseController(rw).Flush()
			<-r.Context().Done()
		case "cut":
			_, _ = io.WriteString(rw, "module")
			panic(http.ErrAbortHandler)
		case "silent":
			<-r.Context().Done()
		default:
			_, _ = io.WriteString(rw, "module content")
		}
	})
	for _, how := range []string{"stall", "cut", "silent"} {
		mode.Store(how)
		status, body, _, err := w.try(t.Context(), http.MethodGet, open, module)
		if err == nil && status == 200 {
			t.Errorf("%s: a part is served as a whole: %q", how, body)
		}
	}
	mode.Store("")
	var status int
	var body string
	for range 100 { // on a busy machine an answer can take longer than Stall
		if status, body, _, _ = w.try(t.Context(), http.MethodGet, open, module); status == 200 {
			break
		}
	}
	if status != 200 || body != "module content" {
		t.Errorf("afterwards: %d %q", status, body)
	}
}

// A download ends when the last guest that wants it has disconnected.
func TestCancelledDownload(t *testing.T) {
	w := newWorld(t)
	asked, ended := make(chan struct{}), make(chan struct{})
	w.upstream("registry.test", func(rw http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(rw, strings.Repeat("x", 1<<16))
		_ = http.NewResponseController(rw).Flush()
		close(asked)
		<-r.Context().Done()
		close(ended)
	})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, _, _, err := w.try(ctx, http.MethodGet, open, module)
		done <- err
	}()
	<-asked
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("the guest: %v", err)
	}
	select {
	case <-ended:
	case <-time.After(guard.Patience):
		t.Error("the download goes on without guests")
	}
	wantNoTemps(t, w.cfg.Dir)
}

func wantNoTemps(t *testing.T, dir string) {
	t.Helper()
	guard.Until(t, "no temporary file is left", func() bool {
		left, _ := filepath.Glob(filepath.Join(dir, "tmp", "*"))
		return len(left) == 0
	})
}

// What a killed process leaves is never served: a new process removes drafts, and
// files that are damaged.
func TestRestart(t *testing.T) {
	w := newWorld(t)
	w.upstream("registry.test", text("module content"))
	w.get(open, module)
	w.get(open, "/cache/go/example.com/mod/@v/v1.0.1.zip")
	_ = w.cache.Close()
	files, err := filepath.Glob(filepath.Join(w.cfg.Dir, "objects", "go", "*", "*"))
	if err != nil || len(files) != 2 {
		t.Fatal(files, err)
	}
	if err := os.WriteFile(files[0], []byte("not an object"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{filepath.Join(w.cfg.Dir, "tmp", "123"), filepath.Join(filepath.Dir(files[0]), "half")} {
		if err := os.WriteFile(name, []byte("half"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	w.start()
	wantNoTemps(t, w.cfg.Dir)
	for _, path := range []string{module, "/cache/go/example.com/mod/@v/v1.0.1.zip"} {
		if status, body, _ := w.get(open, path); status != 200 || body != "module content" {
			t.Errorf("%s: %d %q", path, status, body)
		}
	}
	if n := w.times("registry.test /go/example.com/mod/@v/v1.0.0.zip") + w.times("registry.test /go/example.com/mod/@v/v1.0.1.zip"); n != 3 {
		t.Errorf("%d downloads, want two and one of the damaged object", n)
	}
	if gone, err := w.cache.Clear(regcache.Go); err != nil || gone.Objects != 2 {
		t.Errorf("clear: %+v %v", gone, err)
	}
}

// A directory with other files is not used: the cache deletes what it does not know.
func TestForeignDirectory(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "tmp", "file")
	if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte("another owner's"), 0o600); err != nil {
		t.Fatal(err)
	}
	if c, err := regcache.New(regcache.Config{Cache: config.Cache{Dir: dir}, MaxBytes: 1 << 20}); agentlab.HintOf(err) == "" {
		t.Errorf("it is used: %v", err)
		_ = c.Close()
	}
	if text, err := os.ReadFile(file); string(text) != "another owner's" {
		t.Errorf("the file has %q, %v", text, err)
	}
}

// The least recently used objects are evicted.
func TestEviction(t *testing.T) {
	w := newWorld(t, func(c *regcache.Config) { c.MaxBytes = 1 << 20 })
	w.upstream("registry.test", text(strings.Repeat("x", 300<<10)))
	path := func(i int) string { return fmt.Sprintf("/cache/go/example.com/mod/@v/v1.0.%d.zip", i) }
	for i := range 5 {
		w.get(open, path(0)) // it is always in use
		w.get(open, path(i))
	}
	use, most := w.cache.Status()
	if use[2].Bytes > most || use[2].Objects < 2 {
		t.Errorf("%+v of %d", use, most)
	}
	if n := w.times("registry.test /go/example.com/mod/@v/v1.0.0.zip"); n != 1 {
		t.Errorf("the object in use was downloaded %d times", n)
	}
}

// Docker's objects are verified, tags are passed on, and the cache gets the
// token for anonymous downloads itself.
func TestDocker(t *testing.T) {
	w := newWorld(t)
	sum := func(s string) string { d := sha256.Sum256([]byte(s)); return "sha256:" + hex.EncodeToString(d[:]) }
	manifest, layer := `{"layers":[]}`, "a layer"
	w.upstream("auth.test", func(rw http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("scope") != "repository:library/alpine:pull" || r.URL.Query().Get("service") != "registry.test" || r.Header.Get("Authorization") != "" {
			http.Error(rw, "bad", 400)
			return
		}
		_, _ = io.WriteString(rw, `{"token":"anonymous","expires_in":300}`)
	})
	w.upstream("cdn.test", func(rw http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "" {
			t.Error("the token is sent to the CDN")
		}
		_, _ = io.WriteString(rw, layer)
	})
	w.upstream("registry.test", func(rw http.ResponseWriter, r *http.Request) {
		switch {
		case r.Header.Get("Authorization") != "Bearer anonymous":
			rw.Header().Set("WWW-Authenticate", `Bearer realm="https://auth.test/token",service="registry.test",scope="repository:library/alpine:pull"`)
			rw.WriteHeader(http.StatusUnauthorized)
		case strings.Contains(r.URL.Path, "/blobs/"):
			http.Redirect(rw, r, "https://cdn.test/layer", http.StatusTemporaryRedirect)
		default:
			rw.Header().Set("Content-Type", "application/vnd.oci.image.manifest.v1+json")
			rw.Header().Set("Docker-Content-Digest", sum(manifest))
			_, _ = io.WriteString(rw, manifest)
		}
	})
	if status, body, h := w.get(open, "/v2/"); status != 200 || body != "{}" || h.Get("Docker-Distribution-Api-Version") == "" {
		t.Errorf("ping: %d %q", status, body)
	}
	if status, body, h := w.get(open, "/v2/library/alpine/manifests/latest?ns=docker.io"); status != 200 || body != manifest || h.Get("Docker-Content-Digest") != sum(manifest) {
		t.Errorf("tag: %d %q %v", status, body, h)
	}
	status, body, h, err := w.try(t.Context(), http.MethodHead, second, "/v2/library/alpine/manifests/latest")
	if status != 200 || body != "" || h.Get("Docker-Content-Digest") != sum(manifest) || h.Get("Content-Length") != fmt.Sprint(len(manifest)) || err != nil {
		t.Errorf("HEAD: %d %q %v %v", status, body, h, err)
	}
	for range 2 {
		if status, body, _ := w.get(open, "/v2/library/alpine/blobs/"+sum(layer)); status != 200 || body != layer {
			t.Errorf("layer: %d %q", status, body)
		}
	}
	if status, body, _, err := w.try(t.Context(), http.MethodGet, open, "/v2/library/alpine/blobs/"+sum("another layer")); err == nil && status == 200 {
		t.Errorf("a layer with another digest is served: %q", body)
	}
	if w.times("auth.test /token") != 1 || w.times("cdn.test /layer") != 2 || w.times("registry.test /v2/library/alpine/manifests/latest") != 4 {
		t.Errorf("requests: %v", w.asked)
	}
}

// Files of Python packages are verified by the hash in the index, whose URLs are
// those of the cache.
func TestPyPI(t *testing.T) {
	w := newWorld(t)
	sum := sha256.Sum256([]byte("a wheel"))
	hash := hex.EncodeToString(sum[:])
	w.upstream("registry.test", func(rw http.ResponseWriter, r *http.Request) {
		if strings.Contains(r.Header.Get("Accept"), "json") {
			rw.Header().Set("Content-Type", "application/vnd.pypi.simple.v1+json")
			_, _ = fmt.Fprintf(rw, `{"name":"left","files":[{"filename":"left.whl","url":"https://files.test/p/left.whl","hashes":{"sha256":%q},"size":7},{"filename":"o","url":"https://other.test/o.whl","hashes":{}}]}`, hash)
			return
		}
		rw.Header().Set("Content-Type", "text/html")
		_, _ = fmt.Fprintf(rw, `<!DOCTYPE html><a href="https://files.test/p/left.whl#sha256=%s" data-requires-python="&gt;=3">left.whl</a><a href="../../rel/r.whl">r</a>`, hash)
	})
	content := "a wheel"
	w.upstream("files.test", func(rw http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(rw, content) })
	file := "/cache/pypi/files/sha256:" + hash + "/files.test:443/p/left.whl"
	_, body, _ := w.get(open, "/cache/pypi/simple/left/", "Accept", "application/vnd.pypi.simple.v1+json, text/html;q=0.1")
	if !strings.Contains(body, `"http://10.77.0.1:8844`+file+`"`) || !strings.Contains(body, `"https://other.test/o.whl"`) || !strings.Contains(body, `"size":7`) {
		t.Errorf("JSON: %s", body)
	}
	_, body, _ = w.get(open, "/cache/pypi/simple/left/")
	if !strings.Contains(body, `href="http://10.77.0.1:8844`+file+`#sha256=`+hash+`" data-requires-python="&gt;=3"`) || !strings.Contains(body, `/cache/pypi/files/none/registry.test:443/rel/r.whl"`) {
		t.Errorf("HTML: %s", body)
	}
	content = "poisoned"
	if status, body, _, err := w.try(t.Context(), http.MethodGet, open, file); err == nil && status == 200 {
		t.Errorf("a file with another hash is served: %q", body)
	}
	content = "a wheel"
	for range 2 {
		if status, body, _ := w.get(open, file); status != 200 || body != "a wheel" {
			t.Errorf("the file: %d %q", status, body)
		}
	}
	if n := w.times("files.test /p/left.whl"); n != 2 {
		t.Errorf("%d downloads, want the poisoned one and one more", n)
	}
}

// apt asks for the files of a mirror as from a proxy.
func TestApt(t *testing.T) {
	w := newWorld(t)
	sum := sha256.Sum256([]byte("packages"))
	hash := hex.EncodeToString(sum[:])
	asked := 0
	w.net.HandleHTTP("mirror.test", 80, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		asked++
		if r.Host != "mirror.test" {
			t.Errorf("Host: %s", r.Host)
		}
		rw.Header().Set("Last-Modified", "Mon, 02 Jan 2023 15:04:05 GMT")
		if r.Header.Get("If-Modified-Since") == "Mon, 02 Jan 2023 15:04:05 GMT" {
			rw.WriteHeader(http.StatusNotModified)
			return
		}
		_, _ = io.WriteString(rw, map[bool]string{true: "packages", false: "a file"}[strings.Contains(r.URL.Path, "by-hash")])
	}))
	for range 2 {
		for path, want := range map[string]string{"/debian/dists/x/by-hash/SHA256/" + hash: "packages", "/debian/pool/main/l/left_1.0_all.deb": "a file", "/debian/dists/x/InRelease": "a file"} {
			if status, body, _ := w.get(open, "http://mirror.test"+path); status != 200 || body != want {
				t.Errorf("%s: %d %q", path, status, body)
			}
		}
	}
	if status, _, _ := w.get(open, "http://mirror.test/debian/dists/x/InRelease", "If-Modified-Since", "Mon, 02 Jan 2023 15:04:05 GMT"); status != 304 {
		t.Errorf("a file that apt has: %d", status)
	}
	if asked != 5 { // for each object once, for InRelease three times
		t.Errorf("the mirror was asked %d times", asked)
	}
	if status, body, _, err := w.try(t.Context(), http.MethodGet, open, "http://mirror.test/debian/dists/x/by-hash/SHA256/"+strings.Repeat("0", 64)); err == nil && status == 200 {
		t.Errorf("a file with another hash is served: %q", body)
	}
	if status, _, _ := w.get(listed, "http://mirror.test/debian/pool/main/l/left_1.0_all.deb"); status != 403 {
		t.Errorf("without permission: %d", status)
	}
}

// Packages of a mirror without a directory, and of a repository without suites, are
// never asked for again.
func TestAptWithoutDirectory(t *testing.T) {
	w := newWorld(t)
	asked := 0
	w.net.HandleHTTP("mirror.test", 80, http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
		asked++
		_, _ = io.WriteString(rw, "a file")
	}))
	for _, path := range []string{"/./pool/main/l/left_1.0_all.deb", "/pool/main/l/left_1.0_all.deb"} {
		if status, body, _ := w.get(open, "http://mirror.test"+path); status != 200 || body != "a file" {
			t.Errorf("%s: %d %q", path, status, body)
		}
	}
	if asked != 1 {
		t.Errorf("the mirror was asked %d times", asked)
	}
}

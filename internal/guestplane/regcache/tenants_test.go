package regcache_test

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/guestplane/regcache"
	"github.com/agentlab-vm/agentlab/internal/hostspace"
	"github.com/agentlab-vm/agentlab/test/guard"
)

func layerDigest(text string) string {
	sum := sha256.Sum256([]byte(text))
	return "sha256:" + hex.EncodeToString(sum[:])
}

// A guest that asks for an object in the wrong place does not spoil the download of
// the same object from another place.
func TestDownloadsOfOtherPlacesAreNotShared(t *testing.T) {
	w := newWorld(t)
	asked, release := make(chan struct{}), make(chan struct{})
	w.upstream("registry.test", func(rw http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.URL.Path, "/v2/evil/") {
			close(asked)
			<-release
			http.Error(rw, "no such layer", http.StatusNotFound)
			return
		}
		_, _ = io.WriteString(rw, "a layer")
	})
	evil := make(chan int, 1)
	go func() {
		status, _, _, _ := w.try(t.Context(), http.MethodGet, open, "/v2/evil/x/blobs/"+layerDigest("a layer"))
		evil <- status
	}()
	<-asked
	status := make(chan int, 1)
	go func() {
		got, _, _, _ := w.try(t.Context(), http.MethodGet, second, "/v2/library/alpine/blobs/"+layerDigest("a layer"))
		status <- got
	}()
	select {
	case got := <-status:
		if got != 200 {
			t.Errorf("the layer: %d", got)
		}
		close(release)
	case <-time.After(guard.Patience):
		close(release)
		t.Errorf("the layer: %d, with the download of another place", <-status)
	}
	if got := <-evil; got != 404 {
		t.Errorf("the wrong place: %d", got)
	}
}

// A guest does not get a running download from a server that its policy denies.
func TestDownloadFromDeniedServer(t *testing.T) {
	w := newWorld(t)
	asked, release := make(chan struct{}), make(chan struct{})
	w.upstream("registry.test", func(rw http.ResponseWriter, r *http.Request) {
		http.Redirect(rw, r, "https://cdn.test/x", http.StatusFound)
	})
	w.upstream("cdn.test", func(rw http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(rw, "from the")
		_ = http.NewResponseController(rw).Flush()
		close(asked)
		<-release
		_, _ = io.WriteString(rw, " CDN")
	})
	first, second := make(chan string, 1), make(chan string, 1)
	get := func(vmid int, to chan string) {
		status, body, _, err := w.try(t.Context(), http.MethodGet, vmid, module)
		to <- fmt.Sprint(status, " ", body, " ", err)
	}
	go get(open, first)
	<-asked
	go get(listed, second)
	select {
	case got := <-second:
		if !strings.HasPrefix(got, "403 ") || strings.Contains(got, "from the") {
			t.Error(got)
		}
		close(release)
	case <-time.After(guard.Patience):
		close(release)
		t.Errorf("it waits for the download, and gets %s", <-second)
	}
	if got := <-first; got != "200 from the CDN <nil>" {
		t.Error(got)
	}
}

// Two guests that want an object which cannot be stored both get it.
func TestFullDiskForTwo(t *testing.T) {
	w := newWorld(t, func(c *regcache.Config) { c.MinFree = 1 << 60 })
	big := strings.Repeat("x", 8<<20)
	release := make(chan struct{})
	w.upstream("registry.test", func(rw http.ResponseWriter, _ *http.Request) {
		<-release
		_, _ = io.WriteString(rw, big)
	})
	var wg sync.WaitGroup
	for _, vmid := range []int{open, second, listed} {
		wg.Go(func() {
			if status, body, _, err := w.try(t.Context(), http.MethodGet, vmid, module); status != 200 || body != big || err != nil {
				t.Errorf("sandbox %d: %d, %d bytes, %v", vmid, status, len(body), err)
			}
		})
	}
	guard.Until(t, "the requests", func() bool {
		return w.record(open, "registry.test").Allow && w.record(second, "registry.test").Allow && w.record(listed, "registry.test").Allow
	})
	close(release)
	wg.Wait()
}

// A content with a known digest is verified before its last byte also if it cannot be
// stored.
func TestDigestWithoutDisk(t *testing.T) {
	w := newWorld(t, func(c *regcache.Config) { c.MinFree = 1 << 60 })
	content := ""
	w.upstream("registry.test", func(rw http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(rw, content) })
	for _, size := range []int{10, 64 << 10, 1 << 20} {
		good := strings.Repeat("x", size)
		for _, content = range []string{good, strings.Repeat("y", size)} {
			status, body, _, err := w.try(t.Context(), http.MethodGet, open, "/v2/library/alpine/blobs/"+layerDigest(good))
			if whole := status == 200 && err == nil; whole != (content == good) || whole && body != good {
				t.Errorf("%d bytes of %.1q: %d, %d bytes, %v", size, content, status, len(body), err)
			}
		}
	}
}

// A name with a public and a private address is two servers: nothing that came from
// the private one reaches a sandbox whose policy does not open it.
func TestPrivateAndPublicAddress(t *testing.T) {
	w := newWorld(t)
	private := netip.MustParseAddr("10.1.2.3")
	w.upstream("registry.test", text("public"))
	public := w.net.Host("registry.test")
	w.net.SetName("registry.test", private)
	w.upstream("registry.test", text("private"))
	w.net.SetName("registry.test", private, public)
	sb := w.rows[second]
	sb.Network.Private = []agentlab.PrivateTarget{{Host: "registry.test", Port: 443, Reason: "our registry"}}
	w.rows[second] = sb
	for i, vmid := range []int{second, open, second, open} {
		want := map[int]string{second: "private", open: "public"}[vmid]
		for _, path := range []string{module, fmt.Sprintf("/cache/go/example.com/mod/@v/v1.1.%d.zip", i), "/cache/npm/left/-/left-1.0.0.tgz"} {
			if status, body, _ := w.get(vmid, path); status != 200 || body != want {
				t.Errorf("sandbox %d, %s: %d %q", vmid, path, status, body)
			}
		}
	}
}

// A request that has read its sandbox before a change of the policy does not bring the
// former policy back.
func TestChangeDuringRequest(t *testing.T) {
	w := newWorld(t)
	w.upstream("registry.test", text("module content"))
	w.get(open, module)
	narrow := w.rows[open]
	narrow.Network = agentlab.Network{Mode: agentlab.NetworkOff}
	var once sync.Once
	w.mu.Lock()
	w.read = func(int) {
		once.Do(func() { // the row was read, and is changed now
			w.mu.Lock()
			w.rows[open] = narrow
			w.mu.Unlock()
			w.cfg.Outside.SandboxChanged(narrow)
		})
	}
	w.mu.Unlock()
	if status, body, _ := w.get(open, module); status != 403 {
		t.Errorf("%d %q", status, body)
	}
}

// An object that is stored, but came from a server that the policy of a guest denies,
// is downloaded again: the upstream may send this guest to another server.
func TestStoredFromDeniedServer(t *testing.T) {
	w := newWorld(t)
	var requests atomic.Int32
	w.upstream("registry.test", func(rw http.ResponseWriter, r *http.Request) {
		if requests.Add(1) == 1 {
			http.Redirect(rw, r, "https://cdn.test/x", http.StatusFound)
			return
		}
		_, _ = io.WriteString(rw, "a layer")
	})
	w.upstream("cdn.test", text("a layer"))
	for _, vmid := range []int{open, listed, listed, open} {
		if status, body, _ := w.get(vmid, "/v2/library/alpine/blobs/"+layerDigest("a layer")); status != 200 || body != "a layer" {
			t.Errorf("sandbox %d: %d %q", vmid, status, body)
		}
	}
	if n := requests.Load(); n != 2 {
		t.Errorf("the registry was asked %d times", n)
	}
}

// An index that a guest gets from a server that the policy of another guest denies does
// not reach that guest: it gets what the upstream sends to it.
func TestIndexFromDeniedServer(t *testing.T) {
	w := newWorld(t)
	var requests atomic.Int32
	w.upstream("registry.test", func(rw http.ResponseWriter, r *http.Request) {
		switch {
		case requests.Add(1) == 1:
			http.Redirect(rw, r, "https://cdn.test/list", http.StatusFound)
		case r.Header.Get("If-None-Match") != "":
			rw.WriteHeader(http.StatusNotModified)
		default:
			_, _ = io.WriteString(rw, "v1.0.0")
		}
	})
	w.upstream("cdn.test", func(rw http.ResponseWriter, _ *http.Request) {
		rw.Header().Set("Etag", `"1"`)
		_, _ = io.WriteString(rw, "v1.0.0")
	})
	for _, vmid := range []int{open, open, listed, open} {
		if status, body, _ := w.get(vmid, "/cache/go/example.com/mod/@v/list"); status != 200 || body != "v1.0.0" {
			t.Errorf("sandbox %d: %d %q", vmid, status, body)
		}
	}
}

// A content that changes while a download continues without the store is an error: a
// guest does not get a mixture.
func TestContentChangesDuringDownload(t *testing.T) {
	w := newWorld(t, func(c *regcache.Config) { c.Limits.Object = 1 << 20 })
	var requests atomic.Int32
	change := atomic.Bool{}
	w.upstream("registry.test", func(rw http.ResponseWriter, _ *http.Request) {
		part := strings.Repeat("x", 1<<20)
		if requests.Add(1)%2 == 0 && change.Load() {
			part = strings.Repeat("y", 1<<20)
		}
		_, _ = io.WriteString(rw, part)
		_ = http.NewResponseController(rw).Flush() // its size is not known
		_, _ = io.WriteString(rw, part)
	})
	read := func() error {
		status, body, _, err := w.try(t.Context(), http.MethodGet, open, module)
		if err == nil && (status != 200 || body != strings.Repeat("x", 2<<20)) {
			err = fmt.Errorf("%d, %d bytes, of %.1q to %.1q", status, len(body), body, body[max(0, len(body)-1):])
		}
		return err
	}
	if err := read(); err != nil || requests.Load() != 2 {
		t.Errorf("%v, %d requests", err, requests.Load())
	}
	change.Store(true)
	if err := read(); err == nil || strings.Contains(err.Error(), "200, ") {
		t.Errorf("a mixture: %v", err)
	}
	wantNoTemps(t, w.cfg.Dir)
}

// A tarball of npm that the index has no digest of is passed on, and not stored.
func TestTarballWithoutDigest(t *testing.T) {
	w := newWorld(t)
	w.upstream("registry.test", text(`{"dist-tags":{"latest":"1.0.0"},"versions":{"1.0.0":{"dist":{"tarball":"https://registry.test/left/-/left-1.0.0.tgz","shasum":"0"}}}}`))
	for range 2 {
		if status, body, _ := w.get(open, "/cache/npm/left/-/left-1.0.0.tgz"); status != 200 || !strings.Contains(body, "dist-tags") {
			t.Errorf("%d %q", status, body)
		}
	}
	if use, _ := w.cache.Status(); use[0].Objects != 0 || w.times("registry.test /left/-/left-1.0.0.tgz") != 2 {
		t.Errorf("it is stored: %+v", use)
	}
}

// A download does not fill the disk: what does not fit is passed on.
func TestDiskFillsDuringDownload(t *testing.T) {
	w := newWorld(t)
	full, sent := atomic.Bool{}, make(chan struct{})
	now := time.Now()
	w.cache.SetSpace(hostspace.New(w.cfg.Dir, 1<<30, func(string) (int64, error) {
		if full.Load() {
			return 0, nil
		}
		return 1 << 40, nil
	}, func() time.Time { now = now.Add(time.Minute); return now }))
	part := strings.Repeat("x", 1<<20)
	w.upstream("registry.test", func(rw http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(rw, part)
		_ = http.NewResponseController(rw).Flush()
		select {
		case <-sent:
		case <-r.Context().Done():
		}
		_, _ = io.WriteString(rw, part)
	})
	done := make(chan error, 1)
	go func() {
		status, body, _, err := w.try(t.Context(), http.MethodGet, open, module)
		if err == nil && (status != 200 || body != part+part) {
			err = fmt.Errorf("%d, %d bytes", status, len(body))
		}
		done <- err
	}()
	stored := func() (size int64) {
		for _, name := range drafts(t, w.cfg.Dir) {
			if st, err := os.Stat(name); err == nil {
				size += st.Size()
			}
		}
		return size
	}
	guard.Until(t, "the first part", func() bool { return stored() >= 1<<20 })
	full.Store(true)
	close(sent)
	if err := <-done; err != nil {
		t.Error(err)
	}
	wantNoTemps(t, w.cfg.Dir)
	if use, _ := w.cache.Status(); use[2].Objects != 0 {
		t.Errorf("it is stored on a full disk: %+v", use)
	}
}

func drafts(t *testing.T, dir string) []string {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(dir, "tmp", "*"))
	if err != nil {
		t.Fatal(err)
	}
	return names
}

// A download that fails is counted, and its answer is complete unless it has begun.
func TestFailedDownloads(t *testing.T) {
	w := newWorld(t)
	received := make(chan struct{})
	w.upstream("registry.test", func(rw http.ResponseWriter, r *http.Request) {
		rw.Header().Set("Content-Length", "100000")
		rw.Header().Set("Etag", `"1"`)
		if strings.HasSuffix(r.URL.Path, "v1.0.0.zip") {
			_, _ = io.WriteString(rw, strings.Repeat("x", 50_000))
			_ = http.NewResponseController(rw).Flush()
			<-received
		}
		_, _ = io.WriteString(rw, "x")
		_ = http.NewResponseController(rw).Flush()
		panic(http.ErrAbortHandler)
	})
	status, body, h, err := w.try(t.Context(), http.MethodGet, open, "/cache/go/example.com/mod/@v/v1.0.1.zip")
	if err != nil || status != 502 || !strings.Contains(body, "cannot be reached") || h.Get("Etag") != "" {
		t.Errorf("before the first byte: %d %q %v %v", status, body, h, err)
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, w.base[open]+module, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	if _, err := io.ReadFull(resp.Body, make([]byte, 1000)); err != nil {
		t.Fatal(err)
	}
	close(received)
	if _, err := io.Copy(io.Discard, resp.Body); err == nil {
		t.Error("a part is served as a whole")
	}
	guard.Until(t, "the count", func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.results[regcache.ResultError] == 2
	})
}

package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab/api"
)

// devServer is a server for development: PORT ADDRESS NAME. It answers with its name and
// the Host that it got, sends events at /events, and returns what it gets after an
// upgrade.
const devServer = `
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    def do_GET(self):
        if self.headers.get("Upgrade") == "websocket":
            self.wfile.write(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
            while data := self.rfile.read1(100):
                self.wfile.write(data)
            self.close_connection = True
            return
        self.send_response(200)
        if self.path == "/events":
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(b"data: first\n\n")
            self.rfile.read1(1)
            return
        text = (sys.argv[3] + " at " + self.headers["Host"]).encode()
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
    def log_message(self, *args):
        pass
http.server.ThreadingHTTPServer((sys.argv[2], int(sys.argv[1])), Handler).serve_forever()
`

// startDevServer starts a devServer in a directory of a sandbox.
func (l *lab) startDevServer(sandbox, dir string, port int, address, name string) {
	l.Helper()
	l.ok("exec", sandbox, "--", "sh", "-c", `set -e
mkdir -p "$1" && cd "$1" && printf %s "$2" > /tmp/server.py
setsid -f python3 /tmp/server.py "$3" "$4" "$5" >/dev/null 2>&1 </dev/null`, "sh", dir, devServer, strconv.Itoa(port), address, name)
}

// ports lists the ports of sandboxes.
func (l *lab) ports() []api.Port {
	l.Helper()
	var list api.List[api.Port]
	if err := json.Unmarshal([]byte(l.ok("port", "list", "--json")), &list); err != nil {
		l.Fatal(err)
	}
	return list.Items
}

// served waits until a port of a sandbox is served.
func (l *lab) served(port int) (p api.Port) {
	l.Helper()
	l.eventually(fmt.Sprintf("port %d is served", port), func() bool {
		for _, p = range l.ports() {
			if p.Port == port && p.URL != "" {
				return true
			}
		}
		return false
	})
	return p
}

// hostBrowser resolves the names of sandboxes as browsers do.
func hostBrowser(t testing.TB) *http.Client {
	tr := &http.Transport{DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
		host, port, err := net.SplitHostPort(addr)
		if err != nil || !strings.HasSuffix(host, ".localhost") {
			return nil, fmt.Errorf("%s is not below localhost: %w", addr, err)
		}
		var d net.Dialer
		return d.DialContext(ctx, network, "127.0.0.1:"+port)
	}}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: settleLimit}
}

func fetch(t testing.TB, c *http.Client, url string) (int, string) {
	t.Helper()
	resp, err := c.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(body)
}

// Servers in a sandbox appear in the browser by themselves, each worktree with its own
// name, also after the daemon was killed; a stopped sandbox has a page that says so.
func TestDevServers(t *testing.T) {
	t.Parallel()
	l := newLab(t)
	c := hostBrowser(t)
	l.ok("sandbox", "new", "--name", "shop", "--workspace", "new:shop", "--wait")
	l.startDevServer("shop", "/work/repo", 33781, "127.0.0.1", "main")
	l.startDevServer("shop", "/work/repo/.worktrees/feature", 33782, "0.0.0.0", "feature")
	for _, p := range []api.Port{
		{Port: 33781, URL: "http://shop.sandbox.localhost:33781/"},
		{Port: 33782, URL: "http://feature.shop.sandbox.localhost:33782/", Worktree: "feature"},
	} {
		got := l.served(p.Port)
		if got.URL != p.URL || got.Worktree != p.Worktree || !strings.HasPrefix(got.Program, "python3") {
			t.Errorf("%+v", got)
		}
		want := strings.TrimSuffix(strings.TrimPrefix(p.URL, "http://"), "/")
		if status, body := fetch(t, c, got.URL); status != 200 || !strings.HasSuffix(body, " at "+want) {
			t.Errorf("%s: %d %s", got.URL, status, body)
		}
	}
	if n := len(l.ports()); n != 2 {
		t.Errorf("%d ports: %+v", n, l.ports())
	}
	l.events(c)
	l.websocket()
	if err := l.kill9("agentlabd", "run"); err != nil {
		t.Fatal(err)
	}
	p := l.served(33781)
	if status, body := fetch(t, c, p.URL); status != 200 || !strings.HasPrefix(body, "main at") {
		t.Errorf("after a kill: %d %s", status, body)
	}
	l.ok("sandbox", "stop", "shop", "--wait")
	if status, body := fetch(t, c, p.URL); status != 503 || !strings.Contains(body, "Sandbox not running") {
		t.Errorf("stopped: %d %s", status, body)
	}
}

// events reads an event of a server that does not end its response.
func (l *lab) events(c *http.Client) {
	l.Helper()
	resp, err := c.Get("http://shop.sandbox.localhost:33781/events")
	if err != nil {
		l.Fatal(err)
	}
	defer resp.Body.Close()
	if line, err := bufio.NewReader(resp.Body).ReadString('\n'); err != nil || line != "data: first\n" {
		l.Errorf("event %q, %v", line, err)
	}
}

// websocket exchanges bytes after an upgrade.
func (l *lab) websocket() {
	l.Helper()
	conn, err := net.Dial("tcp", "127.0.0.1:33781")
	if err != nil {
		l.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(settleLimit))
	fmt.Fprintf(conn, "GET / HTTP/1.1\r\nHost: shop.sandbox.localhost:33781\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nOrigin: http://shop.sandbox.localhost:33781\r\n\r\n")
	r := bufio.NewReader(conn)
	resp, err := http.ReadResponse(r, nil)
	if err != nil || resp.StatusCode != http.StatusSwitchingProtocols {
		l.Fatalf("%+v, %v", resp, err)
	}
	back := make([]byte, 5)
	fmt.Fprint(conn, "hello")
	if _, err := io.ReadFull(r, back); err != nil || string(back) != "hello" {
		l.Errorf("%q, %v", back, err)
	}
}

// BenchmarkDevServer compares requests through the port of the host with requests over a
// direct connection to the guest. The difference of the medians must be 1 ms or less.
func BenchmarkDevServer(b *testing.B) {
	l := newLab(b)
	l.ok("sandbox", "new", "--name", "shop", "--wait")
	l.startDevServer("shop", "/tmp/repo", 33783, "0.0.0.0", "main")
	p := l.served(33783)
	direct := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return l.client().Dial(ctx, "shop", 33783)
	}}}
	defer direct.CloseIdleConnections()
	proxied := hostBrowser(b)
	var far, near []time.Duration
	const requests = 200
	for i := range requests + 1 {
		d := timed(func() { fetch(b, direct, "http://shop.sandbox.localhost:33783/") })
		n := timed(func() { fetch(b, proxied, p.URL) })
		if i > 0 { // the first opens the connections
			far, near = append(far, d), append(near, n)
		}
	}
	median := func(d []time.Duration) time.Duration { return slices.Sorted(slices.Values(d))[len(d)/2] }
	added := median(near) - median(far)
	b.Logf("development server: median %v through its port, %v directly, %v added", median(near), median(far), added)
	b.ReportMetric(float64(added.Microseconds()), "µs-added")
	if added > time.Millisecond {
		b.Errorf("its port adds %v to a request", added)
	}
}

package devproxy

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// All sandboxes share the port of this machine; the name selects one.
func TestNamesSelectTheSandbox(t *testing.T) {
	w := newWorld(t, "")
	port := freePort(t)
	for vmid, name := range map[int]string{1001: "shop", 1002: "blog"} {
		w.add(vmid, name)
		w.serve(vmid, guestapi.Listener{Port: port, Program: "node"}, say(name))
	}
	for vmid, name := range map[int]string{1001: "shop", 1002: "blog"} {
		p := w.served(vmid, port)
		if want := fmt.Sprintf("http://%s.sandbox.localhost:%d/", name, port); p.URL != want || p.HostPort != port || p.Program != "node" || p.Problem != "" {
			t.Errorf("got %+v, want %s", p, want)
		}
		resp, body := w.get(p.URL + "a?b;c=1")
		want := fmt.Sprintf("%s HTTP/1.1 /a host=%s.sandbox.localhost:%d origin= query=b;c=1 forwarded=", name, name, port)
		if resp.StatusCode != 200 || body != want {
			t.Errorf("%d %q, want %q", resp.StatusCode, body, want)
		}
	}
	if _, body := w.do(browser(t, true), http.MethodGet, fmt.Sprintf("http://shop.sandbox.localhost:%d/", port)); !strings.HasPrefix(body, "shop HTTP/2.0 /") {
		t.Errorf("over HTTP/2: %q", body)
	}
}

// The working directory of the process selects the worktree.
func TestWorktreesHaveNames(t *testing.T) {
	w := newWorld(t, "")
	main, feature := freePort(t), freePort(t)
	w.add(1001, "shop")
	w.serve(1001, guestapi.Listener{Port: main}, say("main"))
	w.serve(1001, guestapi.Listener{Port: feature, Worktree: "feature/Login_2"}, say("feature"))
	w.served(1001, main)
	p := w.served(1001, feature)
	if want := fmt.Sprintf("http://feature-login-2.shop.sandbox.localhost:%d/", feature); p.URL != want {
		t.Errorf("got %s, want %s", p.URL, want)
	}
	if resp, body := w.get(p.URL); resp.StatusCode != 200 || !strings.HasPrefix(body, "feature") {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
	for _, host := range []string{"shop", "other.shop"} {
		resp, body := w.get(fmt.Sprintf("http://%s.sandbox.localhost:%d/", host, feature))
		if resp.StatusCode != 404 || !strings.Contains(body, p.URL) {
			t.Errorf("%s got %d %s", host, resp.StatusCode, body)
		}
	}
}

// What is not one of our names gets nothing: neither an address, nor a name of the Web
// that resolves to this machine.
func TestOtherHostsAreRefused(t *testing.T) {
	w := newWorld(t, "")
	port := freePort(t)
	w.add(1001, "shop")
	reached := false
	w.serve(1001, guestapi.Listener{Port: port}, http.HandlerFunc(func(http.ResponseWriter, *http.Request) { reached = true }))
	w.served(1001, port)
	at := fmt.Sprintf(":%d", port)
	for _, host := range []string{
		"127.0.0.1" + at, "[::1]" + at, "localhost" + at, "evil.example" + at, "shop.sandbox.localhost.evil.example" + at, "sandbox.localhost" + at,
		"a.b.shop.sandbox.localhost" + at, ".shop.sandbox.localhost" + at, "shop.sandbox.localhost", "shop.sandbox.localhost:1", "shop.sandbox.local" + at,
		"shop.sandbox.localhost." + at, "xsandbox.localhost" + at,
	} {
		resp, _ := exchange(t, dialHost(t, port), "GET / HTTP/1.1\r\nHost: "+host+"\r\n\r\n")
		if resp.StatusCode != http.StatusMisdirectedRequest {
			t.Errorf("%s got %d", host, resp.StatusCode)
		}
	}
	ours := fmt.Sprintf("shop.sandbox.localhost:%d", port)
	for name, text := range map[string]string{
		"no name":         "GET / HTTP/1.0\r\n\r\n",
		"two names":       "GET / HTTP/1.1\r\nHost: " + ours + "\r\nHost: evil.example\r\n\r\n",
		"two lengths":     "POST / HTTP/1.1\r\nHost: " + ours + "\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\na",
		"another in line": "GET http://evil.example/ HTTP/1.1\r\nHost: " + ours + "\r\n\r\n",
		"a tunnel":        "CONNECT " + ours + " HTTP/1.1\r\nHost: " + ours + "\r\n\r\n",
	} {
		if resp, _ := exchange(t, dialHost(t, port), text); resp.StatusCode < 400 {
			t.Errorf("%s got %d", name, resp.StatusCode)
		}
	}
	if resp, body := w.get(fmt.Sprintf("http://none.sandbox.localhost:%d/", port)); resp.StatusCode != 404 || !strings.Contains(body, "none") {
		t.Errorf("an unknown name got %d %s", resp.StatusCode, body)
	}
	if reached {
		t.Error("a request reached the guest")
	}
}

// A page of another sandbox is of the same site to a browser.
func TestRequestsOfOtherSandboxes(t *testing.T) {
	w := newWorld(t, "")
	port := freePort(t)
	for vmid, name := range map[int]string{1001: "shop", 1002: "evil"} {
		w.add(vmid, name)
		w.serve(vmid, guestapi.Listener{Port: port}, say(name))
		w.served(vmid, port)
	}
	shop := fmt.Sprintf("http://shop.sandbox.localhost:%d", port)
	for _, tc := range []struct {
		method, header string
		want           int
	}{
		{"GET", "", 200},
		{"GET", "Origin " + shop, 200},
		{"POST", "Origin http://shop.sandbox.localhost:1", 200},
		{"GET", "Origin http://feature.shop.sandbox.localhost:5173", 200},
		{"POST", "Origin http://evil.sandbox.localhost:3000", 403},
		{"GET", "Origin http://evil.sandbox.localhost:3000", 403},
		{"POST", "Origin http://evil.sandbox.local:3000 Sec-Fetch-Mode navigate", 403},
		{"GET", "Sec-Fetch-Site same-site Sec-Fetch-Mode no-cors", 403},
		{"GET", "Sec-Fetch-Site same-site Sec-Fetch-Mode no-cors Referer http://evil.sandbox.localhost:3000/", 403},
		{"GET", "Sec-Fetch-Site same-site Sec-Fetch-Mode no-cors Referer http://shop.sandbox.localhost:1/", 200},
		{"GET", "Sec-Fetch-Site same-site Sec-Fetch-Mode navigate Referer http://evil.sandbox.localhost:3000/", 200},
		{"GET", "Origin https://app.example Sec-Fetch-Site cross-site", 200},
		{"GET", "Sec-Fetch-Site none Sec-Fetch-Mode navigate", 200},
		{"GET", "Referer http://evil.sandbox.localhost:3000/ Cookie a=b", 403}, // an old browser
		{"GET", "Referer http://shop.sandbox.localhost:3000/ Cookie a=b", 200},
		{"GET", "Cookie a=b", 200}, // a program
	} {
		if resp, body := w.do(browser(t, false), tc.method, shop+"/", strings.Fields(tc.header)...); resp.StatusCode != tc.want {
			t.Errorf("%s %s got %d %s, want %d", tc.method, tc.header, resp.StatusCode, body, tc.want)
		}
	}
}

// echo is a server that upgrades to a protocol and returns each byte.
func echo(t *testing.T) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		protocol := r.Header.Get("Upgrade")
		if protocol == "" {
			w.WriteHeader(http.StatusUpgradeRequired)
			return
		}
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		fmt.Fprintf(rw, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\nX-Origin: %s\r\n\r\n", protocol, r.Header.Get("Origin"))
		_ = rw.Flush()
		_, _ = io.Copy(conn, rw)
	})
}

func TestWebSocket(t *testing.T) {
	w := newWorld(t, "")
	port := freePort(t)
	w.add(1001, "shop")
	w.serve(1001, guestapi.Listener{Port: port, Local: true}, echo(t))
	w.served(1001, port)
	host := fmt.Sprintf("shop.sandbox.localhost:%d", port)
	c := dialHost(t, port)
	resp, r := exchange(t, c, "GET /hmr HTTP/1.1\r\nHost: "+host+"\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nOrigin: http://"+host+"\r\n\r\n")
	if resp.StatusCode != http.StatusSwitchingProtocols || resp.Header.Get("X-Origin") != "http://"+host {
		t.Fatalf("%+v", resp)
	}
	for _, text := range []string{"one", "two"} {
		if _, err := io.WriteString(c, text); err != nil {
			t.Fatal(err)
		}
		back := make([]byte, len(text))
		if _, err := io.ReadFull(r, back); err != nil || string(back) != text {
			t.Fatalf("%q, %v", back, err)
		}
	}
	_ = c.Close()
	other := "GET / HTTP/1.1\r\nHost: " + host + "\r\nConnection: Upgrade\r\nUpgrade: "
	if resp, _ := exchange(t, dialHost(t, port), other+"h2c\r\n\r\n"); resp.StatusCode != http.StatusUpgradeRequired {
		t.Errorf("a tunnel of another protocol got %d", resp.StatusCode)
	}
	if resp, _ := exchange(t, dialHost(t, port), other+"websocket\r\nOrigin: http://evil.sandbox.localhost:1\r\n\r\n"); resp.StatusCode != http.StatusForbidden {
		t.Errorf("another sandbox got %d", resp.StatusCode)
	}
}

// Each event arrives when it is sent.
func TestServerSentEvents(t *testing.T) {
	w := newWorld(t, "")
	port := freePort(t)
	next := make(chan struct{})
	w.add(1001, "shop")
	w.serve(1001, guestapi.Listener{Port: port}, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for i := 0; ; i++ {
			fmt.Fprintf(w, "data: %d\n\n", i)
			_ = http.NewResponseController(w).Flush()
			select {
			case <-next:
			case <-r.Context().Done():
				return
			}
		}
	}))
	p := w.served(1001, port)
	resp, err := browser(t, false).Get(p.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	for i := range 3 {
		if !lines.Scan() || lines.Text() != fmt.Sprintf("data: %d", i) || !lines.Scan() {
			t.Fatalf("event %d: %q, %v", i, lines.Text(), lines.Err())
		}
		next <- struct{}{}
	}
}

// A port that another program uses is not taken: a free one leads to the guest. The
// program sees no connection, because the guest chooses the port.
func TestOccupiedPort(t *testing.T) {
	for _, at := range []struct{ network, host string }{
		{"tcp", "127.0.0.1"}, {"tcp", "[::1]"}, {"tcp4", "0.0.0.0"}, {"tcp", "[::]"}, {"tcp6", "[::]"},
	} {
		l, err := net.Listen(at.network, at.host+":0")
		if err != nil {
			t.Skipf("no address %v: %v", at, err)
		}
		defer l.Close()
		port := uint16(l.Addr().(*net.TCPAddr).Port)
		w := newWorld(t, "")
		w.add(1001, "shop")
		w.serve(1001, guestapi.Listener{Port: port}, say("shop"))
		p := w.served(1001, port)
		if p.HostPort == port || p.HostPort < 1024 || p.Problem == "" {
			t.Errorf("%v: %+v", at, p)
		}
		if _, body := w.get(p.URL); !strings.Contains(body, fmt.Sprintf("host=shop.sandbox.localhost:%d ", p.HostPort)) {
			t.Errorf("%v: %s", at, body)
		}
		if conn := waiting(t, l); conn != nil {
			t.Errorf("%v: a connection from %s", at, conn.RemoteAddr())
		}
	}
}

// waiting returns a connection in the queue of a listener, nil if there is none.
func waiting(t *testing.T, l net.Listener) net.Conn {
	t.Helper()
	raw, err := l.(*net.TCPListener).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	queued := false
	if err := raw.Control(func(fd uintptr) {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		queued = err == nil && n > 0
	}); err != nil {
		t.Fatal(err)
	}
	if !queued {
		return nil
	}
	conn, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	return conn
}

// A guest gets no privileged port, and only a limited number of ports.
func TestHostileListeners(t *testing.T) {
	w := newWorld(t, "")
	w.add(1001, "evil")
	w.serve(1001, guestapi.Listener{Port: 80}, say("evil"))
	if p := w.served(1001, 80); p.HostPort < firstPort {
		t.Errorf("%+v", p)
	}
	w.change(func() {
		g := w.guests[1001]
		g.state++
		for port := range uint16(guestapi.MaxListeners - 1) {
			g.listeners = append(g.listeners, guestapi.Listener{Port: 20000 + port})
		}
	})
	w.until("more ports", func() bool { return len(w.s.Ports(1001)) > 1 })
	if n := len(w.s.Ports(1001)); n != maxOfProject {
		t.Errorf("%d ports", n)
	}
	w.s.mu.Lock()
	defer w.s.mu.Unlock()
	if len(w.s.fronts) != maxOfProject {
		t.Errorf("%d ports of this machine", len(w.s.fronts))
	}
}

// A guest that listens on other ports again and again does not collect ports of this
// machine.
func TestPortsThatChange(t *testing.T) {
	w := newWorld(t, "")
	w.add(1001, "evil")
	base := freePort(t)
	for i := range uint16(3 * maxOfProject) {
		port := base/2 + 1024 + i
		w.s.mu.Lock()
		w.s.seen[seenKey{"uid1001", port}] = w.now.Add(time.Duration(i))
		w.s.mu.Unlock()
	}
	w.serve(1001, guestapi.Listener{Port: base}, say("evil"))
	w.served(1001, base)
	w.s.mu.Lock()
	defer w.s.mu.Unlock()
	if len(w.s.fronts) != maxOfProject || len(w.s.seen) != maxOfProject-1 {
		t.Errorf("%d ports, %d recent ones", len(w.s.fronts), len(w.s.seen))
	}
	if _, ok := w.s.seen[seenKey{"uid1001", base/2 + 1024 + 3*maxOfProject - 1}]; !ok {
		t.Error("the newest one was closed")
	}
}

// After the sandbox has stopped there is a page that says so, for a time.
func TestStoppedSandbox(t *testing.T) {
	w := newWorld(t, "")
	port := freePort(t)
	w.add(1001, "shop")
	w.serve(1001, guestapi.Listener{Port: port}, say("shop"))
	p := w.served(1001, port)
	w.set(1001, func(sb *agentlab.Sandbox) { sb.State, sb.Desired = agentlab.SandboxStopped, agentlab.DesiredStopped })
	w.until("it is not listed", func() bool { return len(w.s.Ports(0)) == 0 })
	resp, body := w.get(p.URL)
	if resp.StatusCode != 503 || !strings.Contains(body, "Sandbox not running") || !strings.Contains(body, "agentlab sandbox start shop") {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
	if _, body := w.get(p.URL, "Accept", "text/html"); !strings.Contains(body, "<h1>Sandbox not running</h1>") {
		t.Errorf("%s", body)
	}
	w.set(1001, func(sb *agentlab.Sandbox) { sb.State, sb.Desired = agentlab.SandboxReady, agentlab.DesiredRunning })
	w.served(1001, port)
	if resp, _ := w.get(p.URL); resp.StatusCode != 200 {
		t.Errorf("after another start: %d", resp.StatusCode)
	}
	w.set(1001, func(sb *agentlab.Sandbox) { sb.State, sb.Desired = agentlab.SandboxStopped, agentlab.DesiredStopped })
	w.until("it is not listed", func() bool { return len(w.s.Ports(0)) == 0 })
	w.change(func() { w.now = w.now.Add(linger + time.Minute) })
	w.until("the port is closed", func() bool {
		c, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err == nil {
			_ = c.Close()
			w.s.changed()
		}
		return err != nil
	})
}

// The ports of a session belong to its name, also without a sandbox.
func TestSession(t *testing.T) {
	w := newWorld(t, "")
	port := freePort(t)
	w.add(1001, "fix-12-abc")
	w.change(func() {
		w.sessions = []agentlab.Session{{ID: "se-aaaaaaaaaaaaa", Name: "fix-12", VMID: 1001, UID: "uid1001", CreatedAt: time.Unix(1, 0)}}
	})
	w.serve(1001, guestapi.Listener{Port: port}, say("fix"))
	p := w.served(1001, port)
	if p.Session != "fix-12" || p.URL != fmt.Sprintf("http://fix-12.sandbox.localhost:%d/", port) {
		t.Fatalf("%+v", p)
	}
	w.change(func() { w.sandboxes = nil })
	w.until("it is not listed", func() bool { return len(w.s.Ports(0)) == 0 })
	if resp, body := w.get(p.URL); resp.StatusCode != 503 || !strings.Contains(body, "agentlab session resume fix-12") || !strings.Contains(body, "agentlab start") {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
}

// A daemon that starts again has the same ports, also for a stopped sandbox.
func TestRestart(t *testing.T) {
	file := filepath.Join(t.TempDir(), "ports.json")
	w := &world{t: t, guests: map[int]*guestWorld{}, changed: make(chan struct{}), now: time.Unix(1e9, 0)}
	stop := w.start(file)
	w.add(1001, "shop")
	w.serve(1001, guestapi.Listener{Port: 80}, say("shop"))
	p := w.served(1001, 80)
	stop()
	w.set(1001, func(sb *agentlab.Sandbox) { sb.State, sb.Desired = agentlab.SandboxStopped, agentlab.DesiredStopped })
	w.start(file)
	var resp *http.Response
	w.until("the page of a stopped sandbox", func() bool {
		c, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", p.HostPort))
		if err != nil {
			return false
		}
		_ = c.Close()
		resp, _ = w.get(p.URL)
		return true
	})
	if resp.StatusCode != 503 {
		t.Errorf("%d", resp.StatusCode)
	}
}

// A guest that cannot be asked keeps its ports, and one that does not answer a request
// gives a page.
func TestFailures(t *testing.T) {
	w := newWorld(t, "")
	port, gone := freePort(t), freePort(t)
	w.add(1001, "shop")
	w.serve(1001, guestapi.Listener{Port: port}, say("shop"))
	w.listen(1001, guestapi.Listener{Port: gone}, "")
	p := w.served(1001, gone)
	if resp, body := w.get(p.URL); resp.StatusCode != 502 || !strings.Contains(body, "did not answer") {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
	w.change(func() { w.guests[1001].err = agentlab.Errorf(agentlab.CodeUnavailable, "busy") })
	w.until("the problem is known", func() bool { return strings.Contains(w.s.Ports(1001)[0].Problem+w.s.Ports(1001)[1].Problem, "busy") })
	if resp, _ := w.get(w.served(1001, port).URL); resp.StatusCode != 200 {
		t.Errorf("%d", resp.StatusCode)
	}
}

// A guest cannot set cookies of other sandboxes, or name other ports of this machine.
func TestResponseHeaders(t *testing.T) {
	w := newWorld(t, "")
	port := freePort(t)
	w.add(1001, "shop")
	w.serve(1001, guestapi.Listener{Port: port}, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Alt-Svc", `h2=":22"`)
		for _, c := range []string{"a=1; Domain=sandbox.localhost; Path=/", "b=2; domain=.other.sandbox.localhost", "c=3; Domain=shop.sandbox.localhost", "d=4; DOMAIN = localhost;Secure"} {
			w.Header().Add("Set-Cookie", c)
		}
	}))
	resp, _ := w.get(w.served(1001, port).URL)
	want := "a=1; Path=/|b=2|c=3; Domain=shop.sandbox.localhost|d=4;Secure"
	if got := strings.Join(resp.Header["Set-Cookie"], "|"); got != want || resp.Header.Get("Alt-Svc") != "" {
		t.Errorf("%s, want %s; %v", got, want, resp.Header)
	}
}

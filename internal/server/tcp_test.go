package server

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/auth"
	"github.com/agentlab-vm/agentlab/test/guard"
)

// raw1 sends text on a new connection and returns what comes until its end.
func raw1(t *testing.T, addr, text string) string {
	t.Helper()
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	_ = conn.SetDeadline(time.Now().Add(guard.Patience))
	if _, err := io.WriteString(conn, text); err != nil {
		t.Fatal(err)
	}
	out, err := io.ReadAll(conn)
	if err != nil && len(out) == 0 {
		t.Fatalf("%v", err)
	}
	return string(out)
}

// TestStrangeRequests tests headers, paths and queries that the access check
// could read differently from the handler.
func TestStrangeRequests(t *testing.T) {
	l := startAccess(t)
	l.err = nil
	own := []agentlab.TokenSandbox{{UID: ownUID}}
	good := l.make(t, auth.Request{Role: agentlab.RoleAdmin})
	bound := l.make(t, auth.Request{Role: agentlab.RoleAdmin, Sandboxes: own})
	bearer := func(token string) string { return "Authorization: Bearer " + token + "\r\n" }
	host := "Host: localhost\r\n"
	for name, c := range map[string]struct {
		line, header string
		want         int
	}{
		"good":                          {"GET /v1/status", host + bearer(good), 200},
		"no token":                      {"GET /v1/status", host, 403},
		"token in the query":            {"GET /v1/status?token=" + good + "&access_token=" + good, host, 403},
		"token as a cookie":             {"GET /v1/status", host + "Cookie: token=" + good + "\r\n", 403},
		"basic":                         {"GET /v1/status", host + "Authorization: Basic " + base64.StdEncoding.EncodeToString([]byte("x:"+good)) + "\r\n", 403},
		"two tokens, good first":        {"GET /v1/status", host + bearer(good) + bearer("x"), 403},
		"two tokens, good last":         {"GET /v1/status", host + bearer("x") + bearer(good), 403},
		"two in one":                    {"GET /v1/status", host + bearer(good+", "+good), 403},
		"empty token":                   {"GET /v1/status", host + "Authorization: Bearer \r\n", 403},
		"lower-case scheme":             {"GET /v1/status", host + "Authorization: bearer " + good + "\r\n", 403},
		"claims to be root":             {"GET /v1/status", host + "X-Forwarded-For: 127.0.0.1\r\nX-Remote-User: root\r\nX-Forwarded-User: root\r\n", 403},
		"unknown path":                  {"GET /v1/nothing", host + bearer(good), 404},
		"unknown path, unknown":         {"GET /v1/nothing", host, 403},
		"other method by header":        {"GET /v1/daemon/stop", host + bearer(good) + "X-HTTP-Method-Override: POST\r\n", 400},
		"stop":                          {"POST /v1/daemon/stop", host + bearer(good), 403},
		"rebound name":                  {"GET /v1/status", "Host: evil.example\r\n" + bearer(good), 403},
		"rebound name with port":        {"GET /v1/status", "Host: evil.example:8843\r\n" + bearer(good), 403},
		"looks like localhost":          {"GET /v1/status", "Host: localhost.evil.example\r\n" + bearer(good), 403},
		"looks like an address":         {"GET /v1/status", "Host: 127.0.0.1.nip.io\r\n" + bearer(good), 403},
		"empty host":                    {"GET /v1/status", "Host: \r\n" + bearer(good), 403},
		"absolute form":                 {"GET http://evil.example/v1/status", host + bearer(good), 403},
		"v4 host":                       {"GET /v1/status", "Host: 127.0.0.1:8843\r\n" + bearer(good), 200},
		"v6 host":                       {"GET /v1/status", "Host: [::1]:8843\r\n" + bearer(good), 200},
		"bare v6 host":                  {"GET /v1/status", "Host: [::1]\r\n" + bearer(good), 200},
		"page of another site":          {"POST /v1/jobs", host + bearer(good) + "Origin: https://evil.example\r\n", 403},
		"its reading":                   {"GET /v1/status", host + bearer(good) + "Sec-Fetch-Site: cross-site\r\n", 403},
		"page of another site reads":    {"GET /v1/status", host + bearer(good) + "Origin: https://evil.example\r\n", 403},
		"page of another site, HEAD":    {"HEAD /v1/status", host + bearer(good) + "Origin: https://evil.example\r\n", 403},
		"page of another site, OPTIONS": {"OPTIONS /v1/status", host + bearer(good) + "Origin: https://evil.example\r\n", 403},
		"page of another port reads":    {"GET /v1/status", host + bearer(good) + "Origin: http://localhost:3000\r\n", 403},
		"it says same-origin":           {"GET /v1/status", host + bearer(good) + "Sec-Fetch-Site: same-origin\r\nOrigin: https://evil.example\r\n", 403},
		"two origins":                   {"GET /v1/status", host + bearer(good) + "Origin: http://localhost\r\nOrigin: https://evil.example\r\n", 403},
		"empty origin":                  {"GET /v1/status", host + bearer(good) + "Origin: \r\n", 403},
		"sandboxed page reads":          {"GET /v1/status", host + bearer(good) + "Origin: null\r\n", 403},
		"page of the same site":         {"GET /v1/status", host + bearer(good) + "Sec-Fetch-Site: same-site\r\n", 403},
		"own origin":                    {"GET /v1/status", host + bearer(good) + "Sec-Fetch-Site: same-origin\r\nOrigin: http://localhost\r\n", 200},
		"own origin with port":          {"GET /v1/status", "Host: 127.0.0.1:8843\r\n" + bearer(good) + "Origin: http://127.0.0.1:8843\r\n", 200},
		"own origin of a rebound name":  {"GET /v1/status", "Host: evil.example\r\n" + bearer(good) + "Origin: http://evil.example\r\n", 403},
		"sandboxed page":                {"POST /v1/jobs", host + bearer(good) + "Origin: null\r\n", 403},
		"bound: own":                    {"GET /v1/sandboxes/box", host + bearer(bound), 200},
		"bound: by number":              {"GET /v1/sandboxes/1", host + bearer(bound), 200},
		"bound: other":                  {"GET /v1/sandboxes/other", host + bearer(bound), 403},
		"bound: unknown":                {"GET /v1/sandboxes/nobody", host + bearer(bound), 403},
		"bound: encoded name":           {"GET /v1/sandboxes/%6fther", host + bearer(bound), 403},
		"bound: encoded own":            {"GET /v1/sandboxes/b%6fx", host + bearer(bound), 200},
		"bound: up and over":            {"GET /v1/sandboxes/box/../other", host + bearer(bound), 307},
		"bound: encoded slash":          {"GET /v1/sandboxes/box%2f..%2fother", host + bearer(bound), 403},
		"bound: events of all":          {"GET /v1/events", host + bearer(bound), 403},
		"bound: events, own":            {"GET /v1/events?sandbox=box", host + bearer(bound), 200},
		"bound: events, other":          {"GET /v1/events?sandbox=other", host + bearer(bound), 403},
		"bound: events, both":           {"GET /v1/events?sandbox=box&sandbox=other", host + bearer(bound), 403},
		"bound: events, swapped":        {"GET /v1/events?sandbox=other&sandbox=box", host + bearer(bound), 403},
		"bound: events, empty":          {"GET /v1/events?sandbox=", host + bearer(bound), 403},
		"bound: events, no value":       {"GET /v1/events?sandbox", host + bearer(bound), 403},
		"bound: events, case":           {"GET /v1/events?Sandbox=box", host + bearer(bound), 403},
		"bound: events, hidden":         {"GET /v1/events?sandbox=box%26sandbox=other", host + bearer(bound), 403},
		"bound: events, half":           {"GET /v1/events?sandbox=other;sandbox=box", host + bearer(bound), 403},
		"bound: events, one job":        {"GET /v1/events?sandbox=box&job=" + otherJobID, host + bearer(bound), 403},
		"bound: its job":                {"GET /v1/jobs/" + stubJobID, host + bearer(bound), 200},
		"bound: another's job":          {"GET /v1/jobs/" + otherJobID, host + bearer(bound), 403},
		"bound: old job":                {"GET /v1/jobs/" + lostJobID, host + bearer(bound), 403},
		"bound: artifact":               {"GET /v1/jobs/" + stubJobID + "/artifacts/a/b.txt", host + bearer(bound), 200},
		"bound: artifact upwards":       {"GET /v1/jobs/" + stubJobID + "/artifacts/..%2f..%2f" + otherJobID, host + bearer(bound), 200}, // a name to the service, which has no such file
	} {
		t.Run(name, func(t *testing.T) {
			answer := raw1(t, l.tcp, c.line+" HTTP/1.1\r\n"+c.header+"Content-Length: 0\r\nConnection: close\r\n\r\n")
			if !strings.HasPrefix(answer, fmt.Sprintf("HTTP/1.1 %d ", c.want)) {
				t.Errorf("want %d, got %.300s", c.want, answer)
			}
			if strings.Contains(answer, good) || strings.Contains(answer, bound) {
				t.Error("the answer holds the token")
			}
		})
	}
	if logged := l.logged.String(); strings.Contains(logged, strings.TrimPrefix(good, auth.Prefix)) || strings.Contains(logged, strings.TrimPrefix(bound, auth.Prefix)) {
		t.Error("the log holds a token")
	}
}

// TestSandboxIsPinned: between the decision and the act a sandbox may go and
// another one come under its name. The act is on what was decided about.
func TestSandboxIsPinned(t *testing.T) {
	l := startAccess(t)
	swap := &swapped{Sandboxes: l.srv.cfg.Services.Sandboxes}
	l.srv.cfg.Services.Sandboxes = swap
	bound := l.make(t, auth.Request{Role: agentlab.RoleAdmin, Sandboxes: []agentlab.TokenSandbox{{UID: ownUID}}})
	for _, r := range l.srv.table {
		if r.target != onSandbox && r.target != byQuery {
			continue
		}
		swap.asked = nil
		l.call(t, r, "box", stubJobID, credential{token: bound})
		if len(swap.asked) == 0 || swap.asked[0] != "box" {
			t.Errorf("%s: decided about %q", r.id, swap.asked)
		}
		for _, later := range swap.asked[1:] {
			if later != "1" {
				t.Errorf("%s: acts on %q, not on the number that was decided about", r.id, later)
			}
		}
	}
}

// swapped notes how sandboxes are looked up.
type swapped struct {
	Sandboxes
	asked []string
}

func (s *swapped) Get(ctx context.Context, name string) (agentlab.Sandbox, error) {
	s.asked = append(s.asked, name)
	return s.Sandboxes.Get(ctx, name)
}

func TestNotWithoutTLS(t *testing.T) {
	h := start(t, nil)
	l, err := net.Listen("tcp", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	if err := h.srv.ServeTCP(l, TCP{}); agentlab.CodeOf(err) != agentlab.CodeDenied {
		t.Errorf("plain HTTP for everybody: %v", err)
	}
	if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Error("the listener is still open")
	}
}

// TestSlowTCP: half a header, half a handshake and half a refused body hold no
// connection for long.
func TestSlowTCP(t *testing.T) {
	cert, _ := selfSigned(t, 1)
	h := start(t, func(c *Config) { c.HeaderTimeout = 100 * time.Millisecond })
	plainAddr := h.serveTCP(t, TCP{})
	h2 := start(t, func(c *Config) { c.HeaderTimeout = 100 * time.Millisecond })
	tlsAddr := h2.serveTCP(t, TCP{TLS: &tls.Config{Certificates: []tls.Certificate{cert}}})
	for name, c := range map[string]struct{ addr, text string }{
		"half a header":    {plainAddr, "GET /v1/status HT"},
		"nothing":          {plainAddr, ""},
		"no handshake":     {tlsAddr, ""},
		"half a handshake": {tlsAddr, "\x16\x03\x01\x02\x00\x01"},
		"a refused body":   {plainAddr, "POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nabc"},
		"refused chunks":   {plainAddr, "POST /v1/jobs HTTP/1.1\r\nHost: evil\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc"},
	} {
		conn, err := net.Dial("tcp", c.addr)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(conn, c.text)
		_ = conn.SetReadDeadline(time.Now().Add(guard.Patience))
		if _, err := io.ReadAll(conn); errors.Is(err, context.DeadlineExceeded) || isTimeout(err) {
			t.Errorf("%s: the connection stays open", name)
		}
		_ = conn.Close()
	}
}

func isTimeout(err error) bool {
	n, ok := errors.AsType[net.Error](err)
	return ok && n.Timeout()
}

// TestTokenEndsStreams: what is open with a token ends with it: an event
// stream, a log that is followed, and a terminal, over TCP and on the unix
// socket. What is open with another one goes on.
func TestTokenEndsStreams(t *testing.T) {
	l := startAccess(t)
	l.err = nil
	pr, pw := io.Pipe()
	l.log = pr
	defer func() { _ = pw.Close() }()
	mk := func(name string) (*client.Client, func()) {
		tok, secret, err := l.tokens.Create(t.Context(), auth.Request{Name: name, Role: agentlab.RoleWrite, TTL: time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		c, err := client.NewRemote(client.Remote{URL: "http://" + l.tcp, Token: secret})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(c.Close)
		return c, func() {
			if _, err := l.tokens.Revoke(t.Context(), tok.ID); err != nil {
				t.Error(err)
			}
		}
	}
	doomed, revoke := mk("doomed")
	kept, _ := mk("kept")

	sub := make(chan error, 1)
	go func() {
		for _, err := range doomed.FollowEvents(t.Context(), client.EventQuery{After: -1}) {
			if err != nil {
				sub <- err
			}
		}
		close(sub)
	}()
	guard.Until(t, "the event stream", func() bool { l.mu.Lock(); defer l.mu.Unlock(); return len(l.subs) == 1 })
	log, err := doomed.JobLog(t.Context(), stubJobID, true, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = log.Close() }()
	cut, err := doomed.Exec(t.Context(), "box", guestapi.ExecRequest{Command: []string{"sh"}})
	if err != nil {
		t.Fatal(err)
	}
	cutFar := <-l.far
	stay, err := kept.Exec(t.Context(), "box", guestapi.ExecRequest{Command: []string{"sh"}})
	if err != nil {
		t.Fatal(err)
	}
	stayFar := <-l.far
	defer func() { _, _ = cut.Close(), stay.Close() }()
	revoke()

	for err := range sub {
		if agentlab.CodeOf(err) != agentlab.CodeDenied {
			t.Errorf("the event stream ended with %v", err)
		}
	}
	if _, err := io.ReadAll(log); err == nil {
		t.Error("the log ended as if it were whole")
	}
	for _, c := range []net.Conn{cut, cutFar} {
		_ = c.SetReadDeadline(time.Now().Add(guard.Patience))
		if _, err := c.Read(make([]byte, 1)); err == nil || isTimeout(err) {
			t.Errorf("the terminal is still open: %v", err)
		}
	}
	if _, err := doomed.Exec(t.Context(), "box", guestapi.ExecRequest{Command: []string{"sh"}}); agentlab.CodeOf(err) != agentlab.CodeDenied {
		t.Errorf("a new terminal: %v", err)
	}
	_ = stayFar.SetDeadline(time.Now().Add(guard.Patience))
	_, _ = io.WriteString(stayFar, "here\n")
	if line, err := bufio.NewReader(stay).ReadString('\n'); line != "here\n" {
		t.Errorf("another token's terminal: %q, %v", line, err)
	}
	_ = stayFar.Close()
}

// selfSigned makes a certificate with that serial number for lab.example and 127.0.0.1.
func selfSigned(t *testing.T, serial int64) (cert tls.Certificate, pemText []byte) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: "lab"}, DNSNames: []string{"lab.example"},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

// TestTLS uses the API over TLS, and refuses every daemon that is not the one
// that was meant, before the token is sent.
func TestTLS(t *testing.T) {
	l := startAccess(t)
	l.err = nil
	cert, ca := selfSigned(t, 1)
	second := start(t, func(c *Config) { c.Services = l.srv.cfg.Services })
	addr := second.serveTCP(t, TCP{TLS: &tls.Config{Certificates: []tls.Certificate{cert}}, Ours: func(name string) bool { return cert.Leaf.VerifyHostname(name) == nil }})
	_, foreign := selfSigned(t, 1)
	pinOf := func(spki []byte) string {
		sum := sha256.Sum256(spki)
		return "sha256/" + base64.StdEncoding.EncodeToString(sum[:])
	}
	pin, wrong := pinOf(cert.Leaf.RawSubjectPublicKeyInfo), pinOf([]byte("another"))
	token := l.make(t, auth.Request{Role: agentlab.RoleWrite})
	for name, c := range map[string]struct {
		r    client.Remote
		want agentlab.Code
	}{
		"authority":          {client.Remote{CA: ca}, ""},
		"pin":                {client.Remote{Pin: pin}, ""},
		"both":               {client.Remote{CA: ca, Pin: pin}, ""},
		"nothing":            {client.Remote{}, agentlab.CodeDenied},
		"another authority":  {client.Remote{CA: foreign}, agentlab.CodeDenied},
		"another key":        {client.Remote{Pin: wrong}, agentlab.CodeDenied},
		"authority, not key": {client.Remote{CA: ca, Pin: wrong}, agentlab.CodeDenied},
		"key, not authority": {client.Remote{CA: foreign, Pin: pin}, agentlab.CodeDenied},
	} {
		t.Run(name, func(t *testing.T) {
			c.r.URL, c.r.Token = "https://"+addr, token
			remote, err := client.NewRemote(c.r)
			if err != nil {
				t.Fatal(err)
			}
			defer remote.Close()
			_, err = remote.Status(t.Context())
			if agentlab.CodeOf(err) != c.want {
				t.Errorf("status: %v", err)
			}
			conn, err := remote.Exec(t.Context(), "box", guestapi.ExecRequest{Command: []string{"cat"}})
			if agentlab.CodeOf(err) != c.want {
				t.Fatalf("exec: %v", err)
			}
			if err != nil {
				return
			}
			echo(t, conn, <-l.far)
		})
	}
	t.Run("names in the certificate", func(t *testing.T) {
		for host, want := range map[string]int{"lab.example": 200, "LAB.example:1": 200, "evil.example": 403} {
			conn, err := tls.Dial("tcp", addr, &tls.Config{InsecureSkipVerify: true})
			if err != nil {
				t.Fatal(err)
			}
			if proto := conn.ConnectionState().NegotiatedProtocol; proto == "h2" {
				t.Error("HTTP/2 was agreed on")
			}
			_, _ = fmt.Fprintf(conn, "GET /v1/status HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\nConnection: close\r\n\r\n", host, token)
			resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
			if err != nil || resp.StatusCode != want {
				t.Errorf("%s: %v, %v", host, resp, err)
			}
			_ = conn.Close()
		}
	})
	t.Run("plain HTTP", func(t *testing.T) {
		if got := raw1(t, addr, "GET /v1/status HTTP/1.1\r\nHost: localhost\r\n\r\n"); !strings.HasPrefix(got, "HTTP/1.0 400") {
			t.Errorf("%q", got)
		}
	})
}

// echo sends both ways, with a half close, over a stream.
func echo(t *testing.T, near, far net.Conn) {
	t.Helper()
	defer func() { _, _ = near.Close(), far.Close() }()
	_ = near.SetDeadline(time.Now().Add(guard.Patience))
	text := bytes.Repeat([]byte("payload "), 1<<14)
	go func() { _, _ = io.Copy(far, far); _ = far.(*net.TCPConn).CloseWrite() }()
	go func() { _, _ = near.Write(text); _ = near.(interface{ CloseWrite() error }).CloseWrite() }()
	if got, err := io.ReadAll(near); err != nil || !bytes.Equal(got, text) {
		t.Errorf("%d of %d bytes came back, %v", len(got), len(text), err)
	}
}

func TestRemoteRefused(t *testing.T) {
	for name, c := range map[string]struct {
		r    client.Remote
		want agentlab.Code
	}{
		"in clear":        {client.Remote{URL: "http://lab.example", Token: "t"}, agentlab.CodeDenied},
		"no scheme":       {client.Remote{URL: "lab.example:8843", Token: "t"}, agentlab.CodeInvalid},
		"a path":          {client.Remote{URL: "https://lab.example/x", Token: "t"}, agentlab.CodeInvalid},
		"a user":          {client.Remote{URL: "https://u:p@lab.example", Token: "t"}, agentlab.CodeInvalid},
		"another scheme":  {client.Remote{URL: "ssh://lab.example", Token: "t"}, agentlab.CodeInvalid},
		"no token":        {client.Remote{URL: "https://lab.example"}, agentlab.CodeInvalid},
		"a header inside": {client.Remote{URL: "https://lab.example", Token: "t\r\nX: y"}, agentlab.CodeInvalid},
		"no certificates": {client.Remote{URL: "https://lab.example", Token: "t", CA: []byte("x")}, agentlab.CodeInvalid},
		"no pin":          {client.Remote{URL: "https://lab.example", Token: "t", Pin: "sha256/x"}, agentlab.CodeInvalid},
		"another hash":    {client.Remote{URL: "https://lab.example", Token: "t", Pin: "md5/x"}, agentlab.CodeInvalid},
	} {
		if _, err := client.NewRemote(c.r); agentlab.CodeOf(err) != c.want {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestRedirectKeepsToken checks that a redirect by a foreign server does not
// send the token anywhere.
func TestRedirectKeepsToken(t *testing.T) {
	reached := false
	elsewhere, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/taken" {
			reached = true
			return
		}
		http.Redirect(w, r, "http://"+elsewhere.Addr().String()+"/taken", http.StatusTemporaryRedirect)
	})}
	for _, l := range []net.Listener{l, elsewhere} {
		go func() { _ = srv.Serve(l) }()
	}
	defer func() { _ = srv.Close() }()
	c, err := client.NewRemote(client.Remote{URL: "http://" + l.Addr().String(), Token: "t"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Status(t.Context()); err == nil || reached {
		t.Errorf("err %v, reached %t", err, reached)
	}
}

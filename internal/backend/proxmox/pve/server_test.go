package pve

import (
	"bufio"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	testToken  = "agentlab@pve!ctl"
	testSecret = "85e95062-0ddf-4253-b7dd-6280d9b4ad02"
)

// wire is a TLS server that answers with the bytes that a test gives it: what
// net/http's server would never send, such as a status line with a reason of
// its own, can be sent by it.
type wire struct {
	t    *testing.T
	ln   net.Listener
	ca   []byte // PEM
	pin  string
	wg   sync.WaitGroup
	mu   sync.Mutex
	seen []seen
	open map[net.Conn]bool
	// answer returns what is sent for the nth request (from 0); "" closes the
	// connection instead.
	answer func(n int, r *http.Request, body string) string
}

type seen struct {
	method, uri, body, auth, contentType string
	length                               int64
	chunked                              bool
}

func newWire(t *testing.T, answer func(n int, r *http.Request, body string) string) *wire {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "pve"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	ln, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}, MinVersion: tls.VersionTLS12})
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(der)
	w := &wire{
		t: t, ln: ln, pin: colons(sum[:]), answer: answer, open: map[net.Conn]bool{},
		ca: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
	}
	w.wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			w.mu.Lock()
			w.open[c] = true
			w.mu.Unlock()
			w.wg.Go(func() { w.serve(c) })
		}
	})
	t.Cleanup(func() {
		_ = ln.Close()
		w.mu.Lock()
		for c := range w.open {
			_ = c.Close()
		}
		w.mu.Unlock()
		w.wg.Wait()
	})
	return w
}

func (w *wire) serve(c net.Conn) {
	defer func() { _ = c.Close() }()
	r := bufio.NewReader(c)
	for {
		req, err := http.ReadRequest(r)
		if err != nil {
			return
		}
		body, err := io.ReadAll(req.Body)
		if err != nil {
			return
		}
		w.mu.Lock()
		n := len(w.seen)
		w.seen = append(w.seen, seen{
			req.Method, req.RequestURI, string(body), req.Header.Get("Authorization"), req.Header.Get("Content-Type"),
			req.ContentLength, len(req.TransferEncoding) > 0,
		})
		w.mu.Unlock()
		out := w.answer(n, req, string(body))
		if out == "" {
			return
		}
		if _, err := io.WriteString(c, out); err != nil {
			return
		}
	}
}

func (w *wire) requests() []seen {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]seen(nil), w.seen...)
}

func (w *wire) options() RESTOptions {
	return RESTOptions{
		URL: "https://" + w.ln.Addr().String(), TokenID: testToken, Secret: testSecret, CA: w.ca,
		Retry: []time.Duration{time.Millisecond, time.Millisecond},
	}
}

func (w *wire) client() *Client {
	tr, err := NewREST(w.options())
	if err != nil {
		w.t.Fatal(err)
	}
	c := New(tr).WithPoll(Poll{First: time.Millisecond, Max: 5 * time.Millisecond})
	w.t.Cleanup(func() { _ = c.Close() })
	return c
}

// reply is an answer with a status line and a body.
func reply(status, body string) string {
	return fmt.Sprintf("HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", status, len(body), body)
}

// data is an answer that succeeds.
func data(s string) string { return reply("200 OK", `{"data":`+s+`}`) }

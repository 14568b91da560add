package pve

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/test/guard"
)

// Go's client sends a body of unknown length in chunks and would put a body
// into DELETE: the node refuses both, and with them every change.
func TestRESTRequestsAreAccepted(t *testing.T) {
	w := newWire(t, func(n int, _ *http.Request, _ string) string {
		return data(`"UPID:pve:00001FD8:0003D7EE:6B00F8DB:qmclone:9000:agentlab@pve!ctl:"`)
	})
	c, ctx := w.client(), guard.Context(t)
	if _, err := c.Clone(ctx, "pve", 9000, CloneOptions{NewID: 101, Name: "sb-101", Description: "a b+c;d=é\nx"}); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Destroy(ctx, "pve", 101, false); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Start(ctx, "pve", 101); err != nil {
		t.Fatal(err)
	}
	if _, err := c.DeleteContent(ctx, "pve", "local-zfs:base-9000-disk-0/vm-101-disk-0"); err != nil {
		t.Fatal(err)
	}
	got := w.requests()
	for _, r := range got {
		if r.chunked || r.method == "DELETE" && r.length > 0 || r.auth != "PVEAPIToken="+testToken+"="+testSecret {
			t.Errorf("%+v", r)
		}
	}
	if r := got[0]; r.uri != "/api2/json/nodes/pve/qemu/9000/clone" || r.contentType != "application/x-www-form-urlencoded" ||
		r.body != "description=a%20b%2Bc%3Bd%3D%C3%A9%0Ax&full=0&name=sb-101&newid=101" {
		t.Errorf("clone: %+v", r)
	}
	if r := got[1]; r.uri != "/api2/json/nodes/pve/qemu/101?destroy-unreferenced-disks=0&purge=1" {
		t.Errorf("destroy: %+v", r)
	}
	if r := got[2]; r.length != 0 {
		t.Errorf("a POST without parameters: %+v", r)
	}
	if r := got[3]; r.uri != "/api2/json/nodes/pve/storage/local-zfs/content/base-9000-disk-0/vm-101-disk-0" {
		t.Errorf("volume: %+v", r)
	}
	if c.Calls() != 4 {
		t.Errorf("%d calls counted", c.Calls())
	}
}

// Before 8.4 the text of a fault is in the status line alone.
func TestRESTFaultTexts(t *testing.T) {
	for name, answer := range map[string]string{
		"8.4": reply("500 VM 101 not running", `{"data":null,"message":"VM 101 not running\n"}`),
		"8.3": reply("500 VM 101 not running", `{"data":null}`),
		"raw": "HTTP/1.1 500 VM 101 not running\r\nConnection: close\r\nContent-Length: 0\r\n\r\n",
	} {
		w := newWire(t, func(int, *http.Request, string) string { return answer })
		_, err := w.client().Suspend(guard.Context(t), "pve", 101)
		if agentlab.CodeOf(err) != agentlab.CodeConflict || !strings.Contains(err.Error(), "VM 101 not running") {
			t.Errorf("%s: %v", name, err)
		}
	}
	w := newWire(t, func(int, *http.Request, string) string {
		return reply("400 Parameter verification failed.", `{"message":"Parameter verification failed.\n","errors":{"name":"invalid format - value does not look like a valid DNS name\n"},"data":null}`)
	})
	err := w.client().Set(guard.Context(t), "pve", 101, Changes{Set: map[string]string{"name": "a_b"}})
	if e, _ := errors.AsType[*agentlab.Error](err); e == nil || e.Code != agentlab.CodeInvalid || e.Field != "name" || !strings.Contains(e.Message, "valid DNS name") {
		t.Errorf("refused parameter: %v", err)
	}
}

// A call whose answer is lost may have been carried out, and must not be sent
// again: a second clone, a second start would follow.
func TestRESTLostAnswers(t *testing.T) {
	lost := map[string]func() string{
		"connection closed":         func() string { return "" },
		"596 Broken pipe":           func() string { return "HTTP/1.1 596 Broken pipe\r\nContent-Length: 0\r\n\r\n" },
		"596 Connection timed out":  func() string { return "HTTP/1.1 596 Connection timed out\r\nContent-Length: 0\r\n\r\n" },
		"599 Too many redirections": func() string { return "HTTP/1.1 599 x\r\nContent-Length: 0\r\n\r\n" },
		"no JSON":                   func() string { return reply("200 OK", "<html>") },
		"a redirect": func() string {
			return "HTTP/1.1 302 Found\r\nLocation: https://127.0.0.2/\r\nContent-Length: 0\r\n\r\n"
		},
		"an answer that is cut off":  func() string { return "HTTP/1.1 200 OK\r\nContent-Length: 99\r\nConnection: close\r\n\r\n{\"data\":1" },
		"an answer without a task":   func() string { return data("null") },
		"an answer with another one": func() string { return data(`"UPID:"`) },
	}
	for name, answer := range lost {
		w := newWire(t, func(n int, _ *http.Request, _ string) string { return answer() })
		if name == "an answer that is cut off" {
			w.answer = cutOff(w, answer())
		}
		c := w.client()
		_, err := c.Clone(guard.Context(t), "pve", 9000, CloneOptions{NewID: 101})
		if agentlab.CodeOf(err) != agentlab.CodeUnknownOutcome {
			t.Errorf("clone, %s: %s: %v", name, agentlab.CodeOf(err), err)
		}
		if n := len(w.requests()); n != 1 {
			t.Errorf("clone, %s: sent %d times", name, n)
		}
	}
}

// cutOff sends an answer that promises more than it has.
func cutOff(w *wire, answer string) func(int, *http.Request, string) string {
	return func(int, *http.Request, string) string {
		w.mu.Lock()
		defer w.mu.Unlock()
		for c := range w.open {
			_, _ = c.Write([]byte(answer))
			_ = c.Close()
			delete(w.open, c)
		}
		return ""
	}
}

func TestRESTReadsAgain(t *testing.T) {
	w := newWire(t, func(n int, _ *http.Request, _ string) string {
		switch n {
		case 0:
			return "HTTP/1.1 596 Broken pipe\r\nContent-Length: 0\r\n\r\n"
		case 1:
			return "HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n"
		}
		return data(`[]`)
	})
	if _, err := w.client().VMs(guard.Context(t), "pve"); err == nil || agentlab.CodeOf(err) != agentlab.CodeInternal {
		t.Errorf("an answer of the node is not asked for again: %v", err)
	}
	if _, err := w.client().VMs(guard.Context(t), "pve"); err != nil {
		t.Error(err)
	}
	down := newWire(t, func(int, *http.Request, string) string { return "" })
	c := down.client()
	if _, err := c.VMs(guard.Context(t), "pve"); agentlab.CodeOf(err) != agentlab.CodeUnavailable {
		t.Errorf("a node that does not answer: %v", err)
	}
	if c.Calls() != 3 {
		t.Errorf("%d calls, want 3", c.Calls())
	}
}

func TestRESTNothingWasSent(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	o := RESTOptions{URL: "https://" + ln.Addr().String(), TokenID: testToken, Secret: testSecret, Retry: []time.Duration{}}
	_ = ln.Close()
	tr, err := NewREST(o)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := New(tr).Start(guard.Context(t), "pve", 101); agentlab.CodeOf(err) != agentlab.CodeUnavailable {
		t.Errorf("dial without a listener: %v", err)
	}
	ctx, cancel := context.WithCancel(guard.Context(t))
	cancel()
	if _, err := New(tr).Start(ctx, "pve", 101); agentlab.CodeOf(err) != agentlab.CodeUnavailable || !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled before: %v", err)
	}
}

func TestRESTCancelledDuringCall(t *testing.T) {
	got := make(chan struct{})
	release := make(chan struct{})
	w := newWire(t, func(int, *http.Request, string) string {
		close(got)
		<-release
		return ""
	})
	ctx, cancel := context.WithCancel(guard.Context(t))
	go func() {
		<-got
		cancel()
	}()
	_, err := w.client().Start(ctx, "pve", 101)
	close(release)
	if agentlab.CodeOf(err) != agentlab.CodeUnknownOutcome || !errors.Is(err, context.Canceled) {
		t.Errorf("%s: %v", agentlab.CodeOf(err), err)
	}
}

func TestTLSIsNeverInsecure(t *testing.T) {
	w := newWire(t, func(int, *http.Request, string) string { return data(`{"version":"8.4.21"}`) })
	ask := func(change func(*RESTOptions)) error {
		o := w.options()
		change(&o)
		tr, err := NewREST(o)
		if err != nil {
			return err
		}
		defer func() { _ = tr.Close() }()
		_, err = New(tr).Version(guard.Context(t))
		return err
	}
	for name, change := range map[string]func(*RESTOptions){
		"CA":                      func(*RESTOptions) {},
		"fingerprint":             func(o *RESTOptions) { o.CA, o.Fingerprint = nil, w.pin },
		"fingerprint, lower case": func(o *RESTOptions) { o.CA, o.Fingerprint = nil, strings.ToLower(strings.ReplaceAll(w.pin, ":", "")) },
	} {
		if err := ask(change); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	other := newWire(t, nil)
	for name, change := range map[string]func(*RESTOptions){
		"neither":               func(o *RESTOptions) { o.CA = nil },
		"another CA":            func(o *RESTOptions) { o.CA = other.ca },
		"another fingerprint":   func(o *RESTOptions) { o.CA, o.Fingerprint = nil, other.pin },
		"another name":          func(o *RESTOptions) { o.URL = strings.Replace(o.URL, "127.0.0.1", "localhost", 1) },
		"fingerprint, no match": func(o *RESTOptions) { o.CA, o.Fingerprint = nil, strings.Repeat("00", 32) },
	} {
		before := len(w.requests())
		if err := ask(change); agentlab.CodeOf(err) != agentlab.CodeDenied || agentlab.HintOf(err) == "" {
			t.Errorf("%s: %s: %v", name, agentlab.CodeOf(err), err)
		}
		if n := len(w.requests()) - before; n != 0 {
			t.Errorf("%s: the token was sent", name)
		}
	}
	for name, change := range map[string]func(*RESTOptions){
		"http":                  func(o *RESTOptions) { o.URL = strings.Replace(o.URL, "https", "http", 1) },
		"a path":                func(o *RESTOptions) { o.URL += "/api2/json" },
		"CA without one":        func(o *RESTOptions) { o.CA = []byte("x") },
		"half a fingerprint":    func(o *RESTOptions) { o.CA, o.Fingerprint = nil, w.pin[:50] },
		"CA and fingerprint":    func(o *RESTOptions) { o.Fingerprint = w.pin },
		"no token":              func(o *RESTOptions) { o.TokenID = "agentlab@pve" },
		"a secret that is none": func(o *RESTOptions) { o.Secret = "x\r\nHost: y" },
	} {
		if err := ask(change); agentlab.CodeOf(err) != agentlab.CodeInvalid {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestRESTGzip(t *testing.T) {
	var z bytes.Buffer
	g := gzip.NewWriter(&z)
	_, _ = fmt.Fprintf(g, `{"data":[{"vmid":101,"status":"running","name":"%s"}]}`, strings.Repeat("x", 2000))
	_ = g.Close()
	w := newWire(t, func(_ int, r *http.Request, _ string) string {
		if r.Header.Get("Accept-Encoding") != "gzip" {
			return reply("500 no gzip", "{}")
		}
		return fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n%s", z.Len(), z.String())
	})
	vms, err := w.client().VMs(guard.Context(t), "pve")
	if err != nil || len(vms) != 1 || len(vms[0].Name) != 2000 {
		t.Errorf("%v %v", vms, err)
	}
}

func TestTokenFiles(t *testing.T) {
	path := filepath.Join(t.TempDir(), "token")
	write := func(text string, mode os.FileMode) {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
	}
	for _, text := range []string{testSecret, testSecret + "\n", testToken + "=" + testSecret + "\n"} {
		write(text, 0o600)
		if got, err := ReadTokenFile(path, testToken); err != nil || got != testSecret {
			t.Errorf("%q: %v", text, err)
		}
	}
	for _, c := range []struct {
		text string
		mode os.FileMode
		code agentlab.Code
	}{
		{testSecret, 0o640, agentlab.CodeDenied}, {testSecret, 0o604, agentlab.CodeDenied},
		{"x", 0o600, agentlab.CodeInvalid}, {"other@pve!ctl=" + testSecret, 0o600, agentlab.CodeInvalid}, {"", 0o600, agentlab.CodeInvalid},
	} {
		write(c.text, c.mode)
		_, err := ReadTokenFile(path, testToken)
		if agentlab.CodeOf(err) != c.code || strings.Contains(err.Error(), testSecret) {
			t.Errorf("%q %o: %v", c.text, c.mode, err)
		}
	}
	if _, err := ReadTokenFile(path+"x", testToken); agentlab.CodeOf(err) != agentlab.CodeUnavailable {
		t.Error(err)
	}
}

func TestEncodeSSHKeys(t *testing.T) {
	const key = "ssh-ed25519 AAAA+/= agent@lab\n"
	got := EncodeSSHKeys(key)
	if got != "ssh-ed25519%20AAAA%2B%2F%3D%20agent%40lab%0A" {
		t.Error(got)
	}
	if back, err := url.PathUnescape(got); err != nil || back != key {
		t.Error(back, err)
	}
}

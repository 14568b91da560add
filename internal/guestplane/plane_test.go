package guestplane_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/artifact"
	"github.com/agentlab-vm/agentlab/internal/guestplane"
	"github.com/agentlab-vm/agentlab/internal/guestplane/guesttest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const secret = "hunter2-very-secret"

type client struct {
	t *testing.T
	*guesttest.Controller
	http *http.Client
}

func setup(t *testing.T, l artifact.Limits) *client {
	t.Helper()
	tr := &http.Transport{}
	t.Cleanup(tr.CloseIdleConnections)
	c := guesttest.New(t, guestapi.BootstrapResponse{
		Env: map[string]string{"KEY": secret}, Job: &guestapi.Job{Task: "true", Agent: "shell", Upload: true},
	}, l)
	return &client{t, c, &http.Client{Transport: tr}}
}

// do sends a request; token "" sends none.
func (c *client) do(method, path, token string, body io.Reader) (int, []byte) {
	c.t.Helper()
	req, err := http.NewRequestWithContext(c.t.Context(), method, c.URL()+path, body)
	if err != nil {
		c.t.Fatal(err)
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		c.t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	p, err := io.ReadAll(resp.Body)
	if err != nil {
		c.t.Fatal(err)
	}
	return resp.StatusCode, p
}

func (c *client) runner() string { return c.Response().Runner.Token }
func (c *client) uploads() string {
	return c.Response().Artifact.Token
}

func jsonBody(v any) io.Reader {
	p, _ := json.Marshal(v)
	return bytes.NewReader(p)
}

func (c *client) appendLog(off int, text string, final bool) guestapi.LogAck {
	c.t.Helper()
	path := fmt.Sprintf("%s?offset=%d", guestapi.PathLog, off)
	if final {
		path += "&final=1"
	}
	st, p := c.do("POST", path, c.runner(), strings.NewReader(text))
	var ack guestapi.LogAck
	if err := json.Unmarshal(p, &ack); err != nil || st != 200 {
		c.t.Fatalf("append: %d %s", st, p)
	}
	return ack
}

// Nothing in the answer tells why a token is not good.
func TestBootstrapHasNoOracle(t *testing.T) {
	c := setup(t, artifact.Limits{})
	ask := func(token string, vmid int) (int, string) {
		st, p := c.do("POST", guestapi.PathBootstrap, "", jsonBody(guestapi.BootstrapRequest{Token: token, VMID: vmid}))
		return st, string(p)
	}
	st, wrong := ask("no-such-token", c.VMID)
	if st != http.StatusForbidden {
		t.Errorf("unknown token: %d", st)
	}
	same := func(name string, st int, body string) {
		t.Helper()
		if st != http.StatusForbidden || body != wrong {
			t.Errorf("%s: %d %s, want as %s", name, st, body, wrong)
		}
	}
	st, body := ask(c.Token, c.VMID+1)
	same("foreign vmid", st, body)
	st, body = ask("", c.VMID)
	same("no token", st, body)
	st, body = ask(strings.Repeat("x", 300), c.VMID)
	same("long token", st, body)
	c.Fail(agentlab.Errorf(agentlab.CodeUnavailable, "the bundle %s cannot be opened", secret))
	st, body = ask(c.Token, c.VMID)
	if st != http.StatusServiceUnavailable || strings.Contains(body, secret) {
		t.Errorf("a fault of ours: %d %s", st, body)
	}
	c.Fail(nil)
	st, body = ask(c.Token, c.VMID)
	if st != 200 || !strings.Contains(body, secret) {
		t.Fatalf("good token after a fault: %d %s", st, body)
	}
	st, body = ask(c.Token, c.VMID)
	same("replay", st, body)
}

func TestBootstrapRate(t *testing.T) {
	c := setup(t, artifact.Limits{})
	many := 0
	for range 20 {
		if st, _ := c.do("POST", guestapi.PathBootstrap, "", strings.NewReader(`{"token":"x","vmid":42}`)); st == http.StatusTooManyRequests {
			many++
		}
	}
	if many == 0 {
		t.Error("guessing tokens is not slowed down")
	}
	if st, _ := c.do("POST", guestapi.PathReport, c.runner(), strings.NewReader(`{"status":"RUNNING","phase":"clone"}`)); st != 200 {
		t.Errorf("a report after that: %d", st)
	}
}

func TestBearerTokens(t *testing.T) {
	c := setup(t, artifact.Limits{})
	calls := []struct{ method, path, good string }{
		{"POST", guestapi.PathReport, c.runner()},
		{"GET", guestapi.PathDirective, c.runner()},
		{"POST", guestapi.PathLog, c.runner()},
		{"GET", guestapi.PathRepo, c.runner()},
		{"POST", guestapi.PathNetwork, c.runner()},
		{"PUT", guestapi.PathUpload + "a", c.uploads()},
	}
	for _, call := range calls {
		other := c.uploads()
		if call.good == other {
			other = c.runner()
		}
		for _, token := range []string{"", "x", other, c.Token, strings.Repeat("y", 1000)} {
			if st, p := c.do(call.method, call.path, token, strings.NewReader("{}")); st != 401 || strings.Contains(string(p), "grant") {
				t.Errorf("%s %s with %.10q: %d %s", call.method, call.path, token, st, p)
			}
		}
	}
	// The same tokens through another sandbox's channel are worth nothing.
	other := c.Plane(guestplane.Config{})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- other.Serve(ctx, c.VMID+1, l) }()
	for _, call := range calls {
		req, _ := http.NewRequestWithContext(t.Context(), call.method, "http://"+l.Addr().String()+call.path, strings.NewReader("{}"))
		req.Header.Set("Authorization", "Bearer "+call.good)
		resp, err := c.http.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		if resp.StatusCode != 401 {
			t.Errorf("%s through another channel: %d", call.path, resp.StatusCode)
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	c.Revoke()
	if st, _ := c.do("GET", guestapi.PathDirective, c.runner(), nil); st != 401 {
		t.Errorf("revoked: %d", st)
	}
}

func TestReportsAreCheckedAndRedacted(t *testing.T) {
	c := setup(t, artifact.Limits{})
	send := func(body string) int {
		st, _ := c.do("POST", guestapi.PathReport, c.runner(), strings.NewReader(body))
		return st
	}
	bad := []string{
		``, `x`, `[]`, `null`, `{"status":"RUNNING"}`, `{"status":"QUEUED","phase":"agent"}`, `{"status":"RUNNING","phase":"x"}`,
		`{"status":"FAILED","phase":"done","exit_code":99999}`, `{"status":"RUNNING","phase":"agent"}{}`,
		`{"status":"COMPLETED","phase":"done","result":{"base_commit":"--upload-pack=x"}}`,
		`{"status":"COMPLETED","phase":"done","result":{"branch":"a..b"}}`,
		`{"status":"COMPLETED","phase":"done","result":{"commits":-1}}`,
		`{"status":"RUNNING","phase":"agent","x":` + strings.Repeat("[", 50) + strings.Repeat("]", 50) + `}`,
	}
	for _, b := range bad {
		if st := send(b); st != http.StatusBadRequest {
			t.Errorf("%.60s: %d", b, st)
		}
	}
	if st := send(`{"status":"RUNNING","phase":"agent","message":"` + strings.Repeat("x", 100<<10) + `"}`); st != http.StatusRequestEntityTooLarge {
		t.Errorf("large: %d", st)
	}
	if len(c.Reports()) != 0 {
		t.Fatalf("reports %+v", c.Reports())
	}
	msg := "line one\n\x1b[31mline two " + secret + " \u202e end" + strings.Repeat("é", 2000)
	p, _ := json.Marshal(guestapi.Report{Status: "RUNNING", Phase: "agent", Message: msg})
	if st := send(string(p)); st != 200 {
		t.Fatalf("good: %d", st)
	}
	got := c.Reports()[0].Message
	if !strings.HasPrefix(got, "line one [31mline two [redacted]") || strings.ContainsAny(got, "\n\x1b\u202e") || len(got) > 1100 {
		t.Errorf("message %q", got)
	}
}

func TestDirectiveLongPoll(t *testing.T) {
	c := setup(t, artifact.Limits{})
	if st, _ := c.do("GET", guestapi.PathDirective+"?wait=56", c.runner(), nil); st != 400 {
		t.Errorf("wait=56: %d", st)
	}
	got := make(chan string)
	go func() {
		_, p := c.do("GET", guestapi.PathDirective+"?wait=50", c.runner(), nil)
		got <- string(p)
	}()
	c.Direct("CANCELLED")
	if p := <-got; !strings.Contains(p, `"stop":"CANCELLED"`) {
		t.Errorf("got %s", p)
	}
}

// A sender that goes by the answers, as the runner does, ends with a log in
// which no secret stands, wherever the chunks were cut.
func TestLogIsMaskedAcrossChunks(t *testing.T) {
	c := setup(t, artifact.Limits{})
	text := "start " + secret + " middle hunter2-very-" + " x " + secret + secret + " end hunter2-ver"
	for _, step := range []int{1, 3, 7, 1000} {
		job := setup(t, artifact.Limits{})
		size, seen := 0, 0
		for size < len(text) {
			seen = min(len(text), max(seen, size)+step)
			ack := job.appendLog(size, text[size:seen], seen == len(text))
			if int(ack.Size) < size {
				t.Fatalf("step %d: size went back to %d", step, ack.Size)
			}
			size = int(ack.Size)
		}
		want := strings.ReplaceAll(text, secret, strings.Repeat("*", len(secret)))
		if got := job.Log(); got != want {
			t.Errorf("step %d:\n got %q\nwant %q", step, got, want)
		}
	}
	if a := c.appendLog(10, "gap", false); a.Size != 0 {
		t.Errorf("a gap: %+v", a)
	}
	c.appendLog(0, "hello\n", false)
	if a := c.appendLog(0, "hel", false); a.Size != 6 {
		t.Errorf("a repetition: %+v", a)
	}
	if a := c.appendLog(3, "lo\nworld\n", false); a.Size != 12 || c.Log() != "hello\nworld\n" {
		t.Errorf("an overlap: %+v %q", a, c.Log())
	}
	for _, q := range []string{"?offset=-1", "?offset=x", "?offset=99999999999999999999", "?final=2"} {
		if st, _ := c.do("POST", guestapi.PathLog+q, c.runner(), strings.NewReader("x")); st != 400 {
			t.Errorf("%s: %d", q, st)
		}
	}
	if st, _ := c.do("POST", guestapi.PathLog, c.runner(), bytes.NewReader(make([]byte, 1<<20+1))); st != 413 {
		t.Errorf("large chunk: %d", st)
	}
}

func TestLogQuota(t *testing.T) {
	c := setup(t, artifact.Limits{LogBytes: 10})
	if a := c.appendLog(0, "0123456789abcdef", false); !a.Full || a.Size < 10 {
		t.Errorf("got %+v", a)
	}
	if a := c.appendLog(16, "more", false); !a.Full {
		t.Errorf("got %+v", a)
	}
}

func TestUploads(t *testing.T) {
	c := setup(t, artifact.Limits{FileBytes: 1 << 10, JobFiles: 5})
	put := func(path, body string) int {
		st, _ := c.do("PUT", guestapi.PathUpload+path, c.uploads(), strings.NewReader(body))
		return st
	}
	if st := put("outputs/a.txt", "hello "+secret); st != 200 || c.File("outputs/a.txt") != "hello "+secret {
		t.Errorf("%d %q", st, c.File("outputs/a.txt"))
	}
	if st := put("agent.log", "hello "+secret); st != 200 || c.File("agent.log") != "hello [redacted]" {
		t.Errorf("%d %q", st, c.File("agent.log"))
	}
	for _, p := range []string{"%2e%2e/x", "..%2fx", "a%2f..%2f..%2fx", "a%00b", ".git/config", "a//b%20", "%2fetc%2fpasswd", "a%5cb"} {
		if st := put(p, "x"); st == 200 {
			t.Errorf("%s is taken", p)
		}
	}
	if st := put("big", strings.Repeat("x", 2<<10)); st != 413 {
		t.Errorf("oversize: %d", st)
	}
	if st := put("outputs/a.txt/b", "x"); st != 409 {
		t.Errorf("below a file: %d", st)
	}
	if got := c.Paths(); !slices.Equal(got, []string{"agent.log", "outputs/a.txt"}) {
		t.Errorf("stored %q", got)
	}
}

// What is under way when the job ends is not stored either.
func TestJobEndsDuringUpload(t *testing.T) {
	c := setup(t, artifact.Limits{})
	for _, call := range []struct{ method, path, token string }{
		{"PUT", guestapi.PathUpload + "a.txt", c.uploads()},
		{"POST", guestapi.PathLog + "?final=1", c.runner()},
	} {
		c.Reopen()
		st, _ := c.do(call.method, call.path, call.token, io.MultiReader(strings.NewReader("begun"), atRead(c.End), strings.NewReader("rest")))
		if st != 401 {
			t.Errorf("%s: %d", call.path, st)
		}
	}
	if got := c.Paths(); len(got) != 0 {
		t.Errorf("stored %q", got)
	}
	if n, err := c.Service.LogSize(t.Context(), c.JobID); err != nil || n != 0 {
		t.Errorf("%d bytes of log, %v", n, err)
	}
}

// atRead is an empty reader that does something.
type atRead func()

func (f atRead) Read([]byte) (int, error) {
	f()
	return 0, io.EOF
}

// An upload that breaks off is not stored, though it was chunked.
func TestBrokenUpload(t *testing.T) {
	c := setup(t, artifact.Limits{})
	pr, pw := io.Pipe()
	go func() {
		_, _ = pw.Write([]byte("half"))
		pw.CloseWithError(errors.New("the disk broke"))
	}()
	req, _ := http.NewRequestWithContext(t.Context(), "PUT", c.URL()+guestapi.PathUpload+"a", pr)
	req.Header.Set("Authorization", "Bearer "+c.uploads())
	if resp, err := c.http.Do(req); err == nil {
		_ = resp.Body.Close()
		t.Errorf("status %d", resp.StatusCode)
	}
	if got := c.Paths(); len(got) != 0 {
		t.Errorf("stored %q", got)
	}
}

func TestTooManyAtOnce(t *testing.T) {
	c := setup(t, artifact.Limits{})
	c.Stop()
	c.Limits = guestplane.PlaneLimits{InFlight: 2, Connections: 16}
	c.Start()
	var wg sync.WaitGroup
	var mu sync.Mutex
	got := map[int]int{}
	for range 8 {
		wg.Go(func() {
			st, _ := c.do("GET", guestapi.PathDirective+"?wait=50", c.runner(), nil)
			mu.Lock()
			defer mu.Unlock()
			if got[st]++; got[429] == 6 {
				c.Direct("TIMEOUT")
			}
		})
	}
	wg.Wait()
	if got[200] != 2 || got[429] != 6 {
		t.Errorf("got %v", got)
	}
}

func TestConnectionsAreLimited(t *testing.T) {
	c := setup(t, artifact.Limits{})
	s := c.Plane(guestplane.Config{Limits: guestplane.PlaneLimits{Connections: 2}})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- s.Serve(ctx, c.VMID, l) }()
	dial := func() net.Conn {
		conn, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		return conn
	}
	one, two, three := dial(), dial(), dial()
	defer func() { _, _ = two.Close(), three.Close() }()
	if _, err := three.Read(make([]byte, 1)); err == nil {
		t.Error("a third connection was served")
	}
	_ = one.Close()
	for ok := false; !ok; { // the slot is free once the server saw the close
		conn := dial()
		_, _ = fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: x\r\n\r\n", guestapi.PathDirective)
		_, err := conn.Read(make([]byte, 1))
		ok = err == nil
		_ = conn.Close()
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestRepoBundle(t *testing.T) {
	c := setup(t, artifact.Limits{})
	if st, _ := c.do("GET", guestapi.PathRepo, c.runner(), nil); st != 404 {
		t.Errorf("none: %d", st)
	}
	bundle := "# v2 git bundle\n" + strings.Repeat("a", 40) + " refs/heads/main\n\nPACK" + strings.Repeat("x", 100<<10)
	c.GiveBundle(strings.NewReader(bundle))
	if st, p := c.do("GET", guestapi.PathRepo, c.runner(), nil); st != 200 || string(p) != bundle {
		t.Errorf("%d, %d bytes", st, len(p))
	}
}

func TestUnknownCalls(t *testing.T) {
	c := setup(t, artifact.Limits{})
	for _, call := range [][2]string{{"GET", "/"}, {"GET", "/v1/jobs"}, {"DELETE", guestapi.PathUpload + "a"}, {"GET", guestapi.PathUpload + "a"}} {
		if st, _ := c.do(call[0], call[1], c.runner(), nil); st != 404 && st != 405 {
			t.Errorf("%v: %d", call, st)
		}
	}
}

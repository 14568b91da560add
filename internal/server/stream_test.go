package server

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/image"
	"github.com/agentlab-vm/agentlab/internal/sockpath"
	"github.com/agentlab-vm/agentlab/test/guard"
)

func TestUpgrades(t *testing.T) {
	h := start(t, nil)
	ctx := t.Context()
	for name, open := range map[string]func() (net.Conn, error){
		"exec":   func() (net.Conn, error) { return h.client.Exec(ctx, "box", guestapi.ExecRequest{}) },
		"attach": func() (net.Conn, error) { return h.client.Attach(ctx, "box", guestapi.AttachRequest{}) },
		"dial":   func() (net.Conn, error) { return h.client.Dial(ctx, "box", 22) },
	} {
		t.Run(name, func(t *testing.T) {
			near, err := open()
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = near.Close() }()
			far := <-h.far
			defer func() { _ = far.Close() }()
			want := strings.Repeat("0123456789abcdef", 1<<14) // more than any buffer on the way
			go func() {
				_, _ = io.WriteString(near, want)
				_ = near.(interface{ CloseWrite() error }).CloseWrite()
			}()
			got, err := io.ReadAll(far)
			if err != nil || string(got) != want {
				t.Fatalf("to the guest: %d bytes, %v", len(got), err)
			}
			go func() { // after the half close, the other way still works
				_, _ = io.WriteString(far, want)
				_ = far.Close()
			}()
			got, err = io.ReadAll(near)
			if err != nil || string(got) != want {
				t.Fatalf("from the guest: %d bytes, %v", len(got), err)
			}
		})
	}
}

// TestUpgradeEarlyBytes sends the first bytes of the stream in one piece with
// the request; none may be lost in a buffer.
func TestUpgradeEarlyBytes(t *testing.T) {
	h := start(t, nil)
	conn, err := net.Dial("unix", h.socket)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	body := `{"command":["cat"]}`
	fmt.Fprintf(conn, "POST /v1/sandboxes/box/exec HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: agentlab-stream\r\n"+
		"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%searly", len(body), body)
	far := <-h.far
	defer func() { _ = far.Close() }()
	got := make([]byte, 5)
	if _, err := io.ReadFull(far, got); err != nil || string(got) != "early" {
		t.Fatalf("%q, %v", got, err)
	}
	_, _ = io.WriteString(far, "late")
	_ = far.Close()
	r := bufio.NewReader(conn)
	resp, err := http.ReadResponse(r, nil)
	if err != nil || resp.StatusCode != http.StatusSwitchingProtocols || resp.Header.Get("Upgrade") != "agentlab-stream" {
		t.Fatalf("%+v, %v", resp, err)
	}
	if rest, _ := io.ReadAll(r); string(rest) != "late" {
		t.Errorf("%q", rest)
	}
}

func TestUpgradeGuestGone(t *testing.T) {
	h := start(t, nil)
	near, err := h.client.Dial(t.Context(), "box", 80)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = near.Close() }()
	_ = (<-h.far).Close()
	if rest, err := io.ReadAll(near); err != nil || len(rest) != 0 {
		t.Errorf("%q, %v", rest, err)
	}
}

// TestUpgradeGuestEndsFirst lets the guest say its last while the caller is
// still writing: the caller hears it, and its own writes do not fail.
func TestUpgradeGuestEndsFirst(t *testing.T) {
	h := start(t, nil)
	near, err := h.client.Exec(t.Context(), "box", guestapi.ExecRequest{})
	if err != nil {
		t.Fatal(err)
	}
	far := <-h.far
	_, _ = io.WriteString(far, "last words")
	_ = far.Close()
	got := make([]byte, len("last words"))
	if _, err := io.ReadFull(near, got); err != nil || string(got) != "last words" {
		t.Fatalf("%q, %v", got, err)
	}
	for range 100 {
		if _, err := io.WriteString(near, strings.Repeat("x", 10000)); err != nil {
			t.Fatalf("write: %v", err)
		}
	}
	if rest, err := io.ReadAll(near); err != nil || len(rest) > 0 {
		t.Errorf("not a clean end: %q, %v", rest, err)
	}
	_ = near.Close()
}

func TestUpgradeCallerGone(t *testing.T) {
	h := start(t, nil)
	near, err := h.client.Exec(t.Context(), "box", guestapi.ExecRequest{})
	if err != nil {
		t.Fatal(err)
	}
	far := <-h.far
	defer func() { _ = far.Close() }()
	_ = near.Close()
	_ = far.SetReadDeadline(time.Now().Add(guard.Patience))
	if _, err := io.ReadAll(far); err != nil {
		t.Errorf("the guest does not learn that its caller went away: %v", err)
	}
}

func TestUpgradeRefused(t *testing.T) {
	h := start(t, nil)
	_, err := h.client.Exec(t.Context(), "nobody", guestapi.ExecRequest{})
	if agentlab.CodeOf(err) != agentlab.CodeNotFound {
		t.Errorf("%v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := h.client.Dial(ctx, "box", 1); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}

// TestStreamFollows reads a log while it is written, beyond the body's stall
// timeout's way of cutting connections.
func TestStreamFollows(t *testing.T) {
	h := start(t, nil)
	pr, pw := io.Pipe()
	h.log = pr
	body, err := h.client.JobLog(t.Context(), stubJobID, true, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = body.Close() }()
	buf := make([]byte, 16)
	for i := range 3 {
		line := fmt.Sprintf("line %d\n", i)
		go func() { _, _ = io.WriteString(pw, line) }()
		n, err := io.ReadAtLeast(body, buf, len(line))
		if err != nil || string(buf[:n]) != line {
			t.Fatalf("%q, %v", buf[:n], err)
		}
	}
	_ = pw.Close()
	if rest, err := io.ReadAll(body); err != nil || len(rest) > 0 {
		t.Errorf("%q, %v", rest, err)
	}
}

// TestStreamBroken says that half an answer is an error for its reader.
func TestStreamBroken(t *testing.T) {
	h := start(t, nil)
	pr, pw := io.Pipe()
	h.log = pr
	go func() {
		_, _ = io.WriteString(pw, "half")
		_ = pw.CloseWithError(errors.New("disk gone"))
	}()
	body, err := h.client.Console(t.Context(), "box", false)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = body.Close() }()
	got, err := io.ReadAll(body)
	if err == nil || agentlab.CodeOf(err) != agentlab.CodeUnavailable {
		t.Errorf("%q, %v", got, err)
	}
}

// TestStreamCallerGone closes what the service gave when its reader leaves.
func TestStreamCallerGone(t *testing.T) {
	h := start(t, nil)
	pr, pw := io.Pipe()
	h.log = pr
	body, err := h.client.JobLog(t.Context(), stubJobID, true, 0)
	if err != nil {
		t.Fatal(err)
	}
	_ = body.Close()
	done := make(chan error, 1)
	go func() {
		for {
			if _, err := io.WriteString(pw, "x"); err != nil {
				done <- err
				return
			}
		}
	}()
	select {
	case <-done:
	case <-time.After(guard.Patience):
		t.Fatal("the log is still open")
	}
}

func TestArtifactHeaders(t *testing.T) {
	h := start(t, nil)
	status, header, body := h.do(t, "GET", "/v1/jobs/"+stubJobID+"/artifacts/dir/page.html", "", "")
	if status != 200 || body != "hello" || header.Get("Content-Disposition") != "attachment" || header.Get("X-Content-Type-Options") != "nosniff" || header.Get("Content-Length") != "5" {
		t.Errorf("%d %v %q", status, header, body)
	}
	if !h.wasCalled("artifact.open dir/page.html") {
		t.Error("the path did not arrive whole")
	}
	for _, path := range []string{"../x", "a/../b", "/a", "", "a//b", "a/"} {
		if _, err := h.client.Artifact(t.Context(), stubJobID, path); agentlab.CodeOf(err) != agentlab.CodeInvalid {
			t.Errorf("%q: %v", path, err)
		}
	}
	if b, err := h.client.Artifact(t.Context(), stubJobID, "a b/ü%2f?#"); err != nil {
		t.Error(err)
	} else {
		_ = b.Close()
	}
	if !h.wasCalled("artifact.open a b/ü%2f?#") {
		t.Error("a path with special characters did not arrive whole")
	}
}

func TestUploadBundle(t *testing.T) {
	h := start(t, func(c *Config) { c.MaxBundleBytes = 1 << 20 })
	want := bytes.Repeat([]byte("b"), 1<<20)
	b, err := h.client.UploadBundle(t.Context(), bytes.NewReader(want))
	if err != nil || b.Size != 1<<20 || !bytes.Equal(h.bundle, want) {
		t.Fatalf("%+v, %v", b, err)
	}
	_, err = h.client.UploadBundle(t.Context(), io.MultiReader(bytes.NewReader(want), strings.NewReader("x")))
	if agentlab.CodeOf(err) != agentlab.CodeInvalid || !strings.Contains(err.Error(), "1 MiB") {
		t.Errorf("%v", err)
	}
}

func TestProfileText(t *testing.T) {
	h := start(t, nil)
	const text = "name: x\n# ü\n"
	if p, err := h.client.PutProfile(t.Context(), "x", text); err != nil || p.YAML != text {
		t.Errorf("%+v, %v", p, err)
	}
	if _, err := h.client.ValidateProfile(t.Context(), strings.Repeat("#", maxProfileBytes+1)); agentlab.CodeOf(err) != agentlab.CodeInvalid {
		t.Errorf("%v", err)
	}
}

func TestBuildImage(t *testing.T) {
	h := start(t, nil)
	h.image = func(_ context.Context, progress func(string)) (image.Image, error) {
		for i := range 100 {
			progress(fmt.Sprint("line ", i))
		}
		return image.Image{Stamp: image.Stamp{Name: "base", Digest: "d"}}, nil
	}
	var lines []string
	img, err := h.client.BuildImage(t.Context(), api.ImageBuild{Name: "base"}, func(l string) { lines = append(lines, l) })
	if err != nil || img.Digest != "d" || len(lines) != 100 || lines[99] != "line 99" {
		t.Fatalf("%+v, %v, %d lines", img, err, len(lines))
	}
	h.image = func(context.Context, func(string)) (image.Image, error) {
		return image.Image{}, agentlab.Errorf(agentlab.CodeNoSpace, "full").WithHint("make room")
	}
	_, err = h.client.BuildImage(t.Context(), api.ImageBuild{Name: "base"}, nil)
	if agentlab.CodeOf(err) != agentlab.CodeNoSpace || agentlab.HintOf(err) != "make room" {
		t.Errorf("%v", err)
	}

	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	h.image = func(ctx context.Context, progress func(string)) (image.Image, error) {
		progress("begun")
		<-ctx.Done()
		ended <- ctx.Err()
		return image.Image{}, ctx.Err()
	}
	_, err = h.client.BuildImage(ctx, api.ImageBuild{Name: "base"}, func(string) { cancel() })
	if !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("the build goes on without its caller: %v", err)
	}
}

// TestFollowEvents wants every event once and in order, through a stream
// that begins in the past, goes on live, is too slow once, and breaks.
func TestFollowEvents(t *testing.T) {
	h := start(t, nil)
	const total = 3000
	for range total / 3 {
		h.commit(agentlab.Event{Kind: "k", JobID: stubJobID})
		h.commit(agentlab.Event{Kind: "other"})
	}
	ctx := guard.Context(t)
	go func() {
		for range total / 3 {
			h.commit(agentlab.Event{Kind: "k", JobID: stubJobID})
			h.commit(agentlab.Event{Kind: "other"})
		}
	}()
	var last int64
	n := 0
	for e, err := range h.client.FollowEvents(ctx, client.EventQuery{JobID: stubJobID}) {
		if err != nil {
			t.Fatal(err)
		}
		if e.ID <= last || e.Kind != "k" {
			t.Fatalf("event %d (%s) after %d", e.ID, e.Kind, last)
		}
		last = e.ID
		if n++; n == 2*total/3 {
			break
		}
	}
	if n != 2*total/3 {
		t.Fatalf("%d events", n)
	}
	guard.Until(t, "the end of the subscription", func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		return len(h.subs) == 0
	})
}

// TestFollowEventsFromNow sees only what happens after the stream is ready,
// through a restart of the daemon too.
func TestFollowEventsFromNow(t *testing.T) {
	st := newStub()
	socket := filepath.Join(t.TempDir(), "s")
	serve := func() *Server {
		srv, err := New(Config{Services: st.services(), Rules: Rules{OwnUID: uint32(getuid())}})
		if err != nil {
			t.Fatal(err)
		}
		l, err := sockpath.Listen(socket, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		go func() { _ = srv.Serve(l) }()
		return srv
	}
	shutdown := func(s *Server) {
		ctx, cancel := context.WithTimeout(context.Background(), guard.Patience)
		defer cancel()
		if err := s.Shutdown(ctx); err != nil {
			t.Error(err)
		}
	}
	first := serve()
	st.commit(agentlab.Event{Kind: "past"})
	got := make(chan api.Event, 10)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, 1)
	go func() {
		for e, err := range client.New(socket).FollowEvents(ctx, client.EventQuery{After: -1}) {
			if err != nil {
				ended <- err
				return
			}
			got <- e
		}
		ended <- nil
	}()
	subscribed := func() bool {
		st.mu.Lock()
		defer st.mu.Unlock()
		return len(st.subs) == 1
	}
	guard.Until(t, "the subscription", subscribed)
	guard.Until(t, "the first look at the record", func() bool { return st.wasCalled("events") })
	st.commit(agentlab.Event{Kind: "live"})
	if e := <-got; e.Kind != "live" {
		t.Fatalf("%+v", e)
	}
	shutdown(first)
	st.commit(agentlab.Event{Kind: "missed"})
	second := serve()
	defer shutdown(second)
	if e := <-got; e.Kind != "missed" {
		t.Fatalf("%+v", e)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Errorf("the end of the context is an error: %v", err)
	}
}

func TestEventsList(t *testing.T) {
	h := start(t, nil)
	for range 250 {
		h.commit(agentlab.Event{Kind: "k"})
	}
	l, err := h.client.Events(t.Context(), client.EventQuery{})
	if err != nil || len(l.Items) != 100 || l.Items[0].ID != 151 || l.Items[99].ID != 250 {
		t.Errorf("newest: %d, %v", len(l.Items), err)
	}
	l, err = h.client.Events(t.Context(), client.EventQuery{After: 10, Limit: 5})
	if err != nil || len(l.Items) != 5 || l.Items[0].ID != 11 || l.Next != cursorOf("events", "15") {
		t.Errorf("after 10: %+v, %v", l, err)
	}
	n := int64(10)
	for e, err := range h.client.EachEvent(t.Context(), client.EventQuery{After: n}) {
		if n++; err != nil || e.ID != n {
			t.Fatalf("event %d instead of %d, %v", e.ID, n, err)
		}
	}
	if n != 250 {
		t.Errorf("the last event is %d", n)
	}
	for range h.client.FollowEvents(t.Context(), client.EventQuery{JobID: "job-nobodyisthere"}) {
		_, err := h.client.Events(t.Context(), client.EventQuery{JobID: "job-nobodyisthere"})
		if agentlab.CodeOf(err) != agentlab.CodeNotFound {
			t.Errorf("%v", err)
		}
	}
}

func TestNoDaemon(t *testing.T) {
	c := client.New(filepath.Join(t.TempDir(), "none.sock"))
	_, err := c.Status(t.Context())
	if agentlab.CodeOf(err) != agentlab.CodeUnavailable || agentlab.HintOf(err) == "" {
		t.Errorf("%v", err)
	}
	_, err = c.Exec(t.Context(), "box", guestapi.ExecRequest{})
	if agentlab.CodeOf(err) != agentlab.CodeUnavailable {
		t.Errorf("%v", err)
	}
	n := 0
	for _, err := range c.FollowEvents(t.Context(), client.EventQuery{}) {
		if n++; agentlab.CodeOf(err) != agentlab.CodeUnavailable {
			t.Errorf("%v", err)
		}
	}
	if n != 1 {
		t.Errorf("%d pairs", n)
	}
}

func TestPages(t *testing.T) {
	h := start(t, nil)
	h.list = 2500
	l, err := h.client.Sandboxes(t.Context(), client.SandboxQuery{})
	if err != nil || len(l.Items) != 2500 || l.Items[2499].VMID != 2500 || l.Next != "" {
		t.Errorf("%d, next %q, %v", len(l.Items), l.Next, err)
	}
	l, err = h.client.Sandboxes(t.Context(), client.SandboxQuery{Limit: 10, Cursor: cursorOf("sandboxes", "5")})
	if err != nil || len(l.Items) != 10 || l.Items[0].VMID != 6 || l.Next != cursorOf("sandboxes", "15") {
		t.Errorf("%+v, %v", l, err)
	}
	for _, wrong := range []string{cursorOf("jobs", "5"), cursorOf("sandboxes"), cursorOf("sandboxes", "-1"), cursorOf("sandboxes", "5", "6"), "5", "%"} {
		if _, err := h.client.Sandboxes(t.Context(), client.SandboxQuery{Cursor: wrong}); agentlab.CodeOf(err) != agentlab.CodeInvalid {
			t.Errorf("cursor %q: %v", wrong, err)
		}
	}
	n := 0
	for sb, err := range h.client.EachSandbox(t.Context(), client.SandboxQuery{Limit: 1500}) {
		if n++; err != nil || sb.VMID != n {
			t.Fatalf("sandbox %d instead of %d, %v", sb.VMID, n, err)
		}
	}
	if n != 1500 {
		t.Errorf("%d of 1500", n)
	}
	l, err = h.client.Sandboxes(t.Context(), client.SandboxQuery{Limit: 2500})
	if err != nil || len(l.Items) != 2500 || l.Next != "" {
		t.Errorf("%d, next %q, %v", len(l.Items), l.Next, err)
	}
}

// TestShutdown ends streams of every kind at once.
func TestShutdown(t *testing.T) {
	st := newStub()
	srv, err := New(Config{Services: st.services(), Rules: Rules{OwnUID: uint32(getuid())}})
	if err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(t.TempDir(), "s")
	l, err := sockpath.Listen(socket, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = srv.Serve(l) }()
	c := client.New(socket)
	st.log, _ = io.Pipe()
	log, err := c.JobLog(t.Context(), stubJobID, true, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = log.Close() }()
	exec, err := c.Exec(t.Context(), "box", guestapi.ExecRequest{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = exec.Close() }()
	far := <-st.far
	defer func() { _ = far.Close() }()

	ctx, cancel := context.WithTimeout(context.Background(), guard.Patience)
	defer cancel()
	if err := srv.Shutdown(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadAll(log); agentlab.CodeOf(err) != agentlab.CodeUnavailable {
		t.Errorf("a log that was cut short looks whole: %v", err)
	}
	for name, c := range map[string]net.Conn{"caller": exec, "guest": far} {
		_ = c.SetReadDeadline(time.Now().Add(guard.Patience))
		if _, err := io.ReadAll(c); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("the %s's end is still open", name)
		}
	}
}

func BenchmarkListSandboxes(b *testing.B) {
	for _, n := range []int{1000, 10000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			st := newStub()
			st.list = n
			srv, err := New(Config{Services: st.services()})
			if err != nil {
				b.Fatal(err)
			}
			ctx := context.WithValue(context.Background(), callerKey{}, caller{level: AccessAdmin})
			for b.Loop() {
				req, _ := http.NewRequestWithContext(ctx, "GET", fmt.Sprintf("/v1/sandboxes?limit=%d", n), http.NoBody)
				srv.Handler().ServeHTTP(&statusProbe{}, req)
			}
		})
	}
}

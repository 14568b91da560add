package daemon

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/backend/registry"
	"github.com/agentlab-vm/agentlab/internal/backends"
	"github.com/agentlab-vm/agentlab/internal/config"
	"github.com/agentlab-vm/agentlab/internal/stream"
	"github.com/agentlab-vm/agentlab/test/fakebackend"
	"github.com/agentlab-vm/agentlab/test/guard"
)

// home is a temporary AGENTLAB_HOME on the fake backend.
type home struct {
	paths    config.Paths
	client   *client.Client
	backends registry.List // nil means known
}

func newHome(t *testing.T) *home {
	t.Helper()
	return newHomeIn(t, t.TempDir())
}

func newHomeIn(t *testing.T, dir string) *home {
	t.Helper()
	paths, err := config.ResolvePaths(testEnv(dir), false)
	if err != nil {
		t.Fatal(err)
	}
	h := &home{paths: paths, client: client.New(paths.Socket())}
	t.Cleanup(h.client.Close)
	h.configure(t, "backend: fake\n")
	return h
}

// known are the backends of the daemons of these tests.
var known = append(slices.Clip(backends.All), fakebackend.Backend)

func testEnv(dir string) func(string) string {
	return func(key string) string {
		return map[string]string{"AGENTLAB_HOME": dir, "AGENTLAB_DEBUG": "1"}[key]
	}
}

func (h *home) configure(t *testing.T, yaml string) {
	t.Helper()
	if err := os.MkdirAll(h.paths.Config, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(h.paths.ConfigFile(), []byte(yaml), 0o600); err != nil {
		t.Fatal(err)
	}
}

func (h *home) open(t *testing.T) (*Daemon, error) {
	t.Helper()
	b := h.backends
	if b == nil {
		b = known
	}
	return New(t.Context(), Config{Paths: h.paths, Getenv: testEnv(h.paths.Home), Backends: b})
}

// start runs a daemon until stop is called or the test ends.
func (h *home) start(t *testing.T) (stop func()) {
	t.Helper()
	d, err := h.open(t)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- errors.Join(d.Run(ctx), d.Close()) }()
	var once sync.Once
	stop = func() {
		once.Do(func() {
			cancel()
			if err := <-done; err != nil {
				t.Errorf("the daemon ended with: %v", err)
			}
		})
	}
	t.Cleanup(func() {
		stop()
		if t.Failed() {
			log, _ := os.ReadFile(h.paths.DaemonLog())
			t.Logf("log:\n%s", log)
		}
	})
	return stop
}

// await follows the events of a sandbox until it is in one of the states.
func (h *home) await(t *testing.T, sandbox string, states ...agentlab.SandboxState) api.Sandbox {
	t.Helper()
	ctx := guard.Context(t)
	for _, err := range h.client.FollowEvents(ctx, client.EventQuery{Sandbox: sandbox}) {
		if err != nil {
			t.Fatal(err)
		}
		sb, err := h.client.Sandbox(ctx, sandbox)
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range states {
			if sb.State == string(s) {
				return sb
			}
		}
	}
	t.Fatalf("sandbox %s did not become one of %v", sandbox, states)
	return api.Sandbox{}
}

// awaitIt waits until a sandbox fulfils cond.
func (h *home) awaitIt(t *testing.T, sandbox string, cond func(api.Sandbox) bool) {
	t.Helper()
	for end := time.Now().Add(guard.Patience); ; time.Sleep(20 * time.Millisecond) {
		sb, err := h.client.Sandbox(t.Context(), sandbox)
		if err == nil && cond(sb) {
			return
		}
		if err != nil || time.Now().After(end) {
			t.Fatalf("%+v, %v", sb, err)
		}
	}
}

func (h *home) exec(t *testing.T, sandbox string, command ...string) (string, int) {
	t.Helper()
	conn, err := h.client.Exec(t.Context(), sandbox, guestapi.ExecRequest{Command: command})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	_ = conn.SetDeadline(time.Now().Add(guard.Patience))
	r := stream.NewReader(conn)
	var out strings.Builder
	for {
		kind, p, err := r.Next()
		if err != nil {
			t.Fatalf("after %q: %v", out.String(), err)
		}
		switch kind {
		case stream.Stdout:
			out.Write(p)
		case stream.Exit:
			var st stream.ExitStatus
			if err := json.Unmarshal(p, &st); err != nil {
				t.Fatal(err)
			}
			return out.String(), st.Code
		}
	}
}

func TestSandboxThroughTheAPI(t *testing.T) {
	h := newHome(t)
	h.start(t)
	ctx := t.Context()
	sb, err := h.client.CreateSandbox(ctx, api.SandboxCreate{Name: "box"})
	if err != nil || sb.State != "REQUESTED" {
		t.Fatalf("%+v, %v", sb, err)
	}
	if _, err := h.client.CreateSandbox(ctx, api.SandboxCreate{Name: "box"}); agentlab.CodeOf(err) != agentlab.CodeExists {
		t.Errorf("a second box: %v", err)
	}
	h.await(t, "box", agentlab.SandboxReady)
	if out, code := h.exec(t, "box", "echo", "hello"); out != "hello\n" || code != 0 {
		t.Errorf("%q, %d", out, code)
	}
	if _, code := h.exec(t, "box", "exit", "7"); code != 7 {
		t.Errorf("exit %d", code)
	}
	echo, err := h.client.Dial(ctx, "box", 7)
	if err != nil {
		t.Fatal(err)
	}
	go func() { _, _ = io.WriteString(echo, "ping") }()
	buf := make([]byte, 4)
	if _, err := io.ReadFull(echo, buf); err != nil || string(buf) != "ping" {
		t.Errorf("%q, %v", buf, err)
	}
	_ = echo.Close()
	if _, err := h.client.Dial(ctx, "box", 9); err == nil {
		t.Error("port 9 answers")
	}
	console, err := h.client.Console(ctx, "box", false)
	if err != nil {
		t.Fatal(err)
	}
	if text, err := io.ReadAll(console); err != nil || len(text) == 0 {
		t.Errorf("console %q, %v", text, err)
	}
	_ = console.Close()
	renewed, err := h.client.RenewLease(ctx, "box", 600)
	if err != nil || time.Until(renewed.LeaseExpiresAt) < 599*time.Minute {
		t.Errorf("%+v, %v", renewed, err)
	}
	grace := 1
	if _, err := h.client.StopSandbox(ctx, "box", api.SandboxStop{GraceSeconds: &grace}); err != nil {
		t.Fatal(err)
	}
	h.await(t, "box", agentlab.SandboxStopped)
	if _, err := h.client.Exec(ctx, "box", guestapi.ExecRequest{}); agentlab.CodeOf(err) != agentlab.CodeConflict {
		t.Errorf("exec in a stopped sandbox: %v", err)
	}
	if _, err := h.client.StartSandbox(ctx, "box"); err != nil {
		t.Fatal(err)
	}
	h.await(t, "box", agentlab.SandboxReady)
	if _, err := h.client.DestroySandbox(ctx, "box"); err != nil {
		t.Fatal(err)
	}
	h.await(t, "1000", agentlab.SandboxDestroyed)
	list, err := h.client.Sandboxes(ctx, client.SandboxQuery{})
	if err != nil || len(list.Items) != 0 {
		t.Errorf("%+v, %v", list, err)
	}
}

func TestStatus(t *testing.T) {
	h := newHome(t)
	h.start(t)
	if _, err := h.client.CreateSandbox(t.Context(), api.SandboxCreate{Name: "box"}); err != nil {
		t.Fatal(err)
	}
	h.await(t, "box", agentlab.SandboxReady)
	s, err := h.client.Status(t.Context())
	if err != nil || s.PID != os.Getpid() || s.Backend != "fake" || s.Home != h.paths.Home || s.Sandboxes["READY"] != 1 || len(s.Sandboxes) != 1 || s.Version == "" {
		t.Errorf("%+v, %v", s, err)
	}
	health, err := h.client.Health(t.Context())
	if err != nil || health.Status != "ok" {
		t.Errorf("%+v, %v", health, err)
	}
}

func TestLibraries(t *testing.T) {
	h := newHome(t)
	h.start(t)
	ctx := t.Context()
	list, err := h.client.Profiles(ctx)
	if err != nil || len(list.Items) < 3 || list.Items[0].YAML != "" {
		t.Fatalf("%+v, %v", list, err)
	}
	for _, p := range list.Items {
		if p.Usable == (p.Problem != "") {
			t.Errorf("%+v", p)
		}
	}
	const text = "name: mine\nresources:\n  cores: 3\n"
	if p, err := h.client.PutProfile(ctx, "mine", text); err != nil || p.Cores != 3 || !p.Usable {
		t.Errorf("%+v, %v", p, err)
	}
	if p, err := h.client.Profile(ctx, "mine"); err != nil || p.YAML != text || p.Source != filepath.Join(h.paths.Profiles(), "mine.yaml") {
		t.Errorf("%+v, %v", p, err)
	}
	sum := sha256.Sum256([]byte(text))
	for _, want := range []struct {
		sum  string
		code agentlab.Code
	}{{"", agentlab.CodeInvalid}, {"00", agentlab.CodeConflict}, {hex.EncodeToString(sum[:]), ""}, {hex.EncodeToString(sum[:]), agentlab.CodeNotFound}} {
		if err := h.client.RemoveProfile(ctx, "mine", want.sum); agentlab.CodeOf(err) != want.code {
			t.Errorf("remove %q: %v, not %q", want.sum, err, want.code)
		}
	}
	if _, err := h.client.Profile(ctx, "mine"); agentlab.CodeOf(err) != agentlab.CodeNotFound {
		t.Errorf("a removed profile: %v", err)
	}
	if _, err := h.client.ValidateProfile(ctx, "name: x\nmounts: [/]\n"); agentlab.CodeOf(err) != agentlab.CodeDenied {
		t.Errorf("%v", err)
	}
	if _, err := h.client.ValidateProfile(ctx, "name: x\nnonsense: 1\n"); agentlab.CodeOf(err) != agentlab.CodeInvalid {
		t.Errorf("%v", err)
	}
	if images, err := h.client.Images(ctx); err != nil || images.Items == nil || len(images.Items) != 0 {
		t.Errorf("%+v, %v", images, err)
	}
	if _, err := h.client.Image(ctx, "base"); agentlab.CodeOf(err) != agentlab.CodeNotFound {
		t.Errorf("%v", err)
	}
	if err := h.client.SetSecret(ctx, "default", "env.KEY", "value", false); err != nil {
		t.Error(err)
	}
	if keys, err := h.client.SecretKeys(ctx, "default"); err != nil || len(keys.Items) != 1 || keys.Items[0] != "env.KEY" {
		t.Errorf("%+v, %v", keys, err)
	}
	if _, err := h.client.Events(ctx, client.EventQuery{Sandbox: "nobody"}); agentlab.CodeOf(err) != agentlab.CodeNotFound {
		t.Errorf("%v", err)
	}
}

func TestSecondDaemon(t *testing.T) {
	h := newHome(t)
	h.start(t)
	_, err := h.open(t)
	if agentlab.CodeOf(err) != agentlab.CodeExists || !strings.Contains(err.Error(), "already running") || !strings.Contains(err.Error(), pid()) {
		t.Errorf("%v", err)
	}
	if _, err := h.client.Status(t.Context()); err != nil {
		t.Errorf("the first one is hurt: %v", err)
	}
}

// TestDoesNotStart is every way in which New refuses, each with a code and
// what to do, and leaves nothing locked behind.
func TestDoesNotStart(t *testing.T) {
	cases := []struct {
		name    string
		prepare func(t *testing.T, h *home)
		code    agentlab.Code
		text    string // in the error or its hint
	}{
		{"unknown key", func(t *testing.T, h *home) { h.configure(t, "limits:\n  max_sandboxs: 3\n") }, agentlab.CodeInvalid, "max_sandboxs"},
		{"unknown backend", func(t *testing.T, h *home) { h.configure(t, "backend: moon\n") }, agentlab.CodeInvalid, "moon"},
		{"foreign database", func(t *testing.T, h *home) { write(t, h.paths.Database(), "not a database") }, "", "agentlab.db"},
		{"foreign file for the socket", func(t *testing.T, h *home) { write(t, h.paths.Socket(), "mine") }, "", "agentlabd.sock"},
		{"directory for the log", func(t *testing.T, h *home) {
			if err := os.MkdirAll(h.paths.DaemonLog(), 0o700); err != nil {
				t.Fatal(err)
			}
		}, agentlab.CodeDenied, "agentlabd.log"},
		{"live socket of another", func(t *testing.T, h *home) {
			if err := os.MkdirAll(h.paths.Run, 0o700); err != nil {
				t.Fatal(err)
			}
			l, err := net.Listen("unix", h.paths.Socket())
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = l.Close() })
		}, agentlab.CodeExists, "agentlabd.sock"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			h := newHome(t)
			c.prepare(t, h)
			d, err := h.open(t)
			if err == nil {
				_ = d.Close()
				t.Fatal("it starts")
			}
			if c.code != "" && agentlab.CodeOf(err) != c.code || agentlab.CodeOf(err) == agentlab.CodeInternal || !strings.Contains(err.Error()+agentlab.HintOf(err), c.text) {
				t.Errorf("code %s: %v; hint %q", agentlab.CodeOf(err), err, agentlab.HintOf(err))
			}
			_, err = h.open(t)
			if agentlab.CodeOf(err) == agentlab.CodeExists && strings.Contains(err.Error(), "already running") {
				t.Errorf("the lock is still held: %v", err)
			}
		})
	}
}

func TestUnknownBackend(t *testing.T) {
	h := newHome(t)
	_, err := New(t.Context(), Config{Paths: h.paths, Getenv: func(string) string { return "" }})
	e, ok := errors.AsType[*agentlab.Error](err)
	if !ok || e.Code != agentlab.CodeInvalid || e.Field != "backend" || !strings.Contains(e.Message, `"fake" is not known`) || !strings.Contains(e.Hint, "qemu, proxmox") {
		t.Errorf("%+v", e)
	}
}

func TestStaleSocket(t *testing.T) {
	h := newHome(t)
	if err := os.MkdirAll(h.paths.Run, 0o700); err != nil {
		t.Fatal(err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: h.paths.Socket(), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	_ = l.Close()
	stop := h.start(t)
	if _, err := h.client.Status(t.Context()); err != nil {
		t.Fatal(err)
	}
	st, err := os.Stat(h.paths.Socket())
	if err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", st.Mode(), err)
	}
	stop()
	if _, err := os.Stat(h.paths.Socket()); !os.IsNotExist(err) {
		t.Errorf("the socket is left: %v", err)
	}
}

func TestStopOverTheAPI(t *testing.T) {
	h := newHome(t)
	d, err := h.open(t)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- errors.Join(d.Run(t.Context()), d.Close()) }()
	if err := h.client.StopDaemon(t.Context(), false); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(guard.Patience):
		t.Fatal("it goes on")
	}
	if _, err := h.client.Status(t.Context()); agentlab.CodeOf(err) != agentlab.CodeUnavailable {
		t.Errorf("%v", err)
	}
}

// TestRestart ends the daemon and starts the next: sandboxes go on, and an
// event stream loses nothing.
func TestRestart(t *testing.T) {
	h := newHome(t)
	stop := h.start(t)
	if _, err := h.client.CreateSandbox(t.Context(), api.SandboxCreate{Name: "survivor"}); err != nil {
		t.Fatal(err)
	}
	h.await(t, "survivor", agentlab.SandboxReady)
	ctx, cancel := context.WithCancel(guard.Context(t))
	defer cancel()
	seen := make(chan api.Event, 1000)
	go func() {
		defer close(seen)
		for e, err := range h.client.FollowEvents(ctx, client.EventQuery{}) {
			if err != nil {
				t.Errorf("the stream ended: %v", err)
				return
			}
			seen <- e
		}
	}()
	<-seen
	stop()
	stop = h.start(t)
	if out, code := h.exec(t, "survivor", "echo", "still here"); code != 0 || out != "still here\n" {
		t.Errorf("%q, %d", out, code)
	}
	if _, err := h.client.DestroySandbox(t.Context(), "survivor"); err != nil {
		t.Fatal(err)
	}
	last := int64(1)
	for e := range seen {
		if e.ID != last+1 {
			t.Fatalf("event %d after %d", e.ID, last)
		}
		last = e.ID
		if e.Kind == agentlab.EventSandboxState && e.Data["to"] == "DESTROYED" {
			cancel()
			break
		}
	}
	stop()
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func readFile(t *testing.T, path string) []byte {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

package outside_test

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/netip"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/egress/gate"
	"github.com/agentlab-vm/agentlab/internal/guestplane/outside"
	"github.com/agentlab-vm/agentlab/test/fakenet"
	"github.com/agentlab-vm/agentlab/test/guard"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// world is a fake internet with one sandbox.
type world struct {
	*testing.T
	net *fakenet.Net
	out *outside.Outside

	mu      sync.Mutex
	row     agentlab.Sandbox
	records []agentlab.EgressRecord
}

const vmid = 1001

func newWorld(t *testing.T, stall time.Duration) *world {
	t.Helper()
	w := &world{T: t, net: fakenet.New(), row: agentlab.Sandbox{VMID: vmid, UID: "uid", Network: agentlab.Network{
		Mode: agentlab.NetworkAllowlist, Allow: []agentlab.NetworkRule{{Rule: "allowed.test"}}, Ports: []string{"80"},
	}}}
	t.Cleanup(w.net.Close)
	w.out = outside.New(outside.Config{Network: gate.OutsideThrough(w.net), Sandboxes: w, Audit: w, Stall: stall})
	t.Cleanup(func() { _ = w.out.Close() })
	return w
}

// Sandbox implements outside.Sandboxes.
func (w *world) Sandbox(context.Context, int) (agentlab.Sandbox, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.row, nil
}

// RecordEgress implements outside.Audit.
func (w *world) RecordEgress(_ context.Context, _ agentlab.Sandbox, r agentlab.EgressRecord) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.records = append(w.records, r)
	return nil
}

func (w *world) change(fn func(*agentlab.Sandbox)) {
	w.mu.Lock()
	fn(&w.row)
	row := w.row
	w.mu.Unlock()
	w.out.SandboxChanged(row)
}

func (w *world) guest() *outside.Guest {
	w.Helper()
	g, err := w.out.Guest(w.Context(), vmid)
	if err != nil {
		w.Fatal(err)
	}
	return g
}

func (w *world) get(srv outside.Server, url string) (string, error) {
	w.Helper()
	req, err := http.NewRequestWithContext(w.Context(), http.MethodGet, url, nil)
	if err != nil {
		w.Fatal(err)
	}
	resp, err := srv.Do(req)
	if err != nil {
		return "", err
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	return string(body), err
}

func (w *world) serve(host, text string) {
	w.net.HandleHTTP(host, 80, http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(rw, text) }))
}

// A guest reaches what its policy allows and nothing else, and each decision is recorded.
func TestPermit(t *testing.T) {
	w := newWorld(t, 0)
	w.serve("allowed.test", "hello")
	w.serve("other.test", "no")
	w.net.SetName("inside.allowed.test", netip.MustParseAddr("10.0.0.1"))
	g := w.guest()
	srv, err := g.Permit(t.Context(), "allowed.test:80")
	if err != nil {
		t.Fatal(err)
	}
	if body, err := w.get(srv, "http://allowed.test/x"); body != "hello" || err != nil {
		t.Errorf("%q %v", body, err)
	}
	for _, at := range []string{"other.test:80", "allowed.test:81", "10.0.0.1:80", "127.0.0.1:80", "[::1]:80"} {
		none, err := g.Permit(t.Context(), at)
		if _, denied := errors.AsType[*egress.DeniedError](err); !denied {
			t.Errorf("%s: %v", at, err)
		}
		if body, err := w.get(none, "http://"+at+"/"); err == nil {
			t.Errorf("%s is reached after a denial: %q", at, body)
		}
	}
	for _, at := range []string{"", "allowed.test", "allowed.test:http", "allowed.test:99999"} {
		if _, err := g.Permit(t.Context(), at); err == nil {
			t.Errorf("%q is a server", at)
		}
	}
	guard.Until(t, "the records", func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return len(w.records) == 6
	})
	for i, r := range w.records {
		if r.Allow != (i == 0) || r.Name == "" || r.Rule == "" {
			t.Errorf("record %d: %+v", i, r)
		}
	}
}

// A decision about one server is none about another.
func TestDecisionIsForOneServer(t *testing.T) {
	w := newWorld(t, 0)
	w.serve("allowed.test", "hello")
	w.serve("other.test", "no")
	srv, err := w.guest().Permit(t.Context(), "allowed.test:80")
	if err != nil {
		t.Fatal(err)
	}
	for _, url := range []string{"http://other.test/", "http://allowed.test:81/", "https://allowed.test/"} {
		if body, err := w.get(srv, url); agentlab.CodeOf(err) != agentlab.CodeInternal {
			t.Errorf("%s: %q %v", url, body, err)
		}
	}
}

// A changed policy ends what runs under the former one, and the next guest has the new one.
func TestPolicyChanges(t *testing.T) {
	w := newWorld(t, 0)
	w.serve("allowed.test", "hello")
	g := w.guest()
	ctx, cancel := g.Context(t.Context())
	defer cancel()
	w.change(func(sb *agentlab.Sandbox) { sb.Name = "renamed" })
	if again := w.guest(); again != g {
		t.Error("a change that is not of the policy ends a guest")
	}
	w.change(func(sb *agentlab.Sandbox) { sb.Network = agentlab.Network{Mode: agentlab.NetworkOff} })
	select {
	case <-ctx.Done():
	case <-time.After(guard.Patience):
		t.Error("the former policy is still in force")
	}
	guard.Until(t, "the former guest has ended", func() bool {
		_, err := g.Permit(t.Context(), "allowed.test:80")
		return err != nil
	})
	if _, err := w.guest().Permit(t.Context(), "allowed.test:80"); err == nil {
		t.Error("the new policy is not in force")
	}
	w.change(func(sb *agentlab.Sandbox) { sb.State = agentlab.SandboxDestroyed })
	if _, err := w.out.Guest(t.Context(), vmid); agentlab.CodeOf(err) != agentlab.CodeNotFound {
		t.Errorf("a destroyed sandbox: %v", err)
	}
}

// A server that stops sending is given up.
func TestStall(t *testing.T) {
	w := newWorld(t, 50*time.Millisecond)
	w.net.HandleHTTP("allowed.test", 80, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(rw, "part")
		_ = http.NewResponseController(rw).Flush()
		<-r.Context().Done()
	}))
	srv, err := w.guest().Permit(t.Context(), "allowed.test:80")
	if err != nil {
		t.Fatal(err)
	}
	if body, err := w.get(srv, "http://allowed.test/"); err == nil {
		t.Errorf("a part is a whole: %q", body)
	}
}

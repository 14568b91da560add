package link

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"errors"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/durable"
)

func newKey(t testing.TB) ed25519.PrivateKey {
	t.Helper()
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func public(key ed25519.PrivateKey) ed25519.PublicKey {
	return key.Public().(ed25519.PublicKey)
}

// echoGuest is a guest whose control server gives back what it gets.
func echoGuest(t testing.TB, controller ed25519.PublicKey) string {
	t.Helper()
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l, err := ListenTLS(tcp, controller, newKey(t))
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				_, _ = io.Copy(c, c)
				_ = c.Close()
			})
		}
	})
	t.Cleanup(func() { _ = l.Close(); wg.Wait() })
	return tcp.Addr().String()
}

func dial(t testing.TB, to string) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", to)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestTLSCarriesAStream(t *testing.T) {
	key := newKey(t)
	to := echoGuest(t, public(key))
	c, err := DialTLS(t.Context(), dial(t, to), key)
	if err != nil {
		t.Fatal(err)
	}
	sent := make([]byte, 1<<20)
	_, _ = rand.Read(sent)
	go func() { _, _ = c.Write(sent) }()
	got := make([]byte, len(sent))
	if _, err := io.ReadFull(c, got); err != nil || string(got) != string(sent) {
		t.Fatalf("another stream came back (%v)", err)
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
}

// A guest accepts only its controller, and rejects others at once.
func TestTLSRefusesAnotherKey(t *testing.T) {
	to := echoGuest(t, public(newKey(t)))
	_, err := DialTLS(t.Context(), dial(t, to), newKey(t))
	if agentlab.CodeOf(err) != agentlab.CodeDenied {
		t.Fatalf("got %v, want denied", err)
	}
}

// Peers that begin a handshake and say no more are many in an attack; the
// controller still comes in.
func TestTLSSilentPeersDoNotBlock(t *testing.T) {
	key := newKey(t)
	to := echoGuest(t, public(key))
	for range maxHandshakes - 1 {
		c := dial(t, to)
		defer c.Close()
		if _, err := c.Write([]byte{22, 3, 1}); err != nil {
			t.Fatal(err)
		}
	}
	c, err := DialTLS(t.Context(), dial(t, to), key)
	if err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
}

// Something else on the port is "no answer", never a success.
func TestDialTLSOfAnotherService(t *testing.T) {
	for name, says := range map[string]string{"silent": "", "ssh": "SSH-2.0-OpenSSH_9\r\n", "http": "HTTP/1.1 400 Bad Request\r\n\r\n"} {
		t.Run(name, func(t *testing.T) {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			go func() {
				c, err := l.Accept()
				if err == nil {
					_, _ = io.WriteString(c, says)
					_ = c.Close()
				}
			}()
			defer l.Close()
			if _, err := DialTLS(t.Context(), dial(t, l.Addr().String()), newKey(t)); agentlab.CodeOf(err) != agentlab.CodeUnavailable {
				t.Fatalf("got %v, want unavailable", err)
			}
		})
	}
}

// The caller's context ends a dial to a guest that never answers, and so does
// our own limit.
func TestDialTLSEnds(t *testing.T) {
	t.Run("cancelled", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		ours, theirs := net.Pipe()
		defer theirs.Close()
		go func() {
			_, _ = theirs.Read(make([]byte, 1))
			cancel()
		}()
		if _, err := DialTLS(ctx, ours, newKey(t)); agentlab.CodeOf(err) != agentlab.CodeUnavailable || !errors.Is(err, context.Canceled) {
			t.Fatalf("got %v, want unavailable by cancel", err)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		ours, theirs := net.Pipe()
		go func() { _, _ = io.Copy(io.Discard, theirs) }()
		if _, err := DialTLS(t.Context(), ours, newKey(t)); agentlab.CodeOf(err) != agentlab.CodeUnavailable {
			t.Fatalf("got %v, want unavailable", err)
		}
	})
}

func TestListenTLSClosesItsWaiters(t *testing.T) {
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l, err := ListenTLS(tcp, public(newKey(t)), newKey(t))
	if err != nil {
		t.Fatal(err)
	}
	c := dial(t, tcp.Addr().String())
	defer c.Close()
	done := make(chan error, 1)
	go func() { _, err := l.Accept(); done <- err }()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-done; !errors.Is(err, net.ErrClosed) {
		t.Fatalf("Accept: %v", err)
	}
}

// The streams serve HTTP, as guest control is.
func TestTLSCarriesHTTP(t *testing.T) {
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	key := newKey(t)
	l, err := ListenTLS(tcp, public(key), newKey(t))
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: http.NotFoundHandler(), ReadHeaderTimeout: time.Minute}
	var wg sync.WaitGroup
	wg.Go(func() { _ = server.Serve(l) })
	defer wg.Wait()
	defer server.Close()
	c, err := DialTLS(t.Context(), dial(t, tcp.Addr().String()), key)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: guest\r\nConnection: close\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(c); err != nil || !strings.HasPrefix(string(b), "HTTP/1.1 404 ") {
		t.Fatalf("%q %v", b, err)
	}
}

func TestSandboxKey(t *testing.T) {
	master := make([]byte, SeedLen)
	one, err := SandboxKey(master, "uid-1")
	if err != nil {
		t.Fatal(err)
	}
	again, _ := SandboxKey(master, "uid-1")
	other, _ := SandboxKey(master, "uid-2")
	if !one.Equal(again) || one.Equal(other) {
		t.Error("a key is of its uid, always the same, and no other's")
	}
	for _, bad := range []struct {
		master []byte
		uid    string
	}{{nil, "uid"}, {master, ""}} {
		if _, err := SandboxKey(bad.master, bad.uid); err == nil {
			t.Errorf("a key of %v", bad)
		}
	}
}

func TestKeyFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "sub", "key")
	var wg sync.WaitGroup
	seeds := make([]string, 16)
	for i := range seeds {
		wg.Go(func() {
			seed, err := KeyFile(path)
			if err != nil {
				t.Error(err)
			}
			seeds[i] = string(seed)
		})
	}
	wg.Wait()
	for _, s := range seeds {
		if len(s) != SeedLen || s != seeds[0] {
			t.Fatal("callers at once got different keys")
		}
	}
	if left, _ := os.ReadDir(filepath.Dir(path)); len(left) != 1 {
		t.Errorf("%d files are left", len(left))
	}
	old, fresh := filepath.Join(filepath.Dir(path), durable.TempPrefix+"old"), filepath.Join(filepath.Dir(path), durable.TempPrefix+"new")
	for name, age := range map[string]time.Duration{old: 2 * time.Hour, fresh: 0} {
		if err := errors.Join(os.WriteFile(name, []byte("a secret"), 0o600), os.Chtimes(name, time.Time{}, time.Now().Add(-age))); err != nil {
			t.Fatal(err)
		}
	}
	if seed, err := KeyFile(path); err != nil || string(seed) != seeds[0] {
		t.Errorf("%x, %v", seed, err)
	}
	if _, err := os.Stat(old); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the file of a killed process is left: %v", err)
	}
	if _, err := os.Stat(fresh); err != nil {
		t.Errorf("the file of another process: %v", err)
	}
	if err := os.Chmod(path, 0o640); err != nil {
		t.Fatal(err)
	}
	if _, err := KeyFile(path); agentlab.CodeOf(err) != agentlab.CodeDenied {
		t.Errorf("a key that others can read: %v", err)
	}
	short := filepath.Join(t.TempDir(), "short")
	if err := os.WriteFile(short, []byte("short"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := KeyFile(short); agentlab.CodeOf(err) != agentlab.CodeInvalid {
		t.Errorf("a short key: %v", err)
	}
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(path, link); err != nil {
		t.Fatal(err)
	}
	if _, err := KeyFile(link); err == nil {
		t.Error("a symlink was followed")
	}
}

package fakenet_test

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"encoding/pem"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
	"go.uber.org/goleak"
	"golang.org/x/crypto/ssh"

	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/egress/gate"
	"github.com/agentlab-vm/agentlab/test/fakenet"
	"github.com/agentlab-vm/agentlab/test/guard"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func newNet(t *testing.T) *fakenet.Net {
	t.Helper()
	n := fakenet.New()
	t.Cleanup(n.Close)
	return n
}

// dialers runs a test against the Net itself and against its unix socket, as
// a shim in another process sees it.
func dialers(t *testing.T, n *fakenet.Net, f func(t *testing.T, d gate.Dialer)) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "dial.sock")
	if err := n.ServeUnix(path); err != nil {
		t.Fatal(err)
	}
	t.Run("in process", func(t *testing.T) { f(t, n) })
	t.Run("unix socket", func(t *testing.T) { f(t, fakenet.UnixDialer{Path: path}) })
}

func dial(t *testing.T, d gate.Dialer, network, addr string) net.Conn {
	t.Helper()
	c, err := d.DialContext(t.Context(), network, addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(guard.Patience))
	return c
}

func TestAddressesLookPublic(t *testing.T) {
	t.Parallel()
	n := newNet(t)
	a, b := n.Host("a.test"), n.Host("b.test")
	if a == b || a != n.Host("A.test.") {
		t.Errorf("%s and %s", a, b)
	}
	if rule, denied := egress.AlwaysDenied(a); denied {
		t.Errorf("%s is denied by %s", a, rule)
	}
}

func TestTCPAndHalfClose(t *testing.T) {
	t.Parallel()
	n := newNet(t)
	n.Echo("x.test")
	n.Discard("x.test")
	dialers(t, n, func(t *testing.T, d gate.Dialer) {
		c := dial(t, d, "tcp", n.Host("x.test").String()+":9")
		payload := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
		if _, err := c.Write(payload); err != nil {
			t.Fatal(err)
		}
		if err := c.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
			t.Fatal(err)
		}
		count, err := io.ReadAll(c)
		if err != nil || len(count) != 8 || binary.BigEndian.Uint64(count) != uint64(len(payload)) {
			t.Errorf("discard counted %x, %v", count, err)
		}
		_, err = d.DialContext(t.Context(), "tcp", n.Host("x.test").String()+":10")
		if err == nil || !strings.Contains(err.Error(), syscall.ECONNREFUSED.Error()) {
			t.Errorf("a port without a service: %v", err)
		}
	})
}

func TestUDPKeepsDatagramBoundaries(t *testing.T) {
	t.Parallel()
	n := newNet(t)
	n.Echo("x.test")
	dialers(t, n, func(t *testing.T, d gate.Dialer) {
		c := dial(t, d, "udp", n.Host("x.test").String()+":7")
		sizes := []int{1, 1500, 65507, 2}
		for _, size := range sizes {
			if _, err := c.Write(make([]byte, size)); err != nil {
				t.Fatal(err)
			}
		}
		buf := make([]byte, 1<<16)
		for _, size := range sizes {
			if got, err := c.Read(buf); err != nil || got != size {
				t.Errorf("a datagram of %d came back as %d, %v", size, got, err)
			}
		}
	})
}

func TestDNS(t *testing.T) {
	t.Parallel()
	n := newNet(t)
	want := n.Host("www.test").String()
	for _, network := range []string{"udp", "tcp"} {
		c := &dns.Conn{Conn: dial(t, n, network, "192.31.196.250:53")}
		if network == "udp" {
			c.Conn = packets{c.Conn}
		}
		ask := new(dns.Msg).SetQuestion("WWW.test.", dns.TypeA)
		if err := c.WriteMsg(ask); err != nil {
			t.Fatal(err)
		}
		reply, err := c.ReadMsg()
		if err != nil || len(reply.Answer) != 1 || reply.Answer[0].(*dns.A).A.String() != want {
			t.Errorf("%s: %v, %v", network, reply, err)
		}
	}
}

type packets struct{ net.Conn }

func (packets) LocalAddr() net.Addr { return &net.UDPAddr{} }
func (p packets) ReadFrom(b []byte) (int, net.Addr, error) {
	n, err := p.Read(b)
	return n, nil, err
}
func (p packets) WriteTo(b []byte, _ net.Addr) (int, error) { return p.Write(b) }

// bridge listens on the loopback for a program that knows only real sockets.
func bridge(t *testing.T, n *fakenet.Net, addr string) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	t.Cleanup(func() { _ = l.Close(); <-done })
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			inside, err := n.DialContext(context.Background(), "tcp", addr)
			if err != nil {
				_ = c.Close()
				continue
			}
			go copyThenHalfClose(inside, c)
			go copyThenHalfClose(c, inside)
		}
	}()
	return l.Addr().String()
}

func copyThenHalfClose(dst, src net.Conn) {
	_, _ = io.Copy(dst, src)
	_ = dst.(interface{ CloseWrite() error }).CloseWrite()
}

func git(t *testing.T, dir string, env []string, args ...string) (string, error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "git", args...)
	cmd.Dir = dir
	cmd.Env = append([]string{
		"PATH=" + os.Getenv("PATH"), "HOME=" + dir, "GIT_CONFIG_NOSYSTEM=1", "GIT_TERMINAL_PROMPT=0",
		"GIT_AUTHOR_NAME=a", "GIT_AUTHOR_EMAIL=a@a.test", "GIT_COMMITTER_NAME=a", "GIT_COMMITTER_EMAIL=a@a.test",
	}, env...)
	out, err := cmd.CombinedOutput()
	return strings.TrimSpace(string(out)), err
}

func mustGit(t *testing.T, dir string, env []string, args ...string) string {
	t.Helper()
	out, err := git(t, dir, env, args...)
	if err != nil {
		t.Fatalf("git %v: %v: %s", args, err, out)
	}
	return out
}

func TestGitOverHTTP(t *testing.T) {
	t.Parallel()
	n := newNet(t)
	host, err := fakenet.NewGitHost(t.TempDir(), fakenet.GitConfig{User: "me", Password: "s3cret"})
	if err != nil {
		t.Fatal(err)
	}
	bare, err := host.Create(t.Context(), "team/app.git", map[string]string{"README": "hello", "src/a.txt": "a"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := n.Git("git.test", host); err != nil {
		t.Fatal(err)
	}
	at := bridge(t, n, n.Host("git.test").String()+":80")
	dir := t.TempDir()
	mustGit(t, dir, nil, "clone", "-q", "--depth", "1", "http://"+at+"/team/app.git", "app")
	work := filepath.Join(dir, "app")
	if text, err := os.ReadFile(filepath.Join(work, "src", "a.txt")); err != nil || string(text) != "a" {
		t.Errorf("cloned %q, %v", text, err)
	}
	mustGit(t, work, nil, "checkout", "-q", "-b", "work")
	mustGit(t, work, nil, "commit", "-q", "--allow-empty", "-m", "mine")
	if out, err := git(t, work, nil, "push", "origin", "work"); err == nil {
		t.Errorf("a push without a password went through: %s", out)
	}
	mustGit(t, work, nil, "push", "-q", "http://me:s3cret@"+at+"/team/app.git", "work")
	if subject, err := host.Git(t.Context(), "-C", bare, "log", "-1", "--format=%s", "work"); err != nil || subject != "mine" {
		t.Errorf("pushed %q, %v", subject, err)
	}
	if _, err := git(t, dir, nil, "clone", "-q", "http://"+at+"/missing.git"); err == nil {
		t.Error("a missing repository was cloned")
	}
}

func TestGitOverSSH(t *testing.T) {
	t.Parallel()
	n := newNet(t)
	dir := t.TempDir()
	key, line := sshKey(t, filepath.Join(dir, "id"))
	stranger, _ := sshKey(t, filepath.Join(dir, "stranger"))
	host, err := fakenet.NewGitHost(filepath.Join(dir, "repos"), fakenet.GitConfig{SSHKeys: []string{line}})
	if err != nil {
		t.Fatal(err)
	}
	bare, err := host.Create(t.Context(), "app.git", map[string]string{"README": "hello"})
	if err != nil {
		t.Fatal(err)
	}
	known, err := n.Git("git.test", host)
	if err != nil {
		t.Fatal(err)
	}
	knownHosts := filepath.Join(dir, "known_hosts")
	if err := os.WriteFile(knownHosts, []byte(known+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	ip, port, _ := net.SplitHostPort(bridge(t, n, n.Host("git.test").String()+":22"))
	env := func(key string) []string {
		return []string{"GIT_SSH_COMMAND=ssh -F none -p " + port + " -i " + key + " -o IdentitiesOnly=yes -o HostKeyAlias=git.test -o StrictHostKeyChecking=yes -o BatchMode=yes -o UserKnownHostsFile=" + knownHosts}
	}
	url := "ssh://git@" + ip + "/app.git"
	if out, err := git(t, dir, env(stranger), "clone", "-q", url, "no"); err == nil {
		t.Errorf("a stranger cloned: %s", out)
	}
	mustGit(t, dir, env(key), "clone", "-q", url, "app")
	work := filepath.Join(dir, "app")
	mustGit(t, work, nil, "commit", "-q", "--allow-empty", "-m", "over ssh")
	mustGit(t, work, env(key), "push", "-q", "origin", "HEAD:work")
	if subject, err := host.Git(t.Context(), "-C", bare, "log", "-1", "--format=%s", "work"); err != nil || subject != "over ssh" {
		t.Errorf("pushed %q, %v", subject, err)
	}
}

func sshKey(t *testing.T, path string) (file, public string) {
	t.Helper()
	pub, priv, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	block, err := ssh.MarshalPrivateKey(priv, "")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, pem.EncodeToMemory(block), 0o600); err != nil {
		t.Fatal(err)
	}
	sp, err := ssh.NewPublicKey(pub)
	if err != nil {
		t.Fatal(err)
	}
	return path, string(ssh.MarshalAuthorizedKey(sp))
}

func TestWebWithTLS(t *testing.T) {
	t.Parallel()
	n := newNet(t)
	ca, err := fakenet.NewCA()
	if err != nil {
		t.Fatal(err)
	}
	at, err := n.HandleHTTPS("www.test", 443, ca, fakenet.Site())
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca.PEM())
	tr := &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return n.DialContext(ctx, "tcp", at.String())
		},
		TLSClientConfig: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12},
	}
	t.Cleanup(tr.CloseIdleConnections)
	resp, err := (&http.Client{Transport: tr}).Get("https://www.test/bytes/100000")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	if size, err := io.Copy(io.Discard, resp.Body); size != 100000 || err != nil {
		t.Errorf("%d bytes, %v", size, err)
	}
}

func TestClosedNetworkRejects(t *testing.T) {
	t.Parallel()
	n := fakenet.New()
	n.Echo("x.test")
	at := n.Host("x.test").String() + ":7"
	c, err := n.DialContext(t.Context(), "tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	n.Close()
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("an open connection reads %v", err)
	}
	_ = c.Close()
	if _, err := n.DialContext(t.Context(), "tcp", at); err == nil {
		t.Error("a new connection was made")
	}
}

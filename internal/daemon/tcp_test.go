package daemon

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/big"
	"net"
	"net/netip"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/config"
	"github.com/agentlab-vm/agentlab/internal/server"
)

// writeCert writes a self-signed certificate with that serial number.
func writeCert(t *testing.T, certFile, keyFile string, serial int64) (pemText []byte) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(serial), DNSNames: []string{"lab.example"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	pemText = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	for name, text := range map[string][]byte{certFile: pemText, keyFile: pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER})} {
		if err := os.WriteFile(name, text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return pemText
}

// TestRemoteDaemon uses a daemon over TLS, with a token that was created over
// its unix socket, before and after a restart.
func TestRemoteDaemon(t *testing.T) {
	h := newHome(t)
	dir := t.TempDir()
	cert, key := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	ca := writeCert(t, cert, key, 1)
	h.configure(t, fmt.Sprintf("backend: fake\napi: {listen: \"127.0.0.1:0\", tls_cert: %s, tls_key: %s}\n", cert, key))
	stop := h.start(t)
	made, err := h.client.CreateToken(t.Context(), api.TokenCreate{Name: "far", Role: "write", TTLMinutes: 60})
	if err != nil {
		t.Fatal(err)
	}
	remote := func(token string) *client.Client {
		s, err := h.client.Status(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		c, err := client.NewRemote(client.Remote{URL: "https://" + s.Listen, Token: token, CA: ca})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(c.Close)
		return c
	}
	far := remote(made.Secret)
	if _, err := far.CreateSandbox(t.Context(), api.SandboxCreate{Name: "box"}); err != nil {
		t.Fatal(err)
	}
	if err := far.StopDaemon(t.Context(), false); agentlab.CodeOf(err) != agentlab.CodeDenied {
		t.Errorf("stopped from afar: %v", err)
	}
	if _, err := far.CreateToken(t.Context(), api.TokenCreate{Name: "more", Role: "read", TTLMinutes: 60}); agentlab.CodeOf(err) != agentlab.CodeDenied {
		t.Errorf("a token makes a token: %v", err)
	}
	stop()

	// The token outlives the daemon; its secret is in no file of the daemon's.
	h.start(t)
	if _, err := remote(made.Secret).Sandbox(t.Context(), "box"); err != nil {
		t.Errorf("after a restart: %v", err)
	}
	if _, err := remote("agentlab_"+strings.Repeat("a", 52)).Sandbox(t.Context(), "box"); agentlab.CodeOf(err) != agentlab.CodeDenied {
		t.Errorf("a made-up token: %v", err)
	}
	random := []byte(strings.TrimPrefix(made.Secret, "agentlab_"))
	files := 0
	err = filepath.WalkDir(h.paths.Home, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		files++
		text, err := os.ReadFile(path)
		if bytes.Contains(text, random) {
			t.Errorf("%s holds the token", path)
		}
		return err
	})
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	if files < 3 {
		t.Errorf("only %d files were looked at", files)
	}
}

func TestRefusedTCP(t *testing.T) {
	dir := t.TempDir()
	cert, key := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	writeCert(t, cert, key, 1)
	open := filepath.Join(dir, "open.pem")
	writeCert(t, open, open+".key", 2)
	if err := os.Chmod(open+".key", 0o644); err != nil {
		t.Fatal(err)
	}
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = taken.Close() }()
	for name, c := range map[string]struct {
		yaml, field string
		code        agentlab.Code
	}{
		"everybody's key": {fmt.Sprintf("listen: \"127.0.0.1:0\", tls_cert: %s, tls_key: %s", open, open+".key"), "api.tls_key", agentlab.CodeDenied},
		"another's key":   {fmt.Sprintf("listen: \"127.0.0.1:0\", tls_cert: %s, tls_key: %s", open, key), "api.tls_cert", agentlab.CodeInvalid},
		"no file":         {fmt.Sprintf("listen: \"127.0.0.1:0\", tls_cert: %s, tls_key: %s/none", cert, dir), "api.tls_key", agentlab.CodeInvalid},
		"no certificate":  {fmt.Sprintf("listen: \"127.0.0.1:0\", tls_cert: %s, tls_key: %s", key, key), "api.tls_cert", agentlab.CodeInvalid},
		"taken":           {fmt.Sprintf("listen: %q", taken.Addr()), "api.listen", agentlab.CodeUnavailable},
		"groups":          {"groups: {agentlab: write}", "api.groups", agentlab.CodeInvalid},
	} {
		h := newHome(t)
		h.configure(t, "backend: fake\napi: {"+c.yaml+"}\n")
		_, err := h.open(t)
		if e, ok := errors.AsType[*agentlab.Error](err); !ok || e.Code != c.code || e.Field != c.field {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestSocketOfGroups: one group owns the socket; for several it is open, and
// the peer's credentials decide alone.
func TestSocketOfGroups(t *testing.T) {
	gid := os.Getgid()
	g, err := user.LookupGroupId(strconv.Itoa(gid))
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		groups map[string]server.Access
		mode   fs.FileMode
	}{
		"one":     {map[string]server.Access{g.Name: server.AccessWrite}, 0o660},
		"unknown": {map[string]server.Access{"no-such-group-here": server.AccessWrite}, 0o660},
		"two":     {map[string]server.Access{g.Name: server.AccessRead, "no-such-group-here": server.AccessWrite}, 0o666},
	} {
		var logged strings.Builder
		d := &Daemon{cfg: Config{Paths: config.Paths{System: true, Run: t.TempDir()}}, log: slog.New(slog.NewTextHandler(&logged, nil))}
		l, err := d.listen(c.groups)
		if err != nil {
			t.Fatal(err)
		}
		info, err := os.Stat(d.cfg.Paths.Socket())
		if err != nil || info.Mode().Perm() != c.mode {
			t.Errorf("%s: %v, %v", name, info.Mode(), err)
		}
		if warned := strings.Contains(logged.String(), "only root"); warned != (name == "unknown") {
			t.Errorf("%s: logged %q", name, logged.String())
		}
		_ = l.Close()
	}
}

// TestListenOn: an address of IPv4 is one of IPv4 only, also the one that
// means all.
func TestListenOn(t *testing.T) {
	for configured, want := range map[string][2]string{
		"127.0.0.1:8843":        {"tcp4", "127.0.0.1:8843"},
		"0.0.0.0:8843":          {"tcp4", "0.0.0.0:8843"},
		"[::ffff:0.0.0.0]:8843": {"tcp4", "0.0.0.0:8843"},
		"[::]:8843":             {"tcp", "[::]:8843"},
		"[::1]:8843":            {"tcp", "[::1]:8843"},
		"[fe80::1%lo]:8843":     {"tcp", "[fe80::1%lo]:8843"},
	} {
		if network, addr := listenOn(configured); network != want[0] || addr != want[1] {
			t.Errorf("%s: %s %s", configured, network, addr)
		}
	}
	h := newHome(t)
	cert, key := filepath.Join(t.TempDir(), "cert.pem"), filepath.Join(t.TempDir(), "key.pem")
	writeCert(t, cert, key, 1)
	h.configure(t, fmt.Sprintf("backend: fake\napi: {listen: \"0.0.0.0:0\", tls_cert: %s, tls_key: %s}\n", cert, key))
	stop := h.start(t)
	defer stop()
	s, err := h.client.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if a, err := netip.ParseAddrPort(s.Listen); err != nil || a.Addr() != netip.IPv4Unspecified() {
		t.Errorf("it listens on %q, %v", s.Listen, err)
	}
}

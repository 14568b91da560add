package sandboxcmd

import (
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/crypto/ssh"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/cli"
)

// ownSSHOptions is what a user may have for all hosts.
const ownSSHOptions = `Host *
	SetEnv SECRET=1
	RemoteCommand echo mine
	PKCS11Provider /nonexistent
	IdentityFile KEYS/ed25519
	IdentityFile KEYS/rsa
	IdentityFile KEYS/p256
	CertificateFile KEYS/ed25519-cert.pub
`

// sshLab has the configuration of ssh-config and, after it, one of the user.
func sshLab(t *testing.T, own string) (f sshFiles, config string) {
	t.Helper()
	if _, err := exec.LookPath("ssh"); err != nil {
		t.Skip("ssh is not installed")
	}
	dir := t.TempDir()
	f = sshFiles{dir: filepath.Join(dir, "agentlab"), user: filepath.Join(dir, "config")}
	text, err := sshConfig(&cli.App{}, f)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.makeKey(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(f.user, []byte(text+strings.ReplaceAll(own, "KEYS", dir)), 0o600); err != nil {
		t.Fatal(err)
	}
	return f, f.user
}

// OpenSSH itself, with a server that wants to see all keys: neither keys nor variables nor
// commands of the user reach it.
func TestSSHConfigOffersOneKey(t *testing.T) {
	t.Parallel()
	f, config := sshLab(t, ownSSHOptions)
	dir := filepath.Dir(f.user)
	_, edKey, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	rsaKey, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	p256, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	for name, key := range map[string]any{"ed25519": edKey, "rsa": rsaKey, "p256": p256} {
		private, err := sshPrivateFile(key)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), private, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	signer, err := ssh.NewSignerFromKey(edKey)
	if err != nil {
		t.Fatal(err)
	}
	cert := &ssh.Certificate{Key: signer.PublicKey(), CertType: ssh.UserCert, ValidBefore: ssh.CertTimeInfinity}
	if err := cert.SignCert(rand.Reader, signer); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "ed25519-cert.pub"), ssh.MarshalAuthorizedKey(cert), 0o600); err != nil {
		t.Fatal(err)
	}

	offered, port := keyCollector(t, signer)
	out, err := exec.CommandContext(t.Context(), "ssh", "-F", config, "-o", "ProxyCommand=none", "-o", "Hostname=127.0.0.1", "-p", strconv.Itoa(port),
		"-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "BatchMode=yes", "play"+sshSuffix, "true").CombinedOutput()
	if err == nil {
		t.Fatal("the server accepted a key")
	}
	own, err := f.publicKey()
	if err != nil {
		t.Fatal(err)
	}
	if got := <-offered; !slices.Equal(got, []string{string(ssh.MarshalAuthorizedKey(own))}) {
		t.Errorf("offered %q\n%s", got, out)
	}
}

// keyCollector serves one connection, accepts no key, and returns all that were offered.
func keyCollector(t *testing.T, host ssh.Signer) (offered <-chan []string, port int) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = ln.Close() })
	done := make(chan []string, 1)
	go func() {
		var keys []string
		defer func() { done <- keys }()
		conn, err := ln.Accept()
		if err != nil {
			return
		}
		config := &ssh.ServerConfig{MaxAuthTries: 100, PublicKeyCallback: func(_ ssh.ConnMetadata, key ssh.PublicKey) (*ssh.Permissions, error) {
			keys = append(keys, string(ssh.MarshalAuthorizedKey(key)))
			return nil, agentlab.Errorf(agentlab.CodeDenied, "refused")
		}}
		config.AddHostKey(host)
		_, _, _, _ = ssh.NewServerConn(conn, config)
		_ = conn.Close()
	}()
	return done, ln.Addr().(*net.TCPAddr).Port
}

// What OpenSSH makes of options for all hosts.
func TestSSHConfigWithOptionsForAllHosts(t *testing.T) {
	_, config := sshLab(t, ownSSHOptions)
	out, err := exec.CommandContext(t.Context(), "ssh", "-G", "-F", config, "play"+sshSuffix).Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{"SECRET", "echo mine", "pkcs11provider /"} {
		if strings.Contains(string(out), bad) {
			t.Errorf("%s is in\n%s", bad, out)
		}
	}
	const host = "play" + sshSuffix
	caller := func(config string) []string { return []string{"ssh", "-F", config, "-D", "1080", host} }
	if err := checkSSHOptions(t.Context(), host, caller(config)); err != nil {
		t.Error(err)
	}
	for _, bad := range []string{
		"RemoteForward 9000 127.0.0.1:80", "RemoteForward /tmp/in.sock /run/user/1000/bus", "RemoteForward 1080", "LocalForward 5432 127.0.0.1:5432",
		"DynamicForward 1080", "SendEnv TOKEN", "SendEnv LANG AWS_*", "SendEnv *",
	} {
		_, config = sshLab(t, "Host *\n\t"+bad+"\n")
		err := checkSSHOptions(t.Context(), host, caller(config))
		if agentlab.CodeOf(err) != agentlab.CodeDenied || !strings.Contains(err.Error(), strings.ToLower(strings.Fields(bad)[0])) {
			t.Errorf("%s: %v", bad, err)
		}
		_, config = sshLab(t, "Host * !*.agentlab\n\t"+bad+"\n")
		if err := checkSSHOptions(t.Context(), host, caller(config)); err != nil {
			t.Errorf("%s for other hosts: %v", bad, err)
		}
	}
	_, config = sshLab(t, "Host *\n\tSendEnv LANG LC_*\n")
	if err := checkSSHOptions(t.Context(), host, caller(config)); err != nil {
		t.Error(err)
	}
	if err := checkSSHOptions(t.Context(), host, caller("/nonexistent")); agentlab.CodeOf(err) != agentlab.CodeUnavailable {
		t.Errorf("a configuration that cannot be read: %v", err)
	}
}

func TestSSHConfigArg(t *testing.T) {
	for line, want := range map[string]string{
		"ssh h":                         "",
		"ssh -F file h":                 "file",
		"ssh -Ffile h":                  "file",
		"/usr/bin/ssh -vTF file h":      "file",
		"ssh -T -D 1 -o A=b -F file h":  "file",
		"ssh -o -F h":                   "",
		"ssh h -F file":                 "file",
		"ssh h -F file true":            "file",
		"ssh h cat -F file":             "",
		"ssh -- h":                      "",
		"ssh -F":                        "",
		"code -F file":                  "",
		"ssh -i key -l user -F a/b h x": "a/b",
	} {
		if got := sshConfigArg(strings.Fields(line)); got != want {
			t.Errorf("%s: %q, want %q", line, got, want)
		}
	}
	if got := sshConfigArg(nil); got != "" {
		t.Error(got)
	}
}

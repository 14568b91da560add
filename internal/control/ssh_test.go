//go:build linux

package control_test

import (
	"crypto/ed25519"
	"crypto/rand"
	"net"
	"strings"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/guest/guestd"
	"github.com/agentlab-vm/agentlab/test/guard"
)

func TestSSHKey(t *testing.T) {
	sshd, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	t.Cleanup(func() { _ = sshd.Close(); <-done })
	go func() {
		defer close(done)
		for {
			c, err := sshd.Accept()
			if err != nil {
				return
			}
			_, _ = c.Write([]byte("SSH-2.0-test\r\n"))
			_ = c.Close()
		}
	}()
	g := newGuest(t, func(c *guestd.Config) { c.SSHD = sshd.Addr().String() })
	newKey := func() string {
		pub, _, _ := ed25519.GenerateKey(rand.Reader)
		k, err := ssh.NewPublicKey(pub)
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(string(ssh.MarshalAuthorizedKey(k)))
	}
	one, two := newKey(), newKey()
	file := "run/agentlab/ssh/authorized_keys.d/" + g.me.Username
	g.put(t, file, `expiry-time="20200101000000" `+newKey()+"\n")
	resp, err := g.SSHKey(guard.Context(t), guestapi.SSHKeyRequest{PublicKey: one + " a comment", Seconds: 100})
	if err != nil {
		t.Fatal(err)
	}
	if resp.User != g.me.Username || resp.Port != 22 || len(resp.HostKeys) != 1 || !strings.HasPrefix(resp.HostKeys[0], "ssh-ed25519 ") {
		t.Errorf("%+v", resp)
	}
	for range 2 {
		if _, err := g.SSHKey(guard.Context(t), guestapi.SSHKeyRequest{PublicKey: two, Seconds: 200}); err != nil {
			t.Fatal(err)
		}
	}
	var keys []string
	rest := []byte(g.file(t, file))
	for len(rest) > 0 {
		k, _, options, more, err := ssh.ParseAuthorizedKey(rest)
		if err != nil {
			t.Fatal(err)
		}
		at, err := time.ParseInLocation(`expiry-time="20060102150405"`, options[0], time.Local)
		if err != nil || len(options) != 1 || time.Until(at) < 50*time.Second || time.Until(at) > 201*time.Second {
			t.Errorf("options %q, %v", options, err)
		}
		keys = append(keys, strings.TrimSpace(string(ssh.MarshalAuthorizedKey(k))))
		rest = more
	}
	if len(keys) != 2 || keys[0] != one || keys[1] != two {
		t.Errorf("authorized: %q", keys)
	}
	if want := strings.TrimSpace(g.file(t, "etc/ssh/ssh_host_ed25519_key.pub")); resp.HostKeys[0] != want {
		t.Errorf("host keys %q, want %q", resp.HostKeys, want)
	}
	for name, bad := range map[string]guestapi.SSHKeyRequest{
		"option":    {PublicKey: `command="x" ` + one, Seconds: 1},
		"two lines": {PublicKey: one + "\n" + two, Seconds: 1},
		"no key":    {PublicKey: "ssh-ed25519 AAAA", Seconds: 1},
		"mismatch":  {PublicKey: "ssh-rsa " + strings.Fields(one)[1], Seconds: 1},
		"empty":     {Seconds: 1},
		"forever":   {PublicKey: one, Seconds: 86401},
		"never":     {PublicKey: one},
	} {
		if _, err := g.SSHKey(guard.Context(t), bad); agentlab.CodeOf(err) != agentlab.CodeInvalid {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := g.SSHKey(guard.Context(t), guestapi.SSHKeyRequest{User: "../x", PublicKey: one, Seconds: 1}); agentlab.CodeOf(err) != agentlab.CodeNotFound {
		t.Errorf("an unknown user: %v", err)
	}
}

func TestPower(t *testing.T) {
	g := newGuest(t, nil)
	if err := g.Power(guard.Context(t), "sleep"); agentlab.CodeOf(err) != agentlab.CodeInvalid {
		t.Errorf("%v", err)
	}
	if err := g.Power(guard.Context(t), "poweroff"); err != nil {
		t.Fatal(err)
	}
	if got := <-g.kernel.rebooted; got != "poweroff" {
		t.Errorf("got %q", got)
	}
}

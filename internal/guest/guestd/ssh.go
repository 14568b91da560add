//go:build linux

package guestd

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/sshkey"
)

const (
	hostKeyFile   = "/etc/ssh/ssh_host_ed25519_key"
	publicKeyFile = hostKeyFile + ".pub"
	sshPort       = 22
	sshdWait      = 60 * time.Second
	maxKeys       = 100 // unexpired ephemeral keys of one user
)

// setHostKey sets the SSH host key if there is none, or if it belongs to another
// identity or to a template. It creates one if key is nil. alone means that there is
// no other.
func (s *Server) setHostKey(uid string, key *guestapi.HostKey, continues, alone bool) error {
	if !continues && s.has(uid) {
		if s.hasHostKey() {
			return nil
		}
		return s.writeHostKey(key)
	}
	if !alone {
		if err := s.removeHostKeys(); err != nil {
			return err
		}
	}
	if err := s.writeHostKey(key); err != nil {
		return err
	}
	// A running sshd still has the old keys; one that is starting, too.
	if continues {
		s.reloadSSHD()
	} else if s.systemdRuns() {
		s.wg.Go(func() { _ = s.systemctl(s.ctx, "try-restart", "ssh.service", "sshd.service") })
	}
	return nil
}

// removeHostKeys removes all host keys except those that writeHostKey replaces.
func (s *Server) removeHostKeys() error {
	old, _ := filepath.Glob(s.path("/etc/ssh/ssh_host_*_key*"))
	for _, name := range old {
		if name == s.path(hostKeyFile) || name == s.path(publicKeyFile) {
			continue
		}
		if err := os.Remove(name); err != nil {
			return err
		}
	}
	return nil
}

// hasHostKey reports whether there is a host key. An empty file, which a power
// cut can leave, does not count.
func (s *Server) hasHostKey() bool {
	for _, name := range []string{hostKeyFile, publicKeyFile} {
		if fi, err := os.Stat(s.path(name)); err != nil || fi.Size() == 0 {
			return false
		}
	}
	return true
}

// writeHostKey writes key, or a new one if it is nil.
func (s *Server) writeHostKey(key *guestapi.HostKey) error {
	if key == nil {
		key = &guestapi.HostKey{}
		key.Private, key.Public = sshkey.New()
	}
	if err := s.overwriteFile(publicKeyFile, []byte(key.Public), 0o644); err != nil {
		return err
	}
	return s.overwriteFile(hostKeyFile, []byte(key.Private), 0o600)
}

func (s *Server) handleSSHKey(w http.ResponseWriter, r *http.Request) {
	var req guestapi.SSHKeyRequest
	if !decode(w, r, &req) {
		return
	}
	a, err := s.account(req.User)
	if err != nil {
		fail(w, err)
		return
	}
	if err := s.authorize(a.name, req); err != nil {
		fail(w, err)
		return
	}
	if !s.hasHostKey() {
		if err := s.writeHostKey(nil); err != nil {
			fail(w, err)
			return
		}
	}
	ctx, cancel := context.WithTimeout(r.Context(), sshdWait)
	defer cancel()
	if err := s.ensureSSHD(ctx); err != nil {
		fail(w, err)
		return
	}
	reply(w, guestapi.SSHKeyResponse{User: a.name, Port: sshPort, HostKeys: s.hostKeys()})
}

// authorize accepts the key until it expires, and removes expired keys.
func (s *Server) authorize(user string, req guestapi.SSHKeyRequest) error {
	key, err := parseKey(req.PublicKey)
	if err != nil {
		return err
	}
	if req.Seconds < 1 || req.Seconds > 86400 {
		return agentlab.Errorf(agentlab.CodeInvalid, "%d is not between 1 and 86400", req.Seconds).WithField("seconds")
	}
	s.keyMu.Lock()
	defer s.keyMu.Unlock()
	name := filepath.Join(keysDir, user)
	old, err := os.ReadFile(s.path(name))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	now := time.Now()
	plain := []byte(key.line() + "\n")
	kept := validKeys(old, plain, now)
	if len(kept) >= maxKeys {
		return agentlab.Errorf(agentlab.CodeLimit, "%d keys are authorized for %s", maxKeys, user)
	}
	// sshd reads the time in the guest's zone, to the second.
	expiry := now.Add(time.Duration(req.Seconds)*time.Second + time.Second - 1).Truncate(time.Second)
	line := append([]byte(`expiry-time="`+expiry.Local().Format(expiryLayout)+`" `), plain...)
	return s.writeFile(name, bytes.Join(append(kept, line), nil), 0o644, 0, 0)
}

const expiryLayout = "20060102150405"

// validKeys returns the lines of the server's authorized_keys file that are not
// for key and have not expired.
func validKeys(file, key []byte, now time.Time) [][]byte {
	var kept [][]byte
	for line := range bytes.Lines(file) {
		rest, ok := bytes.CutPrefix(line, []byte(`expiry-time="`))
		at, k, ok2 := bytes.Cut(rest, []byte(`" `))
		if !ok || !ok2 || bytes.Equal(k, key) {
			continue
		}
		if t, err := time.ParseInLocation(expiryLayout, string(at), time.Local); err == nil && t.After(now) {
			kept = append(kept, line)
		}
	}
	return kept
}

func (s *Server) hostKeys() []string {
	names, _ := filepath.Glob(s.path("/etc/ssh/ssh_host_*_key.pub"))
	keys := []string{}
	for _, name := range names {
		b, err := os.ReadFile(name)
		if err != nil {
			continue
		}
		if line := strings.TrimSpace(string(b)); oneLine(line) {
			keys = append(keys, line)
		}
	}
	return keys
}

// ensureSSHD starts sshd if it does not answer, as a service if systemd runs,
// otherwise directly. It returns when sshd answers.
func (s *Server) ensureSSHD(ctx context.Context) error {
	if s.sshdAnswers(ctx) {
		return nil
	}
	t := time.NewTicker(100 * time.Millisecond)
	defer t.Stop()
	started := false
	for {
		if !started {
			started = s.startSSHD(ctx)
		}
		if s.sshdAnswers(ctx) {
			return nil
		}
		select {
		case <-ctx.Done():
			return agentlab.Errorf(agentlab.CodeUnavailable, "sshd does not answer in the guest").
				WithHint("is openssh-server part of the image?")
		case <-t.C:
		}
	}
}

// startSSHD reports whether sshd was started.
func (s *Server) startSSHD(ctx context.Context) bool {
	if s.systemdRuns() {
		if s.systemctl(ctx, "start", "ssh.service") == nil || s.systemctl(ctx, "start", "sshd.service") == nil {
			return true
		}
	} else if s.systemdWanted() && s.sshdEnabled() {
		return false // it is starting
	}
	_ = os.MkdirAll(s.path("/run/sshd"), 0o755)
	return exec.CommandContext(ctx, "/usr/sbin/sshd").Run() == nil
}

// sshdEnabled reports whether systemd will start sshd by itself.
func (s *Server) sshdEnabled() bool {
	for _, unit := range []string{"ssh.service", "sshd.service", "ssh.socket", "sshd.socket"} {
		found, _ := filepath.Glob(s.path("/etc/systemd/system/*.wants/" + unit))
		if len(found) > 0 {
			return true
		}
	}
	return false
}

func (s *Server) sshdAnswers(ctx context.Context) bool {
	d := net.Dialer{Timeout: 5 * time.Second}
	c, err := d.DialContext(ctx, "tcp", s.cfg.SSHD)
	if err != nil {
		return false
	}
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	var b [4]byte
	n, _ := c.Read(b[:])
	return n > 0 && strings.HasPrefix("SSH-", string(b[:n]))
}

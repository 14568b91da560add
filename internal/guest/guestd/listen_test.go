//go:build linux

package guestd

import (
	"context"
	"crypto/ed25519"
	"encoding/json"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/control"
	"github.com/agentlab-vm/agentlab/internal/link"
	"github.com/agentlab-vm/agentlab/test/guard"
)

func controllerKey(t *testing.T) ed25519.PrivateKey {
	t.Helper()
	key, err := link.SandboxKey(make([]byte, link.SeedLen), "uid-1")
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func controlFile(t *testing.T, dir string, mode os.FileMode, change func(*guestapi.ControlConfig)) string {
	t.Helper()
	pub, _ := controllerKey(t).Public().(ed25519.PublicKey)
	c := guestapi.ControlConfig{VMID: 1001, UID: "uid-1", Controller: "http://10.77.0.1:8844", HostKey: pub}
	if change != nil {
		change(&c)
	}
	b, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(dir, "control.json")
	if err := os.WriteFile(name, b, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(name, mode); err != nil {
		t.Fatal(err)
	}
	return name
}

func TestReadControl(t *testing.T) {
	if _, err := readControl(controlFile(t, t.TempDir(), 0o644, nil)); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		mode   os.FileMode
		change func(*guestapi.ControlConfig)
		want   agentlab.Code
	}{
		"all may write":  {0o666, nil, agentlab.CodeDenied},
		"group may":      {0o664, nil, agentlab.CodeDenied},
		"no vmid":        {0o644, func(c *guestapi.ControlConfig) { c.VMID = 0 }, agentlab.CodeInvalid},
		"no uid":         {0o644, func(c *guestapi.ControlConfig) { c.UID = "" }, agentlab.CodeInvalid},
		"uid of a path":  {0o644, func(c *guestapi.ControlConfig) { c.UID = "../x" }, agentlab.CodeInvalid},
		"half a key":     {0o644, func(c *guestapi.ControlConfig) { c.HostKey = c.HostKey[:16] }, agentlab.CodeInvalid},
		"no key":         {0o644, func(c *guestapi.ControlConfig) { c.HostKey = nil }, agentlab.CodeInvalid},
		"a key too much": {0o644, func(c *guestapi.ControlConfig) { c.HostKey = append(c.HostKey, 0) }, agentlab.CodeInvalid},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := readControl(controlFile(t, t.TempDir(), c.mode, c.change)); agentlab.CodeOf(err) != c.want {
				t.Errorf("got %v, want %s", err, c.want)
			}
		})
	}
	for name, text := range map[string]string{"empty": "", "cut short": `{"vmid":1`, "another key": `{"vmid":1,"admin":true}`} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "control.json")
			if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			if _, err := readControl(file); agentlab.CodeOf(err) != agentlab.CodeInvalid {
				t.Errorf("got %v", err)
			}
		})
	}
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(controlFile(t, t.TempDir(), 0o644, nil), link); err != nil {
		t.Fatal(err)
	}
	if _, err := readControl(link); err == nil {
		t.Error("a symlink was followed")
	}
}

// Over TCP the server does what it does over a port, for its controller alone.
func TestServeTCP(t *testing.T) {
	root := t.TempDir()
	done := make(chan error, 1)
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	to := tcp.Addr().String()
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		done <- serveTCP(ctx, Config{Root: root}, tcp, controlFile(t, t.TempDir(), 0o600, nil))
	}()
	key := controllerKey(t)
	c := control.New(func(ctx context.Context) (net.Conn, error) {
		var d net.Dialer
		raw, err := d.DialContext(ctx, "tcp", to)
		if err != nil {
			return nil, err
		}
		return link.DialTLS(ctx, raw, key)
	})
	if _, err := c.Health(t.Context()); err != nil {
		t.Error(err)
	}
	if b, err := os.ReadFile(filepath.Join(root, guestKeyFile)); err != nil || len(b) != link.SeedLen {
		t.Errorf("the guest's key: %d bytes, %v", len(b), err)
	}
	raw, err := net.Dial("tcp", to)
	if err != nil {
		t.Fatal(err)
	}
	other, _ := link.SandboxKey(make([]byte, link.SeedLen), "uid-2")
	if _, err := link.DialTLS(t.Context(), raw, other); agentlab.CodeOf(err) != agentlab.CodeDenied {
		t.Errorf("another key: %v", err)
	}
	cancel()
	if err := <-done; err == nil {
		t.Error("it ended without a reason")
	}
}

// A machine-id of this boot is kept by the first identity; one of the template
// is not.
func TestFreshMachineID(t *testing.T) {
	const id = "0123456789abcdef0123456789abcdef"
	boot := time.Now().Add(-time.Hour)
	for name, c := range map[string]struct {
		made  time.Time
		uid   string
		fresh bool
	}{
		"made in this boot":         {boot.Add(time.Second), "", true},
		"baked into the template":   {boot.Add(-time.Hour), "", false},
		"of an earlier identity":    {boot.Add(time.Second), "uid-0", false},
		"of this sandbox, rebooted": {boot.Add(-time.Hour), "uid-1", false},
	} {
		t.Run(name, func(t *testing.T) {
			s := New(Config{Root: t.TempDir()})
			defer s.Close()
			put := func(name, text string) {
				t.Helper()
				if err := s.writeFile(name, []byte(text), 0o644, os.Getuid(), os.Getgid()); err != nil {
					t.Fatal(err)
				}
			}
			put("/proc/stat", "cpu 1 2 3\nbtime "+strconv.FormatInt(boot.Unix(), 10)+"\nprocesses 9\n")
			put("/etc/machine-id", id+"\n")
			if c.uid != "" {
				put(uidFile, c.uid+"\n")
			}
			if err := os.Chtimes(s.path("/etc/machine-id"), c.made, c.made); err != nil {
				t.Fatal(err)
			}
			if err := s.noteFreshMachineID(); err != nil {
				t.Fatal(err)
			}
			if got := s.line(freshFile) == id; got != c.fresh {
				t.Errorf("fresh: %v", got)
			}
			if err := s.setMachineID("uid-1", false); err != nil {
				t.Fatal(err)
			}
			kept := c.fresh || c.uid == "uid-1"
			if got := s.line("/etc/machine-id") == id; got != kept {
				t.Errorf("kept: %v", got)
			}
		})
	}
}

// The disk gets the UID of an identity later, so that a boot after a power cut before
// renews the machine-id.
func TestKeepIdentity(t *testing.T) {
	root := t.TempDir()
	put := func(name, text string) {
		t.Helper()
		path := filepath.Join(root, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	server := func(after time.Duration) *Server {
		s := New(Config{Root: root, KeepAfter: after})
		t.Cleanup(func() { _ = s.Close() })
		return s
	}
	boot := func(after time.Duration) *Server {
		t.Helper()
		if err := os.RemoveAll(filepath.Join(root, runDir)); err != nil {
			t.Fatal(err)
		}
		return server(after)
	}
	identify := func(s *Server, uid string) (machine string) {
		t.Helper()
		if err := s.setMachineID(uid, false); err != nil {
			t.Fatal(err)
		}
		put(bootUIDFile, uid+"\n")
		return s.line(machineIDFile)
	}
	kept := func(s *Server, uid string) {
		t.Helper()
		guard.Until(t, "the disk has the UID "+uid, func() bool { return s.line(uidFile) == uid })
	}
	s := boot(time.Hour)
	lost := identify(s, "uid-1")
	s.keepLater()
	if got := identify(s, "uid-1"); got != lost {
		t.Error("a repeated identity renewed the machine-id")
	}
	s = boot(time.Millisecond) // after a power cut
	if got := s.line(uidFile); got != "" {
		t.Fatalf("the disk has the UID %q already", got)
	}
	machine := identify(s, "uid-1")
	if machine == lost {
		t.Error("a machine-id that may be another guest's was kept")
	}
	// A failure is repeated. What is no file does not block.
	key, state := filepath.Join(root, hostKeyFile), filepath.Join(root, filepath.Dir(uidFile))
	put(filepath.Dir(uidFile), "")
	if err := errors.Join(os.MkdirAll(filepath.Dir(key), 0o755), syscall.Mkfifo(key, 0o600)); err != nil {
		t.Fatal(err)
	}
	if err := s.keepIdentity(); err == nil {
		t.Error("an identity was kept in a directory that is none")
	}
	s.keepLater()
	if err := os.Remove(state); err != nil {
		t.Fatal(err)
	}
	kept(s, "uid-1")
	s = boot(time.Hour)
	if got := identify(s, "uid-1"); got != machine {
		t.Error("the next boot renewed the machine-id")
	}
	if identify(s, "uid-2") == machine {
		t.Error("another identity kept the machine-id")
	}
	s.keepNow() // before the guest is stopped
	kept(s, "uid-2")

	identify(s, "uid-3")
	s = server(time.Millisecond) // the server was killed
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = s.Serve(l) }()
	kept(s, "uid-3")
}

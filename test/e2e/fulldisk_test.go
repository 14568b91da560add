package e2e

import (
	"encoding/json"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/test/guard"
	"github.com/agentlab-vm/agentlab/test/smalldisk"
)

// A guest fills the host's disk and is paused. With the disk full to the last
// byte, sandboxes are destroyed: by the daemon that runs, and, when the disk is
// full again, by one that is started after a kill.
func TestFullDiskSandboxEnds(t *testing.T) {
	t.Parallel()
	prepare(t)
	smalldisk.Run(t, "600m", func(t *testing.T, dir string) {
		l := newLabIn(t, filepath.Join(dir, "h"))
		if err := os.MkdirAll(filepath.Join(l.home, "config"), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(l.home, "config", "config.yaml"), []byte("limits:\n  min_free_mb: 100\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		l.ok("sandbox", "new", "--name", "other", "--memory-mb", "512")
		l.fillByGuest()
		smalldisk.Fill(t, dir, 0) // and the rest, by another program
		l.ok("sandbox", "destroy", "other")
		if !strings.Contains(l.ok("--json", "events"), "reserve was released") {
			t.Error("no event about the reserve")
		}

		smalldisk.Fill(t, dir, 0)
		l.killDaemon()
		smalldisk.Fill(t, dir, 0)
		l.ok("sandbox", "destroy", "hog") // starts the daemon
		l.noSandboxFiles()
		if s := l.status(); !strings.Contains(s, "disk reserve") {
			t.Errorf("no finding about the reserve:\n%s", s)
		}
		if err := os.Remove(filepath.Join(dir, "fill")); err != nil {
			t.Fatal(err)
		}
		l.eventually("the reserve is made again", func() bool { return !strings.Contains(l.status(), "disk reserve") })
	})
}

// fillByGuest makes the sandbox "hog", whose guest writes until it is paused.
func (l *lab) fillByGuest() {
	l.Helper()
	l.ok("sandbox", "new", "--name", "hog", "--memory-mb", "512")
	guest := exec.Command(filepath.Join(l.bin, "agentlab"), "exec", "hog", "--", "sh", "-c",
		"head -c 8000000 /dev/urandom >/dev/shm/a; while cat /dev/shm/a; do :; done >/var/tmp/fill")
	guest.Env = l.env
	if err := guest.Start(); err != nil {
		l.Fatal(err)
	}
	l.Cleanup(func() {
		_ = guest.Process.Kill()
		_ = guest.Wait()
	})
	l.eventually("the guest is paused", func() bool { return strings.Contains(l.status(), "paused guests") })
}

// killDaemon kills the daemon and waits for its end.
func (l *lab) killDaemon() {
	l.Helper()
	var s api.Status
	if err := json.Unmarshal([]byte(l.status()), &s); err != nil {
		l.Fatal(err)
	}
	if err := syscall.Kill(s.PID, syscall.SIGKILL); err != nil {
		l.Fatal(err)
	}
	l.eventually("the daemon ends", func() bool {
		conn, err := net.Dial("unix", filepath.Join(l.home, "run", "agentlabd.sock"))
		if err == nil {
			_ = conn.Close()
		}
		return err != nil && !guard.Alive(s.PID)
	})
}

// status is the daemon's status as JSON, whatever it finds.
func (l *lab) status() string {
	l.Helper()
	return l.run("", "--json", "status").stdout
}

func (l *lab) eventually(what string, ok func() bool) {
	l.Helper()
	if !eventually(settleLimit, ok) {
		l.Fatalf("not in time: %s\n%s", what, l.status())
	}
}

package daemon

import (
	"net"
	"path/filepath"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab/test/guard"
)

func TestNotify(t *testing.T) {
	path := filepath.Join(t.TempDir(), "notify")
	l, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	if err := notify(func(string) string { return path }, "READY=1"); err != nil {
		t.Fatal(err)
	}
	_ = l.SetReadDeadline(time.Now().Add(guard.Patience))
	buf := make([]byte, 64)
	n, err := l.Read(buf)
	if err != nil || string(buf[:n]) != "READY=1" {
		t.Errorf("%q, %v", buf[:n], err)
	}
	if err := notify(func(string) string { return "" }, "READY=1"); err != nil {
		t.Error(err)
	}
}

package fakenet_test

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/sockpath"
	"github.com/agentlab-vm/agentlab/test/fakenet"
)

func TestUnixDialerFaults(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "dial.sock")
	d := fakenet.UnixDialer{Path: path}
	if _, err := d.DialContext(t.Context(), "tcp", "8.8.8.8:53"); agentlab.CodeOf(err) != agentlab.CodeUnavailable {
		t.Errorf("no socket: %v", err)
	}
	if _, err := d.DialContext(t.Context(), "tcp", "8.8.8.8:53\nok"); agentlab.CodeOf(err) != agentlab.CodeInvalid {
		t.Errorf("a line feed in the address: %v", err)
	}
	l, err := sockpath.Listen(path, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	for _, reply := range []string{"", "err no way\n", string(make([]byte, 5000)), "ok"} {
		go func() {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = fakenet.ReadDialLine(c)
			_, _ = c.Write([]byte(reply))
			_ = c.Close()
		}()
		c, err := d.DialContext(t.Context(), "tcp", "8.8.8.8:53")
		if err == nil {
			_ = c.Close()
			t.Errorf("the reply %q is taken for a connection", reply)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
	defer cancel()
	if _, err := d.DialContext(ctx, "tcp", "8.8.8.8:53"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a dial without an answer: %v", err)
	}
}

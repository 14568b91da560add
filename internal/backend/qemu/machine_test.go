package qemu

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
)

// While the disk stores a policy, QEMU's events are read.
func TestEventsDoNotWaitForTheDisk(t *testing.T) {
	dir := t.TempDir()
	slow := filepath.Join(dir, fileConfig+durable.Suffix)
	if err := unix.Mkfifo(slow, 0o600); err != nil {
		t.Fatal(err)
	}
	policy := agentlab.Network{Mode: agentlab.NetworkOff, Allow: make([]agentlab.NetworkRule, 10000)} // more than a pipe holds
	m := &machine{dir: dir, hooks: supervisor.Hooks{Log: slog.New(slog.DiscardHandler)}}
	stored, read := make(chan error), make(chan struct{})
	go func() { stored <- m.StoreNetwork(policy) }()
	f, err := os.Open(slow) // waits for the writer, which then waits for a read
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		m.onEvent(qmpEvent{Event: "SHUTDOWN"})
		close(read)
	}()
	select {
	case <-read:
	case <-time.After(10 * time.Second):
		t.Error("an event waits for the disk")
	}
	_ = f.Close()
	if err := <-stored; err == nil {
		t.Error("a policy was stored in a pipe")
	}
	<-read
	if n := m.Network(); n.Mode != "" {
		t.Errorf("a policy that was not stored is used: %+v", n)
	}
}

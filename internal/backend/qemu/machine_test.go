package qemu

import (
	"bufio"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/qemuvm"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
	"github.com/agentlab-vm/agentlab/internal/vmdir"
)

// While the disk stores a policy, QEMU's events are read.
func TestEventsDoNotWaitForTheDisk(t *testing.T) {
	dir := t.TempDir()
	slow := filepath.Join(dir, vmdir.FileConfig+durable.Suffix)
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
		m.onEvent(qemuvm.QMPEvent{Event: "SHUTDOWN"})
		close(read)
	}()
	select {
	case <-read:
	case <-time.After(bootTimeout):
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

// A QEMU in the background has the lowest priority: it may take minutes to become
// ready on a busy host. Any other one has failed by then.
func TestBackgroundHasTime(t *testing.T) {
	for _, background := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			ours, theirs := net.Pipe()
			go func() {
				in := bufio.NewScanner(theirs)
				for id := 1; in.Scan(); id++ {
					time.Sleep(time.Minute)
					_, _ = fmt.Fprintf(theirs, `{"id":%d,"return":{"running":true}}`+"\n", id)
				}
			}()
			m := &machine{
				cfg:     startConfig{Machine: qemuvm.Machine{Accel: qemuvm.AccelKVM}, Background: background},
				Process: &qemuvm.Process{QMP: qemuvm.NewQMP(ours, func(qemuvm.QMPEvent) {})}, hooks: supervisor.Hooks{Log: slog.New(slog.DiscardHandler)},
			}
			if err := m.Ready(t.Context()); (err == nil) != background {
				t.Errorf("background %t: %v", background, err)
			}
			_ = ours.Close()
			time.Sleep(2 * time.Minute)
			_ = theirs.Close()
		})
	}
}

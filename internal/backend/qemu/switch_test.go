package qemu

import (
	"bytes"
	"context"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab/internal/backend/qemu/migration"
	"github.com/agentlab-vm/agentlab/internal/qemuvm"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
	"github.com/agentlab-vm/agentlab/test/guard"
)

// slowQMP is a connection to QEMU. Once QEMU got a command, done is called. The
// answer arrives later, or is lost and everything after it arrives.
type slowQMP struct {
	net.Conn
	command string
	lose    bool
	done    context.CancelFunc
	sent    chan struct{}
}

func (c *slowQMP) Write(b []byte) (int, error) {
	if !bytes.Contains(b, []byte(c.command)) {
		return c.Conn.Write(b)
	}
	close(c.sent) // before the answer can be read
	n, err := c.Conn.Write(b)
	c.done()
	return n, err
}

func (c *slowQMP) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	select {
	case <-c.sent:
		time.Sleep(300 * time.Millisecond) // QEMU is slow
		if c.lose && bytes.Contains(b[:n], []byte(`"return"`)) {
			c.lose = false
			return copy(b, "{}\n"), err
		}
	default:
	}
	return n, err
}

// diskOnly starts a QEMU with the root disk in dir, whose CPUs do not run.
func diskOnly(t *testing.T, dir string) net.Conn {
	t.Helper()
	return diskOn(t, dir, "driver=file,node-name=root-file,filename="+fileRoot)
}

// diskOn is diskOnly with the node root-file of the disk.
func diskOn(t *testing.T, dir, node string) net.Conn {
	t.Helper()
	ours, theirs, err := qemuvm.SocketPair()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = theirs.Close() }()
	cmd := exec.Command(qemuvm.DefaultQEMU, "-nodefaults", "-display", "none", "-S", "-machine", "microvm", "-m", "32M",
		"-chardev", "socket,id=qmp,fd=3", "-mon", "chardev=qmp,mode=control",
		"-blockdev", node,
		"-blockdev", "driver=qcow2,node-name=root,file=root-file",
		"-device", "virtio-blk-device,id="+deviceRoot+",drive=root,share-rw=on")
	cmd.Dir, cmd.Stderr, cmd.ExtraFiles = dir, os.Stderr, []*os.File{theirs}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return ours
}

// The caller of a save gives up while QEMU switches to the overlay, and QEMU's
// answer is late or lost. What is written from then on is in the disk's file.
func TestGivenUpWhileDiskSwitches(t *testing.T) {
	for _, lose := range []bool{false, true} {
		dir := t.TempDir()
		const size = 1 << 20
		base := filepath.Join(dir, "base")
		if err := os.WriteFile(base, make([]byte, size), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := createOverlay(t.Context(), qemuvm.DefaultQEMUImg, filepath.Join(dir, fileRoot), base, "raw", size); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		conn := &slowQMP{Conn: diskOnly(t, dir), command: "blockdev-snapshot", lose: lose, done: cancel, sent: make(chan struct{})}
		q := qemuvm.NewQMP(conn, func(qemuvm.QMPEvent) {})
		defer func() { _ = q.Close() }()
		m := &machine{dir: dir, Process: &qemuvm.Process{QMP: q}, cfg: startConfig{QEMUImg: qemuvm.DefaultQEMUImg}, hooks: supervisor.Hooks{Log: slog.New(slog.DiscardHandler)}}
		s := &saving{m: m}
		err := q.Negotiate(ctx)
		if err == nil {
			s.disk, s.size, err = m.rootDisk(ctx)
		}
		if err == nil {
			err = s.addOverlay(ctx)
		}
		if err != nil || s.size != size || s.disk != "root" {
			t.Fatalf("disk %q of %d bytes, %v", s.disk, s.size, err)
		}
		wait := guard.Patience
		if lose {
			wait = time.Second
		}
		err = s.switchDisk(ctx, wait)
		if (err != nil) != lose || ctx.Err() == nil {
			t.Errorf("answer lost %v: %v (%v)", lose, err, ctx.Err())
		}
		if err := s.cancel(ctx); err != nil {
			t.Errorf("answer lost %v: %v", lose, err)
		}
		node, _, err := m.rootDisk(t.Context())
		if err != nil || node != s.node {
			t.Errorf("answer lost %v: QEMU uses %q, want %q, %v", lose, node, s.node, err)
		}
		for _, command := range []string{"qemu-io " + node + ` "write -P 90 0 64k"`, "qemu-io " + node + " flush"} {
			var out string
			if err := q.Execute(t.Context(), "human-monitor-command", map[string]any{"command-line": command}, &out); err != nil || out != "" {
				t.Fatal(out, err)
			}
		}
		if err := q.Execute(t.Context(), "quit", nil, nil); err != nil {
			t.Fatal(err)
		}
		<-q.Done()
		out, err := exec.Command("qemu-io", "-r", "-c", "read -P 90 0 64k", filepath.Join(dir, fileRoot)).CombinedOutput()
		if err != nil || bytes.Contains(out, []byte("failed")) {
			t.Errorf("answer lost %v: after a stop the disk has not what was written: %s, %v", lose, out, err)
		}
	}
}

// A QEMU that reports the end of a migration, but does not end its stream, does
// not hold up the save.
func TestStreamWithoutEnd(t *testing.T) {
	ours, theirs := net.Pipe()
	defer func() { _ = theirs.Close() }()
	s := &saving{in: ours, received: make(chan error, 1)}
	go func() {
		_, err := migration.Receive(ours, ramBlock, nil, migration.PageSize)
		s.received <- err
	}()
	ended := make(chan error, 1)
	go func() { ended <- s.awaitReceived(10 * time.Millisecond) }()
	select {
	case err := <-ended:
		if err == nil {
			t.Error("a stream without an end was accepted")
		}
	case <-time.After(bootTimeout):
		t.Error("the save waits")
	}
}

// A guest is not suspended to disk while something that it has written cannot be written
// to its disk.
func TestDiskThatCannotBeFlushed(t *testing.T) {
	for _, node := range []string{
		"driver=file,node-name=root-file,filename=" + fileRoot,
		`{"driver":"blkdebug","node-name":"root-file","image":{"driver":"file","filename":"` + fileRoot + `"},"inject-error":[{"event":"none","iotype":"flush","errno":5}]}`,
	} {
		fails := strings.HasPrefix(node, "{")
		dir := t.TempDir()
		if err := runQEMUImg(t.Context(), qemuvm.DefaultQEMUImg, dir, "create", "-q", "-f", "qcow2", fileRoot, "1M"); err != nil {
			t.Fatal(err)
		}
		q := qemuvm.NewQMP(diskOn(t, dir, node), func(qemuvm.QMPEvent) {})
		defer func() { _ = q.Close() }()
		s := &saving{m: &machine{dir: dir, Process: &qemuvm.Process{QMP: q}, hooks: supervisor.Hooks{Log: slog.New(slog.DiscardHandler)}}}
		write := func() {
			t.Helper()
			var out string
			if err := q.Execute(t.Context(), "human-monitor-command", map[string]any{"command-line": `qemu-io root "write 0 64k"`}, &out); err != nil || out != "" {
				t.Errorf("fails %v: a write: %q, %v", fails, out, err)
			}
		}
		if err := q.Negotiate(t.Context()); err != nil {
			t.Fatal(err)
		}
		write()
		first, err := s.readDevices(t.Context(), false)
		if err != nil {
			t.Fatal(err)
		}
		for range 3 { // in the same file
			again, err := s.readDevices(t.Context(), false)
			if err != nil || !bytes.Equal(first, again) {
				t.Fatalf("%d and %d bytes, %v", len(first), len(again), err)
			}
		}
		if _, err := s.readDevices(t.Context(), true); (err != nil) != fails {
			t.Errorf("fails %v: the last state of the devices: %v", fails, err)
		}
		if err := s.resume(t.Context()); err != nil { // it was suspended, and is again
			t.Error(err)
		}
		write()
	}
}

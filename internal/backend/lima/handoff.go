package lima

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/sockpath"
	"github.com/agentlab-vm/agentlab/internal/vmdir"
)

// The environment of the wrapper, which it has from limactl.
const (
	envQEMU   = "AGENTLAB_LIMA_QEMU"   // path of QEMU
	envSocket = "AGENTLAB_LIMA_SOCKET" // path of fileWrapper
)

// maxHandoff bounds the command line that the wrapper sends, in bytes.
const maxHandoff = 1 << 20

// handoff waits for the wrapper that limactl starts in the place of QEMU.
type handoff struct {
	listener net.Listener

	mu     sync.Mutex
	conn   net.Conn // to the wrapper; it ends when this is closed
	closed bool
}

func listenHandoff(path string) (*handoff, error) {
	l, err := sockpath.Listen(path, 0o600)
	if err != nil {
		return nil, vmdir.AsError(err, "cannot listen for limactl")
	}
	return &handoff{listener: l}, nil
}

// close ends the wrapper.
func (h *handoff) close() {
	_ = h.listener.Close()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closed = true
	if h.conn != nil {
		_, _ = io.WriteString(h.conn, "0\n") // its exit code
		_ = h.conn.Close()
	}
}

// lost waits for the end of the wrapper, and reports whether something else than close has
// ended it.
func (h *handoff) lost() bool {
	_ = h.conn.SetReadDeadline(time.Time{})
	_, _ = h.conn.Read(make([]byte, 1)) // it sends nothing more
	h.mu.Lock()
	defer h.mu.Unlock()
	return !h.closed
}

// await returns when the wrapper of an instance has called. It fails if its command
// line is not one for this instance, and if limactl ends.
func (h *handoff) await(ctx context.Context, ended <-chan struct{}, instance string) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		select {
		case <-ended:
			cancel(errors.New("limactl has ended, and has not started QEMU"))
		case <-ctx.Done():
		}
		_ = h.listener.Close()
	}()
	give := func(err error) error {
		if cause := context.Cause(ctx); cause != nil {
			err = cause
		}
		return agentlab.Errorf(agentlab.CodeUnavailable, "%w", err)
	}
	conn, err := h.listener.Accept()
	if err != nil {
		return give(err)
	}
	h.mu.Lock()
	h.conn = conn
	h.mu.Unlock()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	line, err := bufio.NewReader(io.LimitReader(conn, maxHandoff)).ReadBytes('\n')
	var args []string
	if err == nil {
		err = json.Unmarshal(line, &args)
	}
	if err != nil {
		return give(fmt.Errorf("the command line of limactl cannot be read: %w", err))
	}
	return checkArgs(args, instance)
}

// checkArgs returns an error for a command line of limactl that is not one of an
// instance as limaYAML describes it. Nothing of it is run: a difference means that
// the instance was changed.
func checkArgs(args []string, instance string) error {
	if i := slices.Index(args, "-name"); i < 0 || i+1 >= len(args) || args[i+1] != "lima-"+instance {
		return agentlab.Errorf(agentlab.CodeConflict, "limactl has started another instance than %s", instance)
	}
	i := slices.IndexFunc(args, func(a string) bool {
		return a == "-virtfs" || a == "-fsdev" || strings.HasPrefix(a, "vhost-user")
	})
	if i >= 0 {
		return agentlab.Errorf(agentlab.CodeConflict, "the instance %s has a mount of this host (%s), which no sandbox may have", instance, agentlab.OneLine(args[i], 80)).
			WithHint("destroy the sandbox: the lima.yaml of its instance was changed")
	}
	return nil
}

// Helper is the wrapper, which limactl runs in the place of QEMU with QEMU's arguments. It
// returns when the VM has ended.
func Helper(args []string) error {
	qemu, socket := os.Getenv(envQEMU), os.Getenv(envSocket)
	if qemu == "" || socket == "" {
		return errors.New("only 'agentlab sandbox start' can start this instance")
	}
	if query(args) {
		return syscall.Exec(qemu, append([]string{qemu}, args...), os.Environ()) //nolint:gosec // only with queryWords
	}
	conn, err := sockpath.Dial(context.Background(), socket)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	if err := json.NewEncoder(conn).Encode(args); err != nil {
		return err
	}
	answer, err := io.ReadAll(io.LimitReader(conn, 16)) // until the VM has ended
	if err == nil && string(answer) != "0\n" {
		err = errors.New("the supervisor has ended")
	}
	return err
}

// queryWords are the arguments with which limactl asks QEMU what it supports.
var queryWords = []string{"-M", "none", "-accel", "-netdev", "-machine", "q35", "-cpu", "help"}

// query reports whether QEMU with these arguments only prints a text. Everything else
// goes to the supervisor.
func query(args []string) bool {
	if slices.Equal(args, []string{"--version"}) {
		return true
	}
	return slices.Contains(args, "help") && !slices.ContainsFunc(args, func(a string) bool { return !slices.Contains(queryWords, a) })
}

package devenv

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/bounded"
	"github.com/agentlab-vm/agentlab/internal/stream"
)

const (
	forwardUnit = "agentlab-forward.service"
	dialLimit   = 5 * time.Second
	maxForwards = 512 // connections at once
)

// forward makes the ports of the container listen in the VM. AgentLab serves them like
// the ports of any program there. The programs in the container may listen on its
// loopback only, so Docker cannot publish them.
func (c *Container) forward(ctx context.Context) error {
	_ = runQuiet(ctx, "sudo", "-n", "systemctl", "stop", forwardUnit) // of an earlier start, if there was one
	if len(c.Ports) == 0 {
		return nil
	}
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	args := []string{"-n", "systemd-run", "--quiet", "--collect", "--unit", forwardUnit, "--property", "Restart=on-failure", exe, "agentlab-agent", "forward", c.ID}
	for _, p := range c.Ports {
		args = append(args, strconv.Itoa(int(p)))
	}
	if err := runQuiet(ctx, "sudo", args...); err != nil {
		return agentlab.Errorf(agentlab.CodeUnavailable, "the ports of the dev container cannot be forwarded: %w", err)
	}
	return nil
}

// Forward forwards ports of the loopback to that of a container. It runs as root, and
// returns only an error.
func Forward(ctx context.Context, id string, ports []uint16) error {
	f := &forwarder{id: id, slots: make(chan struct{}, maxForwards)}
	var wg sync.WaitGroup
	n := 0
	for _, port := range ports {
		l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(int(port))))
		if err != nil { // for example Docker publishes it already
			slog.Warn("the port is not forwarded", "port", port, "err", err)
			continue
		}
		n++
		wg.Go(func() { f.serve(ctx, l, port) })
	}
	wg.Wait()
	if n == 0 {
		return nil
	}
	return errors.New("all ports are closed")
}

type forwarder struct {
	id    string
	slots chan struct{}

	mu  sync.Mutex
	pid int // of the container; 0 if it is not known
}

func (f *forwarder) serve(ctx context.Context, l net.Listener, port uint16) {
	defer func() { _ = l.Close() }()
	for {
		conn, err := l.Accept()
		if err != nil {
			slog.Error("the port is closed", "port", port, "err", err)
			return
		}
		f.slots <- struct{}{}
		go func() {
			defer func() { <-f.slots }()
			far, err := f.dial(ctx, port)
			if err != nil {
				slog.Warn("no connection", "port", port, "err", err)
				_ = conn.Close()
				return
			}
			stream.Splice(conn, far)
		}()
	}
}

// dial connects to a port in the container, which may have been started again.
func (f *forwarder) dial(ctx context.Context, port uint16) (net.Conn, error) {
	f.mu.Lock()
	pid := f.pid
	f.mu.Unlock()
	if pid != 0 {
		if conn, err := dialIn(ctx, pid, port); err == nil {
			return conn, nil
		}
	}
	said := &bounded.Head{Max: 64}
	if err := run(ctx, "/", said, io.Discard, []string{"docker", "container", "inspect", "--format", "{{.State.Pid}}", f.id}); err != nil {
		return nil, err
	}
	pid, err := strconv.Atoi(strings.TrimSpace(said.String()))
	if err != nil || pid <= 0 {
		return nil, errors.New("the container does not run")
	}
	f.mu.Lock()
	f.pid = pid
	f.mu.Unlock()
	return dialIn(ctx, pid, port)
}

// dialIn connects to a port of the loopback in the network namespace of a process.
func dialIn(ctx context.Context, pid int, port uint16) (net.Conn, error) {
	ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", pid))
	if err != nil {
		return nil, err
	}
	defer func() { _ = ns.Close() }()
	type answer struct {
		conn net.Conn
		err  error
	}
	got := make(chan answer, 1)
	go func() {
		runtime.LockOSThread() // the thread ends with this goroutine: it stays in the namespace
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			got <- answer{nil, err}
			return
		}
		var conn net.Conn
		var err error
		for _, host := range []string{"127.0.0.1", "::1"} {
			// A dialer with one address uses only this thread.
			d := net.Dialer{Timeout: dialLimit, FallbackDelay: -1}
			if conn, err = d.DialContext(ctx, "tcp", net.JoinHostPort(host, strconv.Itoa(int(port)))); err == nil {
				break
			}
		}
		got <- answer{conn, err}
	}()
	a := <-got
	return a.conn, a.err
}

//go:build linux

package guestd

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/link"
)

// PortName is the name of the virtio-serial port that carries guest control.
const PortName = "agentlab.control"

// portWait is how long the port may take to appear.
const portWait = 60 * time.Second

// Main serves guest control: without arguments on the virtio-serial port, with
// --listen over TCP. It returns the exit code of the process, which is never
// 0, because it ends only after an error.
func Main(args []string) int {
	switch {
	case len(args) == 0:
		return serve(nil)
	case slices.Equal(args, []string{"--boot"}):
		return boot()
	default:
		return listenMain(args)
	}
}

// boot is Main for the first server of a boot, which PID 1 starts while its
// own root is still the initrd. It gets ready and connects, and answers as
// soon as PID 1 reports that the root disk is there. The file descriptor 3 is a
// socket to PID 1: it sends one byte then, and gets one back after the first
// answer and one after the first identity.
func boot() int {
	proc, err := unix.Open("/proc", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 1
	}
	unix.CloseOnExec(initSocket)
	return serve(func() (func(string), error) {
		if n, err := unix.Read(initSocket, make([]byte, 1)); n != 1 {
			return nil, fmt.Errorf("PID 1 has ended: %w", err)
		}
		if err := enterRoot(proc); err != nil {
			return nil, fmt.Errorf("entering the root disk: %w", err)
		}
		return notifyInit, nil
	})
}

const initSocket = 3

// enterRoot changes the root of this process to that of PID 1.
func enterRoot(proc int) error {
	root, err := unix.Openat(proc, "1/root", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(root) }()
	_ = unix.Close(proc)
	if err := unix.Fchdir(root); err != nil {
		return err
	}
	if err := unix.Chroot("."); err != nil {
		return err
	}
	return unix.Chdir("/")
}

// notifyInit reports the first answer and the first identity to PID 1, which
// then continues the boot; it also continues after a time limit.
func notifyInit(path string) {
	if path == guestapi.PathIdentity {
		_ = unix.Shutdown(initSocket, unix.SHUT_RDWR)
		return
	}
	_, _ = unix.SendmsgN(initSocket, []byte{'a'}, nil, nil, unix.MSG_NOSIGNAL|unix.MSG_DONTWAIT)
}

// serve runs the server. ready, when not nil, returns when the server may answer,
// with a function to call with the path of each answered request.
func serve(ready func() (func(string), error)) int {
	setLimits()
	log := slog.New(slog.NewTextHandler(Console{}, &slog.HandlerOptions{ReplaceAttr: dropTime}))
	fatal := func(err error) int {
		log.Error("guestd ends", "err", err)
		return 1
	}
	port, err := openPort("/sys", "/dev", portWait)
	if err != nil {
		return fatal(err)
	}
	l := link.Guest(port)
	cfg := Config{Logger: log, Limits: true, KeepAfter: 10 * time.Second}
	if ready != nil {
		if cfg.Answered, err = ready(); err != nil {
			return fatal(err)
		}
	}
	return fatal(New(cfg).Serve(l))
}

// setLimits sets resource limits for every command like systemd does for
// services; the kernel's defaults are too small for agents.
func setLimits() {
	_ = os.WriteFile("/proc/self/oom_score_adj", []byte("-900"), 0o600) // not inherited, see startCmd
	_ = syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: 1024, Max: 512 << 10})
	const lockedMemory = 8 << 20
	_ = unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: lockedMemory, Max: lockedMemory})
}

// dropTime removes the time from log lines: the console has its own.
func dropTime(groups []string, a slog.Attr) slog.Attr {
	if a.Key == slog.TimeKey && len(groups) == 0 {
		return slog.Attr{}
	}
	return a
}

// Console writes each call's bytes to the console, which it opens each time:
// init programs hang up processes that have it open.
type Console struct{}

// Write implements io.Writer.
func (Console) Write(p []byte) (int, error) {
	f, err := os.OpenFile("/dev/console", os.O_WRONLY|syscall.O_NOCTTY, 0)
	if err != nil {
		return 0, err
	}
	defer func() { _ = f.Close() }()
	return f.Write(append([]byte("agent-runner: "), p...))
}

// openPort opens the control port. It waits up to wait for the device. It uses
// open directories, because PID 1 may move the mounts in the meantime.
func openPort(sysDir, devDir string, wait time.Duration) (io.ReadWriteCloser, error) {
	sys, err := os.OpenRoot(sysDir)
	if err != nil {
		return nil, err
	}
	defer func() { _ = sys.Close() }()
	dev, err := os.OpenRoot(devDir)
	if err != nil {
		return nil, err
	}
	defer func() { _ = dev.Close() }()
	deadline := time.Now().Add(wait)
	for {
		if name := findPort(sys.FS()); name != "" {
			f, err := dev.OpenFile(name, os.O_RDWR|unix.O_NONBLOCK|syscall.O_NOCTTY, 0)
			if err == nil {
				return &port{File: f}, nil
			}
			if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.EBUSY) {
				return nil, err
			}
		}
		if time.Now().After(deadline) {
			return nil, fmt.Errorf("no virtio-serial port %s", PortName)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// findPort finds the device by the name in sysfs; udev may not have made its
// link yet, or may not run at all. It returns "" when there is none.
func findPort(sys fs.FS) string {
	names, _ := fs.Glob(sys, "class/virtio-ports/*/name")
	for _, name := range names {
		if b, err := fs.ReadFile(sys, name); err == nil && strings.TrimSpace(string(b)) == PortName {
			return path.Base(path.Dir(name))
		}
	}
	return ""
}

// port is the virtio-serial device. While the host has it closed, a read
// returns end of file; port waits for the next open instead.
type port struct{ *os.File }

func (p *port) Read(b []byte) (int, error) {
	for {
		n, err := p.File.Read(b)
		if n > 0 || !errors.Is(err, io.EOF) {
			return n, err
		}
		time.Sleep(20 * time.Millisecond)
	}
}

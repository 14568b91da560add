package guestd

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab/internal/link"
)

// PortName is the name of the virtio-serial port that carries guest control.
const PortName = "agentlab.control"

// portWait is how long the port may take to appear.
const portWait = 60 * time.Second

// Main serves guest control on the virtio-serial port and returns the exit
// code of the process, which is never 0: it ends only when the port fails.
func Main() int {
	_ = os.WriteFile("/proc/self/oom_score_adj", []byte("-900"), 0o600)
	log := slog.New(slog.NewTextHandler(Console{}, &slog.HandlerOptions{ReplaceAttr: dropTime}))
	port, err := openPort("", portWait)
	if err != nil {
		log.Error("guestd cannot answer", "err", err)
		return 1
	}
	s := New(Config{Logger: log})
	l := link.Guest(port)
	err = s.Serve(l)
	log.Error("guestd ends", "err", err)
	return 1
}

// dropTime leaves the time out of log lines: the console has its own.
func dropTime(groups []string, a slog.Attr) slog.Attr {
	if a.Key == slog.TimeKey && len(groups) == 0 {
		return slog.Attr{}
	}
	return a
}

// Console writes each call's bytes to the console, which it opens each time:
// init programs hang up whoever holds it open.
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

// openPort opens the control port, waiting up to wait for it to appear.
func openPort(root string, wait time.Duration) (io.ReadWriteCloser, error) {
	deadline := time.Now().Add(wait)
	for {
		dev, err := findPort(root)
		if err == nil {
			f, err := os.OpenFile(dev, os.O_RDWR|unix.O_NONBLOCK|syscall.O_NOCTTY, 0)
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
		time.Sleep(5 * time.Millisecond)
	}
}

// findPort finds the device by the name that the kernel tells; udev may not
// have made its link, or never will.
func findPort(root string) (string, error) {
	names, err := filepath.Glob(filepath.Join("/", root, "/sys/class/virtio-ports/*/name"))
	if err != nil {
		return "", err
	}
	for _, name := range names {
		if b, err := os.ReadFile(name); err == nil && strings.TrimSpace(string(b)) == PortName {
			return filepath.Join("/", root, "/dev", filepath.Base(filepath.Dir(name))), nil
		}
	}
	return "", fs.ErrNotExist
}

// port is the virtio-serial device. While no host has it open it reads as
// ended; port waits for the next host instead.
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

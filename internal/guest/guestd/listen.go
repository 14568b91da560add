//go:build linux

package guestd

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/link"
)

// guestKeyFile contains the seed of this guest's own key. It is on the disk
// and created on first use.
const guestKeyFile = "/var/lib/agentlab/control.key"

// maxControlFile is the maximum size of the ControlConfig of a seed, in bytes.
const maxControlFile = 64 << 10

// listenMain serves guest control over TCP, for guests with an address and
// without a virtio-serial port to the controller. It returns 2 for a usage
// error, otherwise 1. args are --listen ADDRESS:PORT and --config FILE, a
// ControlConfig.
func listenMain(args []string) int {
	flags := flag.NewFlagSet("agent-runner guestd", flag.ContinueOnError)
	listen := flags.String("listen", fmt.Sprintf("0.0.0.0:%d", link.ControlPort), "address and port to answer on")
	config := flags.String("config", guestapi.ControlFile, "file that names the controller")
	if flags.Parse(args) != nil {
		return 2
	}
	if flags.NArg() > 0 {
		fmt.Fprintf(os.Stderr, "agent-runner guestd: unknown arguments %q\n", flags.Args())
		return 2
	}
	setLimits()
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{ReplaceAttr: dropTime}))
	tcp, err := new(net.ListenConfig).Listen(context.Background(), "tcp", *listen)
	if err == nil {
		err = serveTCP(context.Background(), Config{Logger: log, Limits: true}, tcp, *config)
	}
	log.Error("guestd ends", "err", err)
	return 1
}

// serveTCP serves the single controller in the file until ctx ends. It closes
// tcp.
func serveTCP(ctx context.Context, cfg Config, tcp net.Listener, file string) error {
	defer func() { _ = tcp.Close() }()
	control, err := readControl(file)
	if err != nil {
		return err
	}
	if exe, err := os.Executable(); err == nil && len(cfg.Runner) == 0 {
		cfg.Runner = []string{exe, "run"}
	}
	s := New(cfg)
	defer func() { _ = s.Close() }()
	if err := s.noteFreshMachineID(); err != nil {
		return err
	}
	seed, err := link.KeyFile(s.path(guestKeyFile))
	if err != nil {
		return err
	}
	l, err := link.ListenTLS(tcp, control.HostKey, ed25519.NewKeyFromSeed(seed))
	if err != nil {
		return err
	}
	defer context.AfterFunc(ctx, func() { _ = l.Close() })()
	s.log.Info("guest control answers", "address", tcp.Addr(), "vmid", control.VMID, "uid", control.UID)
	return s.Serve(l)
}

// readControl reads the controller's address from the seed. The server obeys the
// author of the file as root, so only root may be able to write it.
func readControl(name string) (guestapi.ControlConfig, error) {
	var c guestapi.ControlConfig
	f, err := os.OpenFile(name, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return c, err
	}
	defer func() { _ = f.Close() }()
	fi, err := f.Stat()
	if err != nil {
		return c, err
	}
	st, ok := fi.Sys().(*syscall.Stat_t)
	if !fi.Mode().IsRegular() || fi.Mode().Perm()&0o022 != 0 || !ok || int(st.Uid) != os.Geteuid() {
		return c, agentlab.Errorf(agentlab.CodeDenied, "%s must be a file that only its owner, this program's user, can write (it is %s)", name, fi.Mode())
	}
	b, err := io.ReadAll(io.LimitReader(f, maxControlFile))
	if err != nil {
		return c, err
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(&c); err != nil {
		return c, agentlab.Errorf(agentlab.CodeInvalid, "%s: %w", name, err)
	}
	switch {
	case c.VMID <= 0:
		return c, agentlab.Errorf(agentlab.CodeInvalid, "%s: no vmid", name).WithField("vmid")
	case !made(c.UID, 1, 64, lower+"-"):
		return c, agentlab.Errorf(agentlab.CodeInvalid, "%s: %q is not a UID", name, c.UID).WithField("uid")
	case len(c.HostKey) != ed25519.PublicKeySize:
		return c, agentlab.Errorf(agentlab.CodeInvalid, "%s: the controller's key has %d bytes, not %d", name, len(c.HostKey), ed25519.PublicKeySize).WithField("host_key")
	}
	return c, nil
}

// noteFreshMachineID records that the machine-id was created in this boot, as
// systemd does if a template has an empty one. Then an identity need not
// replace it while programs run. A machine-id that is older than the boot
// comes from the template, unless it belongs to this guest's identity.
func (s *Server) noteFreshMachineID() error {
	fi, err := os.Stat(s.path(machineIDFile))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case fi.ModTime().Before(s.bootTime()) || s.line(uidFile) != "" || s.line(freshFile) != "":
		return nil
	}
	return s.writeFile(freshFile, []byte(s.line(machineIDFile)+"\n"), 0o644, 0, 0)
}

// bootTime returns the start time of the kernel, far in the future if it is
// not known.
func (s *Server) bootTime() time.Time {
	b, err := os.ReadFile(s.path("/proc/stat"))
	if err == nil {
		for line := range strings.Lines(string(b)) {
			if text, ok := strings.CutPrefix(line, "btime "); ok {
				if sec, err := strconv.ParseInt(strings.TrimSpace(text), 10, 64); err == nil {
					return time.Unix(sec, 0)
				}
			}
		}
	}
	return time.Now().Add(100 * 365 * 24 * time.Hour)
}

//go:build linux

package guestd

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/lock"
)

// This file prepares a guest to be copied while it runs, and replaces what a copy
// must not share with the guest that it continues.

const (
	// growWait is how long the guest may take to see that its disk was enlarged.
	growWait = 10 * time.Second

	preparedFile   = runDir + "/prepared" // this guest is a template, or a copy of one
	bootIDFile     = runDir + "/boot_id"  // mounted on the kernel's
	kernelBootID   = "/proc/sys/kernel/random/boot_id"
	runnerPIDFile  = runDir + "/runner.pid"
	sshdPIDFile    = "/run/sshd.pid"
	randomSeedFile = "/var/lib/systemd/random-seed"
	dbusMachineID  = "/var/lib/dbus/machine-id"
	journalUnit    = "systemd-journald.service"
	journalStreams = "/run/systemd/journal/streams"
	// endWait is how long a process may take to end after SIGTERM.
	endWait = 5 * time.Second
)

// journalDirs have the records of journald, in a directory for each machine-id.
var journalDirs = []string{"/run/log/journal", "/var/log/journal"}

func (s *Server) handlePrepare(w http.ResponseWriter, r *http.Request) {
	var req guestapi.PrepareRequest
	if !decode(w, r, &req) {
		return
	}
	if err := s.prepare(r.Context(), req); err != nil {
		fail(w, err)
		return
	}
	reply(w, struct{}{})
}

// prepare does what every copy of this guest would do otherwise.
func (s *Server) prepare(ctx context.Context, req guestapi.PrepareRequest) error {
	if req.Network != nil {
		if err := validNetwork(*req.Network); err != nil {
			return agentlab.Errorf(agentlab.CodeInvalid, "%w", err).WithField("network")
		}
	}
	s.idMu.Lock()
	defer s.idMu.Unlock()
	if uid := s.line(bootUIDFile); uid != "" {
		return agentlab.Errorf(agentlab.CodeConflict, "the guest has the identity %s already", uid)
	}
	s.prepared = false
	if err := s.setNetwork(req.Network); err != nil {
		return agentlab.Errorf(agentlab.CodeInternal, "network: %w", err)
	}
	var err error
	if s.disk, err = s.cfg.Kernel.GrowRoot(0, 0); err != nil {
		return agentlab.Errorf(agentlab.CodeInternal, "root disk: %w", err)
	}
	if err := s.writeFile(preparedFile, nil, 0o644, 0, 0); err != nil {
		return agentlab.Errorf(agentlab.CodeInternal, "%w", err)
	}
	// The copies only write the file that is mounted: systemd examines all mounts
	// when there is a new one.
	if err := s.newBootID(false); err != nil {
		return agentlab.Errorf(agentlab.CodeInternal, "boot ID: %w", err)
	}
	if err := s.stopJournal(ctx); err != nil {
		return agentlab.Errorf(agentlab.CodeInternal, "%s: %w", journalUnit, err)
	}
	if req.Nested {
		if _, err := s.ensureNested(); err != nil {
			return agentlab.Errorf(agentlab.CodeInternal, "nested virtualization: %w", err)
		}
	}
	rehearse()
	if err := s.parkRunner(ctx); err != nil {
		return agentlab.Errorf(agentlab.CodeInternal, "the runner: %w", err)
	}
	if err := s.emptyFiles(); err != nil {
		return agentlab.Errorf(agentlab.CodeInternal, "files: %w", err)
	}
	s.prepared = true
	s.cfg.Kernel.Sync() // otherwise each copy writes it
	return nil
}

// rehearse decodes the requests that each copy gets: package json examines a type
// only once.
func rehearse() {
	for _, v := range []any{
		&guestapi.Identity{Entropy: []byte{0}, Network: &guestapi.Network{DNS: []string{""}}, Bootstrap: &guestapi.Bootstrap{}, HostKey: &guestapi.HostKey{}},
		&guestapi.ExecRequest{Command: []string{""}, Env: map[string]string{"": ""}},
	} {
		doc, _ := json.Marshal(v)
		_ = json.Unmarshal(doc, v)
	}
}

// emptyFiles makes the files of an identity exist without content, so that the
// copies need not create them. An empty file counts as missing.
func (s *Server) emptyFiles() error {
	if id := s.line(machineIDFile); id != "" {
		// The journal has this name.
		if err := s.writeFile(freshFile, []byte(id+"\n"), 0o644, 0, 0); err != nil {
			return err
		}
	}
	errs := []error{s.removeHostKeys(), removeFile(s.path(randomSeedFile))}
	for name, mode := range map[string]fs.FileMode{
		machineIDFile: 0o444, hostnameFile: 0o644, bootUIDFile: 0o644, publicKeyFile: 0o644, hostKeyFile: 0o600,
	} {
		errs = append(errs, s.writeFile(name, nil, mode, 0, 0))
	}
	old, err := s.readFile(hostsFile)
	if err == nil {
		err = s.writeFile(hostsFile, hosts(old, ""), 0o644, 0, 0)
	}
	if !errors.Is(err, fs.ErrNotExist) {
		errs = append(errs, err)
	}
	return errors.Join(append(errs, s.linkBootstrap())...)
}

// stopJournal stops journald, which reads the machine-id and the boot ID at its
// start only. The next record starts it again. While a service has its output
// connected to it, it cannot be stopped without harm to the service; then each
// copy of the guest starts it again.
func (s *Server) stopJournal(ctx context.Context) error {
	streams, err := os.ReadDir(s.path(journalStreams))
	if len(streams) > 0 || (err != nil && !errors.Is(err, fs.ErrNotExist)) || !s.systemdRuns() {
		return nil
	}
	return s.systemctl(ctx, "stop", journalUnit)
}

// continues reports whether this guest is to get another identity than it had in
// this boot: it is a copy of a template, or of another sandbox.
func (s *Server) continues(uid string) bool {
	old := s.line(bootUIDFile)
	if old == "" {
		_, err := os.Stat(s.path(preparedFile))
		return err == nil
	}
	return old != uid
}

// forget ends the runner of another sandbox's identity and removes everything
// that AgentLab has given to that sandbox: its token, its secrets and the keys of
// its users. Processes of users continue.
func (s *Server) forget() error {
	if s.line(bootUIDFile) == "" {
		return nil // a template had nothing
	}
	if err := s.endRunner(); err != nil {
		return fmt.Errorf("the runner: %w", err)
	}
	for _, name := range []string{bootstrapFile, runnerDone, runnerLog, keysDir} {
		if err := os.RemoveAll(s.path(name)); err != nil {
			return err
		}
	}
	if err := s.wipeSecrets(); err != nil {
		return fmt.Errorf("its secrets: %w", err)
	}
	return nil
}

// endRunner ends the runner, but not the agent that it has started. A parked one, which
// has the lock then, has nothing and stays.
func (s *Server) endRunner() error {
	s.runner.mu.Lock()
	cancel, done, parked := s.runner.cancel, s.runner.done, s.runner.parked
	s.runner.mu.Unlock()
	if parked != nil {
		return nil
	}
	if cancel != nil {
		cancel()
		<-done
	}
	if pid, _ := strconv.Atoi(s.line(runnerPIDFile)); pid > 1 && s.runnerLocked() {
		end(pid)
	}
	if s.runnerLocked() {
		return agentlab.Errorf(agentlab.CodeBusy, "it does not end")
	}
	return nil
}

func (s *Server) runnerLocked() bool {
	f, err := os.OpenFile(s.path(runnerLock), os.O_RDWR|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return !errors.Is(err, fs.ErrNotExist)
	}
	defer func() { _ = f.Close() }()
	ok, err := lock.TryFile(f)
	return !ok || err != nil
}

// end asks a process to end, and kills it after endWait. It returns when the
// process has ended, or after another endWait.
func end(pid int) {
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		if syscall.Kill(pid, sig) != nil {
			return
		}
		for began := time.Now(); time.Since(began) < endWait; time.Sleep(time.Millisecond) {
			if syscall.Kill(pid, 0) != nil {
				return
			}
		}
	}
}

// newBootID replaces the boot ID that programs read. The kernel's own cannot be
// changed: file systems of type proc that are mounted later, as in containers,
// show it. mounted means that the file is known to be mounted.
func (s *Server) newBootID(mounted bool) error {
	id := []byte(randomUUID() + "\n")
	// The file is written in place: it may be mounted already.
	f, err := os.OpenFile(s.path(bootIDFile), os.O_WRONLY|os.O_CREATE|syscall.O_NOFOLLOW, 0o444)
	if err != nil {
		return err
	}
	_, err = f.Write(id)
	if err = errors.Join(err, f.Close()); err != nil || mounted || s.line(kernelBootID) == strings.TrimSpace(string(id)) {
		return err
	}
	return s.cfg.Kernel.SetBootID(s.path(bootIDFile), s.path(kernelBootID))
}

func randomUUID() string {
	b := newMachineID()
	return fmt.Sprintf("%s-%s-%s-%s-%s", b[:8], b[8:12], b[12:16], b[16:20], b[20:])
}

// newMachineID returns a random UUID without hyphens.
func newMachineID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return hex.EncodeToString(b[:])
}

// renewMachineID makes programs use another machine-id, after it was written.
func (s *Server) renewMachineID(old, id string) error {
	if old != "" {
		for _, dir := range journalDirs {
			// os.Rename would look for the new name first.
			if err := syscall.Rename(s.path(filepath.Join(dir, old)), s.path(filepath.Join(dir, id))); err != nil && !errors.Is(err, syscall.ENOENT) {
				return fmt.Errorf("renaming the journal in %s: %w", dir, err)
			}
		}
	}
	// systemd starts journald again, with the machine-id and the boot ID of now
	// and the connections that it had.
	pids, _ := os.ReadFile(s.path(filepath.Join("/sys/fs/cgroup/system.slice", journalUnit, "cgroup.procs")))
	for _, text := range strings.Fields(string(pids)) {
		if pid, err := strconv.Atoi(text); err == nil && pid > 1 {
			end(pid)
		}
	}
	if err := removeFile(s.path(randomSeedFile)); err != nil {
		return err
	}
	// Often it is a link to the machine-id.
	if fi, err := os.Lstat(s.path(dbusMachineID)); err == nil && fi.Mode().IsRegular() {
		return s.writeFile(dbusMachineID, []byte(id+"\n"), 0o444, 0, 0)
	}
	return nil
}

// removeFile removes a file, which may be missing. Unlike os.Remove it does not try
// whether it is a directory.
func removeFile(name string) error {
	if err := syscall.Unlink(name); err != nil && !errors.Is(err, syscall.ENOENT) {
		return &fs.PathError{Op: "unlink", Path: name, Err: err}
	}
	return nil
}

// growRoot extends the root file system to a disk of at least size bytes.
func (s *Server) growRoot(size int64) (err error) {
	if size > s.disk {
		s.disk, err = s.cfg.Kernel.GrowRoot(size, growWait)
	}
	return err
}

// reloadSSHD makes a running sshd read the host keys again. Its connections
// continue.
func (s *Server) reloadSSHD() {
	pid, _ := strconv.Atoi(s.line(sshdPIDFile))
	if pid <= 1 {
		return
	}
	if exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid)); err == nil && filepath.Base(exe) == "sshd" {
		_ = syscall.Kill(pid, syscall.SIGHUP)
	}
}

package qemuvm

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
)

// Files in HostConfig.CacheDir.
const (
	fileVerdict = "kvm.json"      // Verdict
	fileProbe   = "kvm-probe.elf" // the probe's kernel
)

// probeDeadline is how long the probe's kernel may take: a processor needs about
// 20 ms, QEMU's emulator 100 ms, and a KVM that is itself emulated minutes.
const probeDeadline = 5 * time.Second

// Verdict is the result of a probe of KVM. It is cached, because the things it
// depends on rarely change.
type Verdict struct {
	Works  bool   `json:"works"`
	Why    string `json:"why,omitempty"`
	Remedy string `json:"remedy,omitempty"`
	Key    string `json:"key"`            // QEMU, kernel and CPU of the probe
	Boot   string `json:"boot,omitempty"` // a negative verdict holds until the host is restarted
}

func (v Verdict) holds(key string) bool {
	return v.Key == key && (v.Works || v.Boot == supervisor.BootID())
}

// prober tests KVM by booting a tiny kernel with it.
type prober struct {
	dir      string
	log      *slog.Logger
	deadline time.Duration
	// run runs the kernel at a path with a QEMU and its machine, and returns
	// nil if the kernel succeeded.
	run func(ctx context.Context, qemu, kernel string, machine []string) error
}

// verdict returns the cached verdict or runs a probe. An error means that the
// result is unknown.
func (p prober) verdict(ctx context.Context, qemu, key string) (Verdict, error) {
	path := filepath.Join(p.dir, fileVerdict)
	var v Verdict
	if err := durable.ReadJSON(path, &v); err == nil && v.holds(key) {
		return v, nil
	}
	v = Verdict{Key: key, Boot: supervisor.BootID()}
	kernel := filepath.Join(p.dir, fileProbe)
	if err := errors.Join(os.WriteFile(kernel+durable.Suffix, probeKernel(), 0o600), os.Rename(kernel+durable.Suffix, kernel)); err != nil {
		return v, fault(err, "cannot probe KVM")
	}
	began := time.Now()
	pctx, cancel := context.WithTimeout(ctx, p.deadline)
	defer cancel()
	err := p.run(pctx, qemu, kernel, Machine{Accel: AccelKVM}.Args())
	switch {
	case ctx.Err() != nil:
		return v, agentlab.Errorf(agentlab.CodeUnavailable, "probing KVM: %w", context.Cause(ctx))
	case err == nil:
		v.Works = true
	case pctx.Err() != nil:
		v.Why = fmt.Sprintf("a tiny guest did not end within %s", p.deadline)
	default:
		v.Why = agentlab.OneLine(err.Error(), MaxReason)
	}
	if !v.Works {
		v.Remedy = "check that the host offers hardware virtualization (nested virtualization if it is a virtual machine)"
	}
	p.log.Info("probed KVM", "works", v.Works, "why", v.Why, "took", time.Since(began).Round(time.Millisecond).String())
	if err := durable.ReplaceJSON(path, v, durable.Content); err != nil {
		p.log.Warn("cannot cache whether KVM works", "err", err)
	}
	return v, nil
}

// probeKey returns a hash of everything that a verdict depends on.
func probeKey(qemu, version string, stamp FileStamp, machine []string) string {
	var u unix.Utsname
	_ = unix.Uname(&u)
	text, _ := json.Marshal([]any{qemu, version, stamp.Size, stamp.Mtime, unix.ByteSliceToString(u.Release[:]), HostCPU(), probeText, machine})
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:])
}

// HostCPU returns the model of the host's processor.
func HostCPU() string { return CPUFields("model name") }

// CPUFields returns fields of the first processor in /proc/cpuinfo.
func CPUFields(names ...string) string {
	b, _ := os.ReadFile("/proc/cpuinfo")
	var values []string
	for line := range strings.Lines(string(b)) {
		name, v, ok := strings.Cut(line, ":")
		if !ok {
			break
		}
		if slices.Contains(names, strings.TrimSpace(name)) {
			values = append(values, strings.TrimSpace(v))
		}
	}
	return strings.Join(values, "; ")
}

// runProbe boots the kernel and checks QEMU's exit code, which only the kernel's
// own code can set to the expected value.
func runProbe(ctx context.Context, qemu, kernel string, machine []string) error {
	args := append([]string{
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-m", "32M", "-smp", "1", "-kernel", kernel, "-device", "isa-debug-exit,iobase=0xf4,iosize=4",
	}, machine...)
	cmd := exec.CommandContext(ctx, qemu, args...)
	var stderr bytes.Buffer
	cmd.Stderr, cmd.WaitDelay, cmd.Env = &stderr, time.Second, []string{"PATH=" + os.Getenv("PATH"), "LC_ALL=C"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return err
	}
	NoCore(cmd.Process.Pid) // QEMU aborts if KVM rejects a request
	err := cmd.Wait()
	if cmd.ProcessState.ExitCode() == probeExit {
		return nil
	}
	if err == nil {
		err = errors.New("QEMU exited before the guest's code had run")
	}
	// The first line of stderr: the last line of an abort names a source file.
	if words, _, _ := strings.Cut(strings.TrimSpace(stderr.String()), "\n"); words != "" {
		return fmt.Errorf("%s (%w)", strings.TrimPrefix(words, "qemu-system-x86_64: "), err)
	}
	return err
}

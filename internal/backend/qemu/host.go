package qemu

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/hostvirt"
	"github.com/agentlab-vm/agentlab/internal/lazyre"
)

const (
	defaultQEMU    = "qemu-system-x86_64"
	defaultQEMUImg = "qemu-img"

	installQEMU    = "sudo apt install qemu-system-x86"
	installQEMUImg = "sudo apt install qemu-utils"
)

// minQEMU is the oldest version with all options of the command line. The newest
// option is -netdev stream.
var minQEMU = version{7, 2}

type version struct{ major, minor int }

func (v version) less(w version) bool {
	return v.major < w.major || v.major == w.major && v.minor < w.minor
}

func (v version) String() string { return strconv.Itoa(v.major) + "." + strconv.Itoa(v.minor) }

// host examines this machine.
type host struct {
	cfg    Config
	arch   string // runtime.GOARCH; tests change it
	probe  prober
	tsc0   tscSample // taken as early as possible
	warned sync.Once // the log entry that there is no KVM

	faultCost func() (time.Duration, error) // hostvirt.FaultCost, measured once

	mu       sync.Mutex
	versions map[fileStamp]qemuVersion
	verdict  *verdict
}

type qemuVersion struct {
	text string
	v    version
}

func newHost(cfg Config) *host {
	h := &host{cfg: cfg, arch: runtime.GOARCH, tsc0: sampleTSC(), versions: map[fileStamp]qemuVersion{}, faultCost: sync.OnceValues(hostvirt.FaultCost)}
	h.probe = prober{dir: cfg.CacheDir, log: cfg.Logger, deadline: probeDeadline, run: runProbe}
	return h
}

// qemu returns the absolute path of QEMU, or its name if it is not found.
func (h *host) qemu() string { return lookPath(h.cfg.QEMU, defaultQEMU) }

// noQEMU returns the error for a QEMU that is not found.
func (h *host) noQEMU() error {
	if h.cfg.QEMU != "" {
		return agentlab.Errorf(agentlab.CodeUnavailable, "%s, which qemu.binary in config.yaml names, is not an executable program", h.cfg.QEMU).
			WithHint("correct qemu.binary, or remove it to use %s from the PATH, and restart the daemon", defaultQEMU)
	}
	return agentlab.Errorf(agentlab.CodeUnavailable, "QEMU is not installed").WithHint(installQEMU)
}

func (h *host) qemuImg() string { return lookPath(h.cfg.QEMUImg, defaultQEMUImg) }

func lookPath(name, fallback string) string {
	if name == "" {
		name = fallback
	}
	if path, err := exec.LookPath(name); err == nil {
		return path
	}
	return name
}

// ready fails with code unavailable or unsupported, and a hint, if this host
// cannot run a sandbox.
func (h *host) ready(ctx context.Context) error {
	if h.arch != "amd64" {
		return agentlab.Errorf(agentlab.CodeUnsupported, "the qemu backend runs on amd64 hosts only; this host is %s", h.arch).
			WithHint("use a host with an x86-64 processor")
	}
	if _, err := exec.LookPath(h.qemuImg()); err != nil {
		return agentlab.Errorf(agentlab.CodeUnavailable, "qemu-img is not installed").WithHint(installQEMUImg)
	}
	v, err := h.version(ctx)
	if err != nil {
		return err
	}
	if v.v.less(minQEMU) {
		return agentlab.Errorf(agentlab.CodeUnavailable, "QEMU %s is too old, %s is needed", v.v, minQEMU).WithHint("install a newer QEMU: %s", installQEMU)
	}
	return nil
}

var versionRE = lazyre.New(`QEMU emulator version ([0-9]+)\.([0-9]+)[^\n]*`)

// version returns the version of QEMU. It runs each binary once.
func (h *host) version(ctx context.Context) (qemuVersion, error) {
	path, err := exec.LookPath(h.qemu())
	if err != nil {
		return qemuVersion{}, h.noQEMU()
	}
	stamp, err := stampOf(path)
	if err != nil {
		return qemuVersion{}, fault(err, "cannot check %s", path)
	}
	h.mu.Lock()
	v, ok := h.versions[stamp]
	h.mu.Unlock()
	if ok {
		return v, nil
	}
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, "--version")
	cmd.WaitDelay = time.Second
	out, err := cmd.Output()
	m := versionRE.FindStringSubmatch(string(out))
	if err != nil || m == nil {
		return qemuVersion{}, agentlab.Errorf(agentlab.CodeUnavailable, "cannot read the version of %s: %w", path, errors.Join(err, ctx.Err())).
			WithHint("reinstall it: %s", installQEMU)
	}
	v.text = strings.TrimPrefix(m[0], "QEMU emulator version ")
	v.v.major, _ = strconv.Atoi(m[1])
	v.v.minor, _ = strconv.Atoi(m[2])
	h.mu.Lock()
	h.versions[stamp] = v
	h.mu.Unlock()
	return v, nil
}

// accel returns the accelerator. With "auto" and without a cached verdict it
// runs a probe.
func (h *host) accel(ctx context.Context) (Accel, error) {
	if h.cfg.Accel == AccelTCG {
		return AccelTCG, nil
	}
	v, err := h.kvm(ctx)
	if err != nil {
		return "", err
	}
	switch {
	case v.Works:
		return AccelKVM, nil
	case h.cfg.Accel == AccelKVM:
		return "", agentlab.Errorf(agentlab.CodeUnavailable, "KVM does not work here: %s", v.Why).WithHint("%s, or set accel: auto", v.Remedy)
	}
	h.warned.Do(func() {
		h.cfg.Logger.Warn("no KVM; CPUs are emulated (TCG), which is many times slower", "why", v.Why, "remedy", v.Remedy)
	})
	return AccelTCG, nil
}

// kvm returns the verdict on KVM: from memory, from the cache, or by a probe.
func (h *host) kvm(ctx context.Context) (verdict, error) {
	if v, bad := kvmAccess("/dev/kvm"); bad {
		return v, nil // permissions are checked each time
	}
	path := h.qemu()
	stamp, err := stampOf(path)
	if err != nil {
		return verdict{}, h.noQEMU()
	}
	version, err := h.version(ctx)
	if err != nil {
		return verdict{}, err
	}
	key := probeKey(path, version.text, stamp)
	h.mu.Lock()
	defer h.mu.Unlock() // one probe at a time
	if h.verdict != nil && h.verdict.holds(key) {
		return *h.verdict, nil
	}
	v, err := h.probe.verdict(ctx, path, key)
	if err != nil {
		return verdict{}, err
	}
	h.verdict = &v
	return v, nil
}

// kvmAccess reports true if the device cannot be opened.
func kvmAccess(device string) (verdict, bool) {
	f, err := os.OpenFile(device, os.O_RDWR|syscall.O_CLOEXEC, 0)
	switch {
	case err == nil:
		_ = f.Close()
		return verdict{}, false
	case errors.Is(err, os.ErrNotExist):
		return verdict{
			Why:    "there is no " + device,
			Remedy: "enable virtualization (VT-x, AMD-V) in the firmware, or nested virtualization if this host is a virtual machine",
		}, true
	case errors.Is(err, os.ErrPermission):
		return verdict{Why: "no permission to open " + device, Remedy: "sudo usermod -aG kvm $USER, then log in again"}, true
	}
	return verdict{Why: "cannot open " + device + ": " + err.Error(), Remedy: "load the module: sudo modprobe kvm_intel (or kvm_amd)"}, true
}

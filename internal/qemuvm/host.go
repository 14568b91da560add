package qemuvm

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
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

// Accel is the accelerator of a VM's CPUs.
type Accel string

// The accelerators. AccelAuto is KVM if a probe shows that it works, else
// TCG, QEMU's emulator.
const (
	AccelAuto Accel = "auto"
	AccelKVM  Accel = "kvm"
	AccelTCG  Accel = "tcg"
)

// Accels lists the accelerators.
var Accels = []Accel{AccelAuto, AccelKVM, AccelTCG}

// The names of QEMU's programs, and how they are installed.
const (
	DefaultQEMU    = "qemu-system-x86_64"
	DefaultQEMUImg = "qemu-img"

	InstallQEMU    = "sudo apt install qemu-system-x86"
	InstallQEMUImg = "sudo apt install qemu-utils"
)

// MinQEMU is the oldest version with all options of the command line. The newest
// option is -netdev stream.
var MinQEMU = Release{7, 2}

// Release is a version of QEMU.
type Release struct{ Major, Minor int }

// Less reports whether v is older than w.
func (v Release) Less(w Release) bool {
	return v.Major < w.Major || v.Major == w.Major && v.Minor < w.Minor
}

func (v Release) String() string { return strconv.Itoa(v.Major) + "." + strconv.Itoa(v.Minor) }

// HostConfig is the configuration of a Host.
type HostConfig struct {
	QEMU    string // path or name of qemu-system-x86_64; "" means that name
	QEMUImg string // path or name of qemu-img; "" means that name
	Key     string // the configuration key of QEMU, for errors
	// CacheDir has the verdict on KVM. It may be emptied at any time.
	CacheDir string
	Accel    Accel
	Arch     string // "" is runtime.GOARCH
	// ProbeDeadline is how long the probe may take; 0 is 5 s, far more than any
	// KVM needs that is not itself emulated.
	ProbeDeadline time.Duration
	Logger        *slog.Logger
}

// Host examines this machine, and QEMU on it.
type Host struct {
	cfg    HostConfig
	probe  prober
	tsc0   tscSample // taken as early as possible
	warned sync.Once // the log entry that there is no KVM

	// FaultCost is hostvirt.FaultCost, measured once.
	FaultCost func() (time.Duration, error)

	mu       sync.Mutex
	versions map[FileStamp]Version
	verdict  *Verdict
}

// Version is what QEMU says about its version.
type Version struct {
	Text string
	Release
}

// NewHost returns a Host. It does no I/O.
func NewHost(cfg HostConfig) *Host {
	if cfg.Arch == "" {
		cfg.Arch = runtime.GOARCH
	}
	h := &Host{cfg: cfg, tsc0: sampleTSC(), versions: map[FileStamp]Version{}, FaultCost: sync.OnceValues(hostvirt.FaultCost)}
	h.probe = prober{dir: cfg.CacheDir, log: cfg.Logger, deadline: cmp.Or(cfg.ProbeDeadline, probeDeadline), run: runProbe}
	return h
}

// QEMU returns the absolute path of QEMU, or its name if it is not found.
func (h *Host) QEMU() string { return lookPath(h.cfg.QEMU, DefaultQEMU) }

// noQEMU returns the error for a QEMU that is not found.
func (h *Host) noQEMU() error {
	if h.cfg.QEMU != "" {
		return agentlab.Errorf(agentlab.CodeUnavailable, "%s, which %s in config.yaml names, is not an executable program", h.cfg.QEMU, h.cfg.Key).
			WithHint("correct %s, or remove it to use %s from the PATH, and restart the daemon", h.cfg.Key, DefaultQEMU)
	}
	return agentlab.Errorf(agentlab.CodeUnavailable, "QEMU is not installed").WithHint(InstallQEMU)
}

// QEMUImg returns the absolute path of qemu-img, or its name if it is not found.
func (h *Host) QEMUImg() string { return lookPath(h.cfg.QEMUImg, DefaultQEMUImg) }

func lookPath(name, fallback string) string {
	if name == "" {
		name = fallback
	}
	if path, err := exec.LookPath(name); err == nil {
		return path
	}
	return name
}

// Ready fails with code unavailable or unsupported, and a hint, if this host
// cannot run a sandbox.
func (h *Host) Ready(ctx context.Context) error {
	if h.cfg.Arch != "amd64" {
		return agentlab.Errorf(agentlab.CodeUnsupported, "QEMU with the virtual machines of AgentLab runs on amd64 hosts only; this host is %s", h.cfg.Arch).
			WithHint("use a host with an x86-64 processor")
	}
	if _, err := exec.LookPath(h.QEMUImg()); err != nil {
		return agentlab.Errorf(agentlab.CodeUnavailable, "qemu-img is not installed").WithHint(InstallQEMUImg)
	}
	v, err := h.Version(ctx)
	if err != nil {
		return err
	}
	if v.Less(MinQEMU) {
		return agentlab.Errorf(agentlab.CodeUnavailable, "QEMU %s is too old, %s is needed", v.Release, MinQEMU).WithHint("install a newer QEMU: %s", InstallQEMU)
	}
	return nil
}

var versionRE = lazyre.New(`QEMU emulator version ([0-9]+)\.([0-9]+)[^\n]*`)

// Version returns the version of QEMU. It runs each binary once.
func (h *Host) Version(ctx context.Context) (Version, error) {
	path, err := exec.LookPath(h.QEMU())
	if err != nil {
		return Version{}, h.noQEMU()
	}
	stamp, err := StampOf(path)
	if err != nil {
		return Version{}, fault(err, "cannot check %s", path)
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
		return Version{}, agentlab.Errorf(agentlab.CodeUnavailable, "cannot read the version of %s: %w", path, errors.Join(err, ctx.Err())).
			WithHint("reinstall it: %s", InstallQEMU)
	}
	v.Text = strings.TrimPrefix(m[0], "QEMU emulator version ")
	v.Major, _ = strconv.Atoi(m[1])
	v.Minor, _ = strconv.Atoi(m[2])
	h.mu.Lock()
	h.versions[stamp] = v
	h.mu.Unlock()
	return v, nil
}

// Accel returns the accelerator. With "auto" and without a cached verdict it
// runs a probe.
func (h *Host) Accel(ctx context.Context) (Accel, error) {
	if h.cfg.Accel == AccelTCG {
		return AccelTCG, nil
	}
	v, err := h.KVM(ctx)
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

// Machine returns the machine of a guest on this host. With nested its CPUs have
// virtualization.
func (h *Host) Machine(ctx context.Context, nested bool) (Machine, error) {
	m := Machine{Nested: nested}
	var err error
	if m.Accel, err = h.Accel(ctx); err == nil && m.Accel == AccelTCG {
		m.TSCKHz, m.TSCFixed, err = h.TSC(ctx)
	}
	return m, err
}

// Nested returns an error with code unsupported if this host cannot provide
// virtualization to guests. QEMU's emulator has AMD's. KVM provides the processor's if
// its module permits it.
func (h *Host) Nested(ctx context.Context) error {
	accel, err := h.Accel(ctx)
	if err != nil || accel != AccelKVM {
		return err
	}
	return hostvirt.Nested(hostvirt.Modules)
}

// KVM returns the verdict on KVM: from memory, from the cache, or by a probe.
func (h *Host) KVM(ctx context.Context) (Verdict, error) {
	if v, bad := kvmAccess("/dev/kvm"); bad {
		return v, nil // permissions are checked each time
	}
	path := h.QEMU()
	stamp, err := StampOf(path)
	if err != nil {
		return Verdict{}, h.noQEMU()
	}
	version, err := h.Version(ctx)
	if err != nil {
		return Verdict{}, err
	}
	key := probeKey(path, version.Text, stamp, Machine{Accel: AccelKVM}.Args())
	h.mu.Lock()
	defer h.mu.Unlock() // one probe at a time
	if h.verdict != nil && h.verdict.holds(key) {
		return *h.verdict, nil
	}
	v, err := h.probe.verdict(ctx, path, key)
	if err != nil {
		return Verdict{}, err
	}
	h.verdict = &v
	return v, nil
}

// kvmAccess reports true if the device cannot be opened.
func kvmAccess(device string) (Verdict, bool) {
	f, err := os.OpenFile(device, os.O_RDWR|syscall.O_CLOEXEC, 0)
	switch {
	case err == nil:
		_ = f.Close()
		return Verdict{}, false
	case errors.Is(err, os.ErrNotExist):
		return Verdict{
			Why:    "there is no " + device,
			Remedy: "enable virtualization (VT-x, AMD-V) in the firmware, or nested virtualization if this host is a virtual machine",
		}, true
	case errors.Is(err, os.ErrPermission):
		return Verdict{Why: "no permission to open " + device, Remedy: "sudo usermod -aG kvm $USER, then log in again"}, true
	}
	return Verdict{Why: "cannot open " + device + ": " + err.Error(), Remedy: "load the module: sudo modprobe kvm_intel (or kvm_amd)"}, true
}

package qemuvm

import (
	"context"
	"os"
	"os/exec"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/hostspace"
)

// Free disk space below which CheckSpace returns a warning and an error, in bytes.
const (
	lowSpace  = 5 << 30
	leastFree = 512 << 20
)

// Check returns what was found about this machine and QEMU on it. The first call
// on a machine may take as long as a probe of KVM.
func (h *Host) Check(ctx context.Context) []backend.Finding {
	return []backend.Finding{h.checkArch(), h.checkQEMU(ctx), h.checkQEMUImg(), h.checkKVM(ctx), h.checkFaults()}
}

func (h *Host) checkArch() backend.Finding {
	if h.cfg.Arch != "amd64" {
		return backend.Findf("arch", backend.LevelError, "use a host with an x86-64 processor", "the virtual machines of AgentLab do not run on %s", h.cfg.Arch)
	}
	return backend.Findf("arch", backend.LevelOK, "", "amd64")
}

func (h *Host) checkQEMU(ctx context.Context) backend.Finding {
	v, err := h.Version(ctx)
	switch {
	case err != nil:
		return backend.Findf("qemu", backend.LevelError, agentlab.HintOf(err), "%s", err)
	case v.Less(MinQEMU):
		return backend.Findf("qemu", backend.LevelError, "install QEMU "+MinQEMU.String()+" or newer: "+InstallQEMU, "QEMU %s is too old", v.Text)
	}
	return backend.Findf("qemu", backend.LevelOK, "", "QEMU %s (%s)", v.Text, h.QEMU())
}

func (h *Host) checkQEMUImg() backend.Finding {
	path, err := exec.LookPath(h.QEMUImg())
	if err != nil {
		return backend.Findf("qemu-img", backend.LevelError, InstallQEMUImg, "qemu-img is not installed")
	}
	return backend.Findf("qemu-img", backend.LevelOK, "", "%s", path)
}

func (h *Host) checkKVM(ctx context.Context) backend.Finding {
	if h.cfg.Accel == AccelTCG {
		return backend.Findf("kvm", backend.LevelWarn, "set accel: auto to use KVM where it works", "not used: the configuration says accel: tcg")
	}
	v, err := h.KVM(ctx)
	switch {
	case err != nil:
		return backend.Findf("kvm", backend.LevelWarn, agentlab.HintOf(err), "unknown: %s", err)
	case v.Works:
		return backend.Findf("kvm", backend.LevelOK, "", "a guest runs")
	case h.cfg.Accel == AccelKVM:
		return backend.Findf("kvm", backend.LevelError, v.Remedy+", or set accel: auto", "KVM does not work: %s", v.Why)
	}
	return backend.Findf("kvm", backend.LevelWarn, v.Remedy, "KVM does not work, CPUs are emulated (TCG), which is many times slower: %s", v.Why)
}

// expensiveFault is the cost of a first access to a page of memory that marks a host whose
// hypervisor is virtualized: sandboxes start up to twice as slowly there.
const expensiveFault = 3 * time.Microsecond

func (h *Host) checkFaults() backend.Finding {
	cost, err := h.FaultCost()
	if err != nil {
		return backend.Findf("page-faults", backend.LevelOK, "", "not measured: %s", err)
	}
	note := ""
	if cost > expensiveFault {
		note = ", which is slow: this host seems to be a VM in a VM, where sandboxes start up to twice as slowly"
	}
	return backend.Findf("page-faults", backend.LevelOK, "", "the first access to a page of memory takes %.1f µs%s", float64(cost.Nanoseconds())/1000, note)
}

// CheckRunner returns a finding about the agent-runner at path.
func CheckRunner(path string) backend.Finding {
	if _, err := os.Stat(path); err != nil {
		return backend.Findf("agent-runner", backend.LevelError, "install agent-runner next to agentlabd, or run 'make build'", "%s is missing", path)
	}
	return backend.Findf("agent-runner", backend.LevelOK, "", "%s", path)
}

// CheckSpace returns a finding about the free space on the disk of a directory.
func CheckSpace(name, dir string) backend.Finding {
	free, err := hostspace.FreeBytes(dir)
	if err != nil {
		return backend.Findf(name, backend.LevelError, "check the directory and its permissions", "cannot check %s: %s", dir, err)
	}
	level, remedy := backend.LevelOK, ""
	switch {
	case free < leastFree:
		level = backend.LevelError
	case free < lowSpace:
		level = backend.LevelWarn
	}
	if level != backend.LevelOK {
		remedy = "free disk space, or move AgentLab's directories"
	}
	return backend.Findf(name, level, remedy, "%.1f GiB free in %s", float64(free)/(1<<30), dir)
}

package qemu

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/hostspace"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
)

// Free disk space below which Check returns a warning and an error, in bytes.
const (
	lowSpace  = 5 << 30
	leastFree = 512 << 20
)

// Check implements backend.Driver. The first call on a host may take as long
// as a probe of KVM.
func (d *Driver) Check(ctx context.Context) []backend.Finding {
	findings := []backend.Finding{d.checkArch()}
	findings = append(findings, d.checkQEMU(ctx), d.checkQEMUImg(), d.checkKVM(ctx), d.checkNested(ctx), d.checkFaults(), d.checkRunner())
	findings = append(findings, supervisor.CheckProxy(ctx, d.cfg.UpstreamProxy)...)
	return append(findings, d.tmpl.check(), checkSpace("disk-state", d.cfg.StateDir), checkSpace("disk-cache", d.cfg.CacheDir))
}

func finding(name string, level backend.Level, remedy, format string, args ...any) backend.Finding {
	return backend.Finding{Name: name, Level: level, Detail: fmt.Sprintf(format, args...), Remedy: remedy}
}

func (d *Driver) checkArch() backend.Finding {
	if d.host.arch != "amd64" {
		return finding("arch", backend.LevelError, "use a host with an x86-64 processor", "the qemu backend does not run on %s", d.host.arch)
	}
	return finding("arch", backend.LevelOK, "", "amd64")
}

func (d *Driver) checkQEMU(ctx context.Context) backend.Finding {
	v, err := d.host.version(ctx)
	switch {
	case err != nil:
		return finding("qemu", backend.LevelError, agentlab.HintOf(err), "%s", err)
	case v.v.less(minQEMU):
		return finding("qemu", backend.LevelError, "install QEMU "+minQEMU.String()+" or newer: "+installQEMU, "QEMU %s is too old", v.text)
	}
	return finding("qemu", backend.LevelOK, "", "QEMU %s (%s)", v.text, d.host.qemu())
}

func (d *Driver) checkQEMUImg() backend.Finding {
	path, err := exec.LookPath(d.host.qemuImg())
	if err != nil {
		return finding("qemu-img", backend.LevelError, installQEMUImg, "qemu-img is not installed")
	}
	return finding("qemu-img", backend.LevelOK, "", "%s", path)
}

func (d *Driver) checkKVM(ctx context.Context) backend.Finding {
	if d.cfg.Accel == AccelTCG {
		return finding("kvm", backend.LevelWarn, "set accel: auto to use KVM where it works", "not used: the configuration says accel: tcg")
	}
	v, err := d.host.kvm(ctx)
	switch {
	case err != nil:
		return finding("kvm", backend.LevelWarn, agentlab.HintOf(err), "unknown: %s", err)
	case v.Works:
		return finding("kvm", backend.LevelOK, "", "a guest runs")
	case d.cfg.Accel == AccelKVM:
		return finding("kvm", backend.LevelError, v.Remedy+", or set accel: auto", "KVM does not work: %s", v.Why)
	}
	return finding("kvm", backend.LevelWarn, v.Remedy, "KVM does not work, CPUs are emulated (TCG), which is many times slower: %s", v.Why)
}

// expensiveFault is the cost of a first access to a page of memory that marks a host whose
// hypervisor is virtualized: sandboxes start up to twice as slowly there.
const expensiveFault = 3 * time.Microsecond

func (d *Driver) checkFaults() backend.Finding {
	cost, err := d.host.faultCost()
	if err != nil {
		return finding("page-faults", backend.LevelOK, "", "not measured: %s", err)
	}
	note := ""
	if cost > expensiveFault {
		note = ", which is slow: this host seems to be a VM in a VM, where sandboxes start up to twice as slowly"
	}
	return finding("page-faults", backend.LevelOK, "", "the first access to a page of memory takes %.1f µs%s", float64(cost.Nanoseconds())/1000, note)
}

func (d *Driver) checkRunner() backend.Finding {
	if _, err := os.Stat(d.cfg.Runner); err != nil {
		return finding("agent-runner", backend.LevelError, "install agent-runner next to agentlabd, or run 'make build'", "%s is missing", d.cfg.Runner)
	}
	return finding("agent-runner", backend.LevelOK, "", "%s", d.cfg.Runner)
}

func checkSpace(name, dir string) backend.Finding {
	free, err := hostspace.FreeBytes(dir)
	if err != nil {
		return finding(name, backend.LevelError, "check the directory and its permissions", "cannot check %s: %s", dir, err)
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
	return finding(name, level, remedy, "%.1f GiB free in %s", float64(free)/(1<<30), dir)
}

// Accel implements backend.Host.
func (d *Driver) Accel(ctx context.Context) string {
	accel, err := d.host.accel(ctx)
	if err != nil {
		return ""
	}
	return string(accel)
}

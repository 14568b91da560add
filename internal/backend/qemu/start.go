package qemu

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"strconv"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/qemuvm"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
	"github.com/agentlab-vm/agentlab/internal/vmdir"
)

// Start implements backend.Driver.
func (d *Driver) Start(ctx context.Context, ref backend.Ref) error {
	f, unlock, err := d.open(ctx, ref)
	if err != nil {
		return err
	}
	defer unlock()
	onDisk, err := d.suspendedToDisk(f)
	if err != nil {
		return err
	}
	if onDisk {
		return agentlab.Errorf(agentlab.CodeConflict, "sandbox %d is suspended", f.VMID).WithHint("continue it with 'agentlab sandbox resume %d'", f.VMID)
	}
	return d.start(ctx, f)
}

// start starts the sandbox's VM, with a memory that is in its directory. A VM that
// does not start with the memory of a template boots, and the template is removed:
// it may be damaged.
func (d *Driver) start(ctx context.Context, f found) error {
	if err := d.tidyStopped(ctx, f); err != nil {
		return err
	}
	saved, err := readMemory(f.Dir)
	template := err == nil && saved.Boot != ""
	var started *startConfig
	err = d.supervised(f).Start(ctx, d.cfg.Supervisor, func(ctx context.Context) (supervisor.Config, error) {
		cfg, err := d.startConfig(ctx, f.Handle)
		if err != nil {
			return nil, err
		}
		if cfg.Load, err = d.memoryOf(f, cfg); err != nil {
			return nil, err
		}
		if cfg.Load {
			cfg.Identity, cfg.Detached = f.Spec.UID, saved.Boot == ""
			cfg.Own = saved.own()
		}
		// machine.Launch checks again; here the caller gets the error's code.
		if err := refuseHostMounts(f.Dir, f.Handle, cfg, vmArgs(f.Handle, cfg, qemuFDs)); err != nil {
			return nil, err
		}
		started = &cfg
		return &cfg, nil
	})
	switch {
	case started == nil:
	case err == nil && !started.Load:
		d.tmpl.want(f, *started)
	case err == nil && template:
		d.tmpl.watch(f, saved.Machine)
	case err != nil && template && started.Load && ctx.Err() == nil:
		d.log.Warn("a sandbox did not start from its template, which is removed; it boots", "vmid", f.VMID, "err", err)
		if err := errors.Join(d.tmpl.remove(saved.Machine), dropMemory(f.Dir, durable.Content)); err != nil {
			return err
		}
		return d.start(ctx, f)
	}
	return err
}

// startConfig examines the host and returns what the supervisor runs.
func (d *Driver) startConfig(ctx context.Context, h handle) (startConfig, error) {
	if err := d.host.Ready(ctx); err != nil {
		return startConfig{}, err
	}
	for _, p := range []string{h.Image.Kernel, h.Image.RootDisk} {
		if _, err := os.Stat(p); err != nil {
			return startConfig{}, h.ImageGone(err)
		}
	}
	machine, err := d.host.Machine(ctx, h.Spec.Resources.Nested.Wanted() && !d.cfg.NoNested)
	if err != nil {
		return startConfig{}, err
	}
	if h.Spec.Resources.Nested == agentlab.NestedOn {
		if err := d.Nested(ctx); err != nil {
			return startConfig{}, err
		}
	}
	initrd, err := d.rd.File(ctx, h.Image.Modules)
	if errors.Is(err, fs.ErrNotExist) && !fileExists(h.Image.Modules) {
		return startConfig{}, h.ImageGone(err)
	}
	if err != nil {
		return startConfig{}, vmdir.AsError(err, "cannot create the initrd")
	}
	cfg := startConfig{
		Start: supervisor.Start{
			Backend: Name, PauseBelow: d.cfg.PauseBelow, Reserved: d.cfg.Reserved, UpstreamProxy: d.cfg.UpstreamProxy,
		},
		QEMU: d.host.QEMU(), QEMUImg: d.host.QEMUImg(), Initrd: initrd, Machine: machine,
	}
	cfg.Key, err = d.machineKey(ctx, h, cfg)
	return cfg, err
}

func fileExists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// deviceRoot is the root disk in QEMU.
const deviceRoot = "root"

// fds are the file descriptors that QEMU inherits, by number in QEMU.
type fds struct{ net, control, console, qmp, devices int }

// qemuFDs are the file descriptors of a sandbox's QEMU, in the order of the
// inherited files.
var qemuFDs = fds{net: qemuvm.FDNetwork, control: qemuvm.FDControl, console: qemuvm.FDConsole, qmp: qemuvm.FDMonitor, devices: qemuvm.FDMore}

// vmArgs returns the command line of QEMU, without the program. QEMU runs in
// the sandbox's directory.
func vmArgs(h handle, c startConfig, f fds) []string {
	a := []string{
		"-name", "agentlab-" + strconv.Itoa(h.Spec.VMID) + ",debug-threads=on",
	}
	a = append(a, qemuvm.Confined...)
	size := strconv.Itoa(h.Spec.Resources.MemoryMB) + "M"
	a = append(a, c.Args()...)
	if c.Load {
		// The guest has its kernel in its memory. Its CPUs start by a command.
		a = append(a, "-object", "memory-backend-file,id="+ramBlock+",size="+size+",share=off,mem-path="+fileMemory,
			"-incoming", "fd:"+strconv.Itoa(f.devices), "-S",
			// The guest's address has not moved to another port of a switch: it need
			// not announce it.
			"-global", "migration.announce-rounds=0")
	} else {
		a = append(a, "-object", "memory-backend-ram,id="+ramBlock+",size="+size,
			"-kernel", h.Image.Kernel, "-initrd", c.Initrd, "-append", c.KernelCommandLine())
	}
	a = append(a,
		"-smp", strconv.Itoa(h.Spec.Resources.Cores),
		"-m", size, "-machine", "memory-backend="+ramBlock,
		"-rtc", "base=utc",
	)
	a = append(a, qemuvm.Devices(f.net, f.control, f.console, f.qmp)...)
	a = append(a,
		// QEMU stops the guest when the host's disk is full (werror=enospc);
		// the supervisor continues it when there is enough space again.
		"-blockdev", "driver=file,node-name=root-file,filename="+fileRoot+",discard=unmap",
		"-blockdev", "driver=qcow2,node-name=root,file=root-file,discard=unmap,detect-zeroes=unmap",
		"-device", "virtio-blk-device,id="+deviceRoot+",drive=root,serial="+qemuvm.RootSerial+",werror=enospc,rerror=report",
	)
	a = append(a, qemuvm.SlotArgs...)
	return append(a, qemuvm.Helpers...)
}

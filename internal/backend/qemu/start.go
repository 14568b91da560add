package qemu

import (
	"context"
	"errors"
	"io/fs"
	"os"

	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
)

// Start implements backend.Driver.
func (d *Driver) Start(ctx context.Context, ref backend.Ref) error {
	unlock, err := d.begin(ctx, ref)
	if err != nil {
		return err
	}
	defer unlock()
	f, err := d.load(ref)
	if err != nil {
		return err
	}
	return d.supervised(f).Start(ctx, d.cfg.Shim, func(ctx context.Context) (supervisor.Config, error) {
		cfg, err := d.startConfig(ctx, f.handle)
		if err != nil {
			return nil, err
		}
		// machine.Launch checks again what it really runs; here the caller gets
		// the error's code.
		return &cfg, refuseHostMounts(f.dir, f.handle, cfg, vmArgs(f.handle, cfg, qemuFDs))
	})
}

// startConfig examines the host and returns what the supervisor runs.
func (d *Driver) startConfig(ctx context.Context, h handle) (startConfig, error) {
	if err := d.host.ready(ctx); err != nil {
		return startConfig{}, err
	}
	for _, p := range []string{h.Image.Kernel, h.Image.RootDisk} {
		if _, err := os.Stat(p); err != nil {
			return startConfig{}, imageGone(h, err)
		}
	}
	accel, err := d.host.accel(ctx)
	if err != nil {
		return startConfig{}, err
	}
	initrd, err := d.rd.file(ctx, h.Image.Modules)
	if errors.Is(err, fs.ErrNotExist) && !fileExists(h.Image.Modules) {
		return startConfig{}, imageGone(h, err)
	}
	if err != nil {
		return startConfig{}, asError(err, "cannot make the initrd")
	}
	cfg := startConfig{
		Start: supervisor.Start{
			Backend: Name, PauseBelow: d.cfg.PauseBelow, Reserved: d.cfg.Reserved, UpstreamProxy: d.cfg.UpstreamProxy,
		},
		QEMU: d.host.qemu(), Accel: accel, Initrd: initrd,
	}
	if accel == AccelTCG {
		if cfg.TSCKHz, cfg.TSCFixed, err = d.host.tsc(ctx); err != nil {
			return startConfig{}, err
		}
	}
	return cfg, nil
}

func fileExists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

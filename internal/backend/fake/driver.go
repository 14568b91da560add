package fake

import (
	"context"
	"fmt"
	"io"
	"net"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// Driver is one opened instance of a Host. It implements backend.Driver and
// the groups below.
type Driver struct {
	h       *Host
	ownHost bool // Close closes it too
	dead    atomic.Bool
}

var (
	_ backend.Driver    = (*Driver)(nil)
	_ backend.Power     = (*Driver)(nil)
	_ backend.Net       = (*Driver)(nil)
	_ backend.Console   = (*Driver)(nil)
	_ backend.Snapshots = (*Driver)(nil)
	_ backend.Templates = (*Driver)(nil)
	_ backend.Volumes   = (*Driver)(nil)
	_ backend.Host      = (*Driver)(nil)
)

// Open creates a Host and opens it; closing the Driver closes the Host.
// Daemons use it.
func Open(cfg Config) (*Driver, error) {
	h, err := NewHost(cfg)
	if err != nil {
		return nil, err
	}
	d := h.Open()
	d.ownHost = true
	return d, nil
}

// Open opens the host; it may be opened several times.
func (h *Host) Open() *Driver { return &Driver{h: h} }

// Host returns the host of d.
func (d *Driver) Host() *Host { return d.h }

// alive returns an error if the driver's process has ended or ctx has ended.
func (d *Driver) alive(ctx context.Context) error {
	if d.dead.Load() {
		return agentlab.Errorf(agentlab.CodeUnavailable, "the driver is closed")
	}
	if err := ctx.Err(); err != nil {
		return cancelled(err)
	}
	return nil
}

// die ends the driver like a crash of its process: its listeners are closed,
// VMs keep running.
func (d *Driver) die() {
	if d.dead.CompareAndSwap(false, true) {
		d.h.dropListeners(d)
	}
}

// Close releases the driver. VMs keep running as long as their Host.
func (d *Driver) Close() error {
	d.die()
	if d.ownHost {
		return d.h.Close()
	}
	return nil
}

var controllerURL = "http://10.77.0.1:" + strconv.Itoa(backend.ControllerPort)

// Info describes the driver.
func (d *Driver) Info() backend.Info {
	return backend.Info{
		Name:          d.h.cfg.Name,
		Version:       "1",
		Capabilities:  backend.Capabilities{NetworkOff: true, Allowlist: true, Private: true, KeptSnapshots: !d.h.cfg.NoKeptSnapshots, Forks: !d.h.cfg.NoForks, VolumeHotplug: !d.h.cfg.NoVolumeHotplug, AttachedVolumeSnapshots: !d.h.cfg.NoAttachedVolumeSnapshots, SuspendToDisk: true, Deadlines: true, EgressRecords: true, SharedNumbers: true},
		ControllerURL: controllerURL,
		UploadURL:     "http://10.77.0.1:" + strconv.Itoa(backend.UploadPort) + "/upload",
		GuestNetwork:  &guestapi.Network{Address: "10.77.0.2/24", Gateway: "10.77.0.1", DNS: []string{"10.77.0.1"}, MTU: 1500},
	}
}

// Taken implements backend.Host.
func (d *Driver) Taken(ctx context.Context, first, last int) ([]int, error) {
	if err := d.point(ctx, OpTaken, Before, backend.Ref{}); err != nil {
		return nil, err
	}
	return d.h.taken(first, last), nil
}

// Accel implements backend.Host: nothing is run.
func (d *Driver) Accel(context.Context) string { return "" }

// ExportDisk implements backend.Console: there are no disks.
func (d *Driver) ExportDisk(context.Context, backend.Ref, string) error {
	return agentlab.Errorf(agentlab.CodeUnsupported, "the fake backend has no disks")
}

// Check only reports that this is the fake backend.
func (d *Driver) Check(context.Context) []backend.Finding {
	return []backend.Finding{{Name: "fake", Level: backend.LevelOK, Detail: "sandboxes are imitated, nothing is isolated and nothing is run"}}
}

// Validate rejects more than 64 cores and unknown network modes.
func (d *Driver) Validate(spec backend.Spec) error {
	if n := spec.Resources.Cores; n > 64 {
		return agentlab.Errorf(agentlab.CodeUnsupported, "%d cores are more than the 64 of this host", n).WithField("resources.cores")
	}
	if err := d.Info().CheckSpec(spec); err != nil {
		return err
	}
	return d.validNetwork(spec.Network)
}

// Create creates the instance.
func (d *Driver) Create(ctx context.Context, spec backend.Spec) error {
	ref := spec.Ref()
	if err := d.pointOf(ctx, OpCreate, Before, spec); err != nil {
		return err
	}
	if err := d.Validate(spec); err != nil {
		return err
	}
	from, err := d.h.source(spec)
	if err != nil {
		return err
	}
	in, err := d.h.claim(spec)
	if err != nil {
		return err
	}
	if err := in.setNetwork(spec.Network); err != nil { // the caller's policy is newer than the stored one
		return err
	}
	if err := d.point(ctx, OpCreate, Half, ref); err != nil {
		return err
	}
	if err := in.complete(from); err != nil {
		return err
	}
	return d.point(ctx, OpCreate, After, ref)
}

// Start powers the instance on.
func (d *Driver) Start(ctx context.Context, ref backend.Ref) error {
	if err := d.point(ctx, OpStart, Before, ref); err != nil {
		return err
	}
	in, err := d.h.find(ref)
	if err != nil {
		return err
	}
	if err := in.start(); err != nil {
		return err
	}
	if _, err := d.h.warm(in.rec.Spec); err != nil {
		return err
	}
	return d.point(ctx, OpStart, After, ref)
}

// Stop powers it off.
func (d *Driver) Stop(ctx context.Context, ref backend.Ref, grace time.Duration) error {
	if err := d.point(ctx, OpStop, Before, ref); err != nil {
		return err
	}
	in, err := d.h.find(ref)
	if err != nil {
		return err
	}
	if grace > 0 {
		if err := d.point(ctx, OpStop, Half, ref); err != nil {
			return err
		}
		if err := in.shutdown(ctx, grace); err != nil {
			return err
		}
	}
	if err := in.linger(ctx); err != nil {
		return err
	}
	if err := in.cut(backend.PowerStopped, ""); err != nil {
		return err
	}
	return d.point(ctx, OpStop, After, ref)
}

// Suspend pauses it.
func (d *Driver) Suspend(ctx context.Context, ref backend.Ref) error {
	return d.freeze(ctx, OpSuspend, ref, backend.PowerRunning, backend.PowerSuspended)
}

// SuspendToDisk pauses it so that it survives a restart of the host.
func (d *Driver) SuspendToDisk(ctx context.Context, ref backend.Ref) error {
	if err := d.point(ctx, OpSuspendToDisk, Before, ref); err != nil {
		return err
	}
	in, err := d.h.find(ref)
	if err != nil {
		return err
	}
	if err := in.freezeToDisk(); err != nil {
		return err
	}
	return d.point(ctx, OpSuspendToDisk, After, ref)
}

// Resume continues it.
func (d *Driver) Resume(ctx context.Context, ref backend.Ref) error {
	return d.freeze(ctx, OpResume, ref, backend.PowerSuspended, backend.PowerRunning)
}

func (d *Driver) freeze(ctx context.Context, op Op, ref backend.Ref, from, to backend.PowerState) error {
	if err := d.point(ctx, op, Before, ref); err != nil {
		return err
	}
	in, err := d.h.find(ref)
	if err != nil {
		return err
	}
	if err := in.freeze(from, to); err != nil {
		return err
	}
	return d.point(ctx, op, After, ref)
}

// Destroy removes it.
func (d *Driver) Destroy(ctx context.Context, ref backend.Ref) error {
	if err := d.point(ctx, OpDestroy, Before, ref); err != nil {
		return err
	}
	in, err := d.h.find(ref)
	switch {
	case agentlab.CodeOf(err) == agentlab.CodeNotFound:
		return d.point(ctx, OpDestroy, After, ref)
	case err != nil:
		return err
	}
	if err := in.cut(backend.PowerPartial, "its destruction was interrupted"); err != nil {
		return err
	}
	if err := in.linger(ctx); err != nil {
		return err
	}
	if err := d.point(ctx, OpDestroy, Half, ref); err != nil {
		return err
	}
	if d.h.cfg.NoKeptSnapshots {
		if err := d.h.dropSnapshots(ref.UID); err != nil {
			return err
		}
	}
	if err := d.h.remove(in); err != nil {
		return err
	}
	return d.point(ctx, OpDestroy, After, ref)
}

// Inspect returns the state of an instance.
func (d *Driver) Inspect(ctx context.Context, ref backend.Ref) (backend.Instance, error) {
	if err := d.point(ctx, OpInspect, Before, ref); err != nil {
		return backend.Instance{}, err
	}
	in, err := d.h.find(ref)
	if err != nil {
		return backend.Instance{}, err
	}
	return in.view(), nil
}

// List returns all instances.
func (d *Driver) List(ctx context.Context) ([]backend.Instance, error) {
	if err := d.point(ctx, OpList, Before, backend.Ref{}); err != nil {
		return nil, err
	}
	return d.h.list(), nil
}

// DialControl opens a stream to the guest's control server.
func (d *Driver) DialControl(ctx context.Context, ref backend.Ref) (net.Conn, error) {
	if err := d.point(ctx, OpDialControl, Before, ref); err != nil {
		return nil, err
	}
	g, err := d.guest(ref)
	if err != nil {
		return nil, err
	}
	return g.dialControl(d)
}

// DialGuest opens a stream to a port of the guest.
func (d *Driver) DialGuest(ctx context.Context, ref backend.Ref, port uint16) (net.Conn, error) {
	if err := d.point(ctx, OpDialGuest, Before, ref); err != nil {
		return nil, err
	}
	g, err := d.guest(ref)
	if err != nil {
		return nil, err
	}
	return g.dialPort(d, port)
}

func (d *Driver) guest(ref backend.Ref) (*guest, error) {
	in, err := d.h.find(ref)
	if err != nil {
		return nil, err
	}
	g := in.running()
	if g == nil {
		return nil, agentlab.Errorf(agentlab.CodeUnavailable, "the VM of sandbox %d is not running", in.rec.Spec.VMID)
	}
	return g, nil
}

// ListenGuest returns a listener for the guest's connections to the
// controller.
func (d *Driver) ListenGuest(ctx context.Context, ref backend.Ref) (net.Listener, error) {
	if err := d.point(ctx, OpListenGuest, Before, ref); err != nil {
		return nil, err
	}
	in, err := d.h.find(ref)
	if err != nil {
		return nil, err
	}
	return in.listen(d), nil
}

// ConsoleLog reads the console output of the VM.
func (d *Driver) ConsoleLog(ctx context.Context, ref backend.Ref, follow bool) (io.ReadCloser, error) {
	if err := d.point(ctx, OpConsoleLog, Before, ref); err != nil {
		return nil, err
	}
	in, err := d.h.find(ref)
	if err != nil {
		return nil, err
	}
	return in.console.reader(ctx, follow), nil
}

func notFound(ref backend.Ref) error {
	return agentlab.Errorf(agentlab.CodeNotFound, "there is no sandbox %s", ref.UID)
}

func foreign(vmid int) error {
	return &agentlab.Error{
		Code:    agentlab.CodeExists,
		Message: fmt.Sprintf("number %d is taken by something that is not ours", vmid),
		Hint:    "the VM was not changed; remove it manually or use another number for the sandbox",
	}
}

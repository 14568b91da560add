package lima

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/egress/gate"
	"github.com/agentlab-vm/agentlab/internal/egress/vnet"
	"github.com/agentlab-vm/agentlab/internal/qemuvm"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
	"github.com/agentlab-vm/agentlab/internal/vmdir"
)

// Name is the driver's name.
const Name = "lima"

// Config is the configuration of a Driver. StateDir, CacheDir, Runner and Images are
// required.
type Config struct {
	StateDir string // sandboxes and instances are stored in StateDir/lima
	CacheDir string // initrds and the KVM verdict; may be emptied at any time
	Runner   string // path of the agent-runner binary, which becomes the guest's /init

	// Images returns an image by the reference of a Spec. Code not_found
	// means that there is no such image.
	Images func(ctx context.Context, ref string) (vmdir.ImageFiles, error)

	Limactl string       // path or name of limactl; "" means that name
	QEMU    string       // path or name of qemu-system-x86_64; "" means that name
	Accel   qemuvm.Accel // "" means auto

	Supervisor []string // command to which a sandbox's directory is appended; nil means this program with "vmm"
	Wrapper    []string // command to which QEMU's arguments are appended; nil means this program with "helper lima"

	PauseBelow    uint64            // free bytes on the disk of StateDir below which guests are paused; 0: never by the driver
	Reserved      []uint16          // ports of this host that no policy can allow
	UpstreamProxy *gate.ProxyConfig // of the connections of sandboxes; nil means that they are dialled directly

	Now    func() time.Time // nil means time.Now
	Logger *slog.Logger     // nil means none
}

// Driver implements backend.Driver and the groups below.
type Driver struct {
	vmdir.Guests
	vmdir.Volumes
	cfg  Config
	log  *slog.Logger
	host *qemuvm.Host
	rd   *qemuvm.Initrds

	set      vmdir.Set  // the sandboxes
	versions sync.Mutex // held while limactl is asked for its version
	known    struct {
		stamp   qemuvm.FileStamp
		version qemuvm.Version
	}
	bins sync.Mutex // held while bin and placeholder are made

	crash func(point string) // called at each crash point; tests set it
}

// at is called at points where the driver's process may die without harm.
func (d *Driver) at(point string) {
	if d.crash != nil {
		d.crash(point)
	}
}

var (
	_ backend.Driver  = (*Driver)(nil)
	_ backend.Power   = (*Driver)(nil)
	_ backend.Net     = (*Driver)(nil)
	_ backend.Console = (*Driver)(nil)
	_ backend.Volumes = (*Driver)(nil)
	_ backend.Host    = (*Driver)(nil)
)

// New returns a Driver. It creates the driver's directories.
func New(cfg Config) (*Driver, error) {
	for field, v := range map[string]string{"StateDir": cfg.StateDir, "CacheDir": cfg.CacheDir, "Runner": cfg.Runner} {
		if !filepath.IsAbs(v) {
			return nil, agentlab.Errorf(agentlab.CodeInvalid, "%q is not an absolute path", v).WithField(field)
		}
	}
	if cfg.Images == nil {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "missing").WithField("Images")
	}
	if cfg.Accel == "" {
		cfg.Accel = qemuvm.AccelAuto
	}
	if !slices.Contains(qemuvm.Accels, cfg.Accel) {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "%q is not auto, kvm or tcg", cfg.Accel).WithField("accel")
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	self, err := os.Executable()
	if err != nil {
		return nil, vmdir.Fault(err, "cannot find the path of this program")
	}
	if len(cfg.Supervisor) == 0 {
		cfg.Supervisor = []string{self, "vmm"}
	}
	if len(cfg.Wrapper) == 0 {
		cfg.Wrapper = []string{self, "helper", Name}
	}
	d := &Driver{cfg: cfg, log: cfg.Logger, set: vmdir.Set{Root: filepath.Join(cfg.StateDir, "lima", "sandboxes")}}
	d.Guests.From = source{d}
	d.Volumes = vmdir.Volumes{
		Driver: Name, Root: filepath.Join(d.home(), limaDisks), Disk: limaDataDisk, Disks: disks{d}, Set: &d.set, Boxes: disks{d}, Now: cfg.Now, At: d.at,
	}
	d.host = qemuvm.NewHost(qemuvm.HostConfig{QEMU: cfg.QEMU, Key: "lima.binary", CacheDir: cfg.CacheDir, Accel: cfg.Accel, Logger: d.log})
	d.rd = qemuvm.NewInitrds(filepath.Join(cfg.CacheDir, "initrd"), cfg.Runner)
	for _, dir := range []string{d.set.Root, d.home(), cfg.CacheDir} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, vmdir.Fault(err, "cannot create %s", dir)
		}
	}
	return d, nil
}

// supervised returns the supervisor's view of a sandbox's directory.
func (d *Driver) supervised(f vmdir.Found) supervisor.Dir {
	return supervisor.Dir{Path: f.Dir, VMID: f.VMID, Process: processName, Log: d.log, At: d.at, StartPatience: startPatience}
}

// source is the driver for vmdir.Guests.
type source struct{ *Driver }

// Supervised implements vmdir.Source.
func (s source) Supervised(ref backend.Ref) (supervisor.Dir, error) {
	f, err := s.set.Load(ref)
	return s.supervised(f), err
}

// Info implements backend.Driver.
func (d *Driver) Info() backend.Info {
	gw := vnet.DefaultGateway.String()
	return backend.Info{
		Name: Name, Version: strconv.Itoa(vmdir.Version),
		Capabilities:  backend.Capabilities{NetworkOff: true, Allowlist: true, Private: true, VolumeHotplug: true, Deadlines: true, EgressRecords: true},
		ControllerURL: "http://" + gw + ":" + strconv.Itoa(backend.ControllerPort),
		UploadURL:     "http://" + gw + ":" + strconv.Itoa(backend.UploadPort) + "/upload",
		GuestNetwork: &guestapi.Network{
			Address: vnet.DefaultGuest.String() + "/24", Gateway: gw, DNS: []string{gw}, MTU: qemuvm.GuestMTU,
			Address6: vnet.DefaultGuest6.String() + "/64", Gateway6: vnet.DefaultGateway6.String(),
		},
	}
}

// Validate implements backend.Driver.
func (d *Driver) Validate(spec backend.Spec) error {
	if err := spec.CheckVM(); err != nil {
		return err
	}
	if err := d.Info().CheckSpec(spec); err != nil {
		return err
	}
	if spec.From != nil {
		return agentlab.Errorf(agentlab.CodeUnsupported, "Lima's instances cannot be copied from a snapshot").WithField("from").
			WithHint("use a backend with snapshots: 'agentlab backend list'")
	}
	return vmdir.CheckNetwork(Name, spec.Network)
}

// Close implements backend.Driver.
func (d *Driver) Close() error { return nil }

// open locks a sandbox whose Create is complete, for a method that changes it.
func (d *Driver) open(ctx context.Context, ref backend.Ref) (f vmdir.Found, unlock func(), err error) {
	if unlock, err = d.set.Begin(ctx, ref); err != nil {
		return f, nil, err
	}
	if f, err = d.set.Load(ref); err != nil {
		unlock()
	}
	return f, unlock, err
}

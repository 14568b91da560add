package qemu

import (
	"cmp"
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/egress/gate"
	"github.com/agentlab-vm/agentlab/internal/egress/vnet"
	"github.com/agentlab-vm/agentlab/internal/lazyre"
	"github.com/agentlab-vm/agentlab/internal/qemuvm"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
	"github.com/agentlab-vm/agentlab/internal/vmdir"
)

// Name is the driver's name.
const Name = "qemu"

// Config is the configuration of a Driver. StateDir, CacheDir, Runner and Images
// are required.
type Config struct {
	StateDir string // sandboxes are stored in StateDir/sandboxes, snapshots in StateDir/snapshots
	CacheDir string // initrds and the KVM verdict; may be emptied at any time
	Runner   string // path of the agent-runner binary, which becomes the guest's /init

	// Images returns an image by the reference of a Spec. Code not_found
	// means that there is no such image.
	Images func(ctx context.Context, ref string) (vmdir.ImageFiles, error)

	Supervisor []string     // command to which a sandbox's directory is appended; nil means this program with "vmm"
	Accel      qemuvm.Accel // "" means auto

	QEMU    string // path or name of qemu-system-x86_64; "" means that name
	QEMUImg string // path or name of qemu-img; "" means that name

	// TemplateBytes is how much templates may occupy on the disk of StateDir. 0
	// means that no templates are made, and every sandbox boots.
	TemplateBytes int64
	// TemplateDir is the directory of templates, on the file system of StateDir;
	// "" is StateDir/templates. Drivers may share it.
	TemplateDir string

	// PauseBelow is the free space on the disk of StateDir, in bytes, below which
	// running guests that write are paused; below half of it all guests are
	// paused. 0 means that QEMU pauses a guest when no space is left.
	PauseBelow uint64

	// NoNested denies hardware virtualization to all guests.
	NoNested bool

	// Reserved lists the ports of this host that no policy can allow to a
	// sandbox started from now on.
	Reserved []uint16

	// UpstreamProxy is the proxy of the connections of sandboxes that are started
	// from now on; nil means that they are dialled directly.
	UpstreamProxy *gate.ProxyConfig

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
	tmpl *templates

	set vmdir.Set // the sandboxes

	crash func(point string) // called at each crash point; tests set it
}

// at is called at points where the driver's process may die without harm.
func (d *Driver) at(point string) {
	if d.crash != nil {
		d.crash(point)
	}
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
	if len(cfg.Supervisor) == 0 {
		self, err := os.Executable()
		if err != nil {
			return nil, fault(err, "cannot find the path of this program")
		}
		cfg.Supervisor = []string{self, "vmm"}
	}
	d := &Driver{cfg: cfg, log: cfg.Logger, set: vmdir.Set{Root: filepath.Join(cfg.StateDir, "sandboxes")}}
	d.Guests.From = source{d}
	d.Volumes = vmdir.Volumes{
		Driver: Name, Root: d.volumes(), Disk: fileRoot, Disks: disks{d}, Set: &d.set, Boxes: disks{d}, Now: cfg.Now, At: d.at,
	}
	d.host = qemuvm.NewHost(d.hostConfig())
	d.rd = qemuvm.NewInitrds(filepath.Join(cfg.CacheDir, dirInitrd), cfg.Runner)
	for _, dir := range []string{d.sandboxes(), cfg.CacheDir} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, fault(err, "cannot create %s", dir)
		}
	}
	d.tmpl = newTemplates(d, cmp.Or(cfg.TemplateDir, filepath.Join(cfg.StateDir, "templates")), cfg.TemplateBytes)
	if err := d.tmpl.sweep(); err != nil {
		d.tmpl.disable(err)
	}
	return d, nil
}

func (d *Driver) hostConfig() qemuvm.HostConfig {
	return qemuvm.HostConfig{
		QEMU: d.cfg.QEMU, QEMUImg: d.cfg.QEMUImg, Key: "qemu.binary", CacheDir: d.cfg.CacheDir, Accel: d.cfg.Accel,
		Logger: d.log,
	}
}

func (d *Driver) sandboxes() string { return d.set.Root }

// supervised returns the supervisor's view of a sandbox's directory.
func (d *Driver) supervised(f found) supervisor.Dir {
	return supervisor.Dir{Path: f.Dir, VMID: f.VMID, Process: processName, Log: d.log, At: d.at}
}

// Info implements backend.Driver.
func (d *Driver) Info() backend.Info {
	gw := vnet.DefaultGateway.String()
	return backend.Info{
		Name: Name, Version: strconv.Itoa(vmdir.Version),
		Capabilities: backend.Capabilities{NetworkOff: true, Allowlist: true, Private: true, KeptSnapshots: true, Forks: true, VolumeHotplug: true, AttachedVolumeSnapshots: true, SuspendToDisk: true, Deadlines: true, EgressRecords: true},
		Options:      profileOptions, OptionsOK: optionsOK,
		ControllerURL: "http://" + gw + ":" + strconv.Itoa(backend.ControllerPort),
		UploadURL:     "http://" + gw + ":" + strconv.Itoa(backend.UploadPort) + "/upload",
		GuestNetwork: &guestapi.Network{
			Address: vnet.DefaultGuest.String() + "/24", Gateway: gw, DNS: []string{gw}, MTU: qemuvm.GuestMTU,
			Address6: vnet.DefaultGuest6.String() + "/64", Gateway6: vnet.DefaultGateway6.String(),
		},
	}
}

// profileOptions are the profile keys of this backend.
var profileOptions = []backend.Option{{
	Path: "network.model", Name: "nic_model", Zero: "", Valid: lazyre.New(`^[a-z0-9-]{1,32}$`).MatchString, What: "the model of a network device",
}}

// optionsOK is backend.Info.OptionsOK.
func optionsOK(set agentlab.Options) error {
	var o struct {
		NICModel string `json:"nic_model"`
	}
	if err := set.Decode(&o); err != nil {
		return err
	}
	if o.NICModel != "" && o.NICModel != "virtio" {
		return agentlab.Errorf(agentlab.CodeUnsupported, "the only network device is virtio").WithField("network.model").WithHint("remove it")
	}
	return nil
}

// Validate implements backend.Driver.
func (d *Driver) Validate(spec backend.Spec) error {
	if err := spec.CheckVM(); err != nil {
		return err
	}
	if err := d.Info().CheckSpec(spec); err != nil {
		return err
	}
	return vmdir.CheckNetwork(Name, spec.Network)
}

// Close implements backend.Driver.
func (d *Driver) Close() error {
	d.tmpl.close()
	return nil
}

// open locks a sandbox whose Create is complete, for a method that changes it.
func (d *Driver) open(ctx context.Context, ref backend.Ref) (f found, unlock func(), err error) {
	if unlock, err = d.set.Begin(ctx, ref); err != nil {
		return f, nil, err
	}
	if f, err = d.load(ref); err != nil {
		unlock()
	}
	return f, unlock, err
}

// load finds a sandbox whose Create is complete.
func (d *Driver) load(ref backend.Ref) (found, error) {
	f, err := d.set.Load(ref)
	if err == nil && restoring(f.Dir) {
		return f, agentlab.Errorf(agentlab.CodeUnavailable, "the restoration of sandbox %d was interrupted", f.VMID).
			WithHint("restore it again, or destroy it")
	}
	return f, err
}

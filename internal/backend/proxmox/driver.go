package proxmox

import (
	"cmp"
	"context"
	"errors"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/hostos"
	"github.com/agentlab-vm/agentlab/internal/hostvirt"
	"github.com/agentlab-vm/agentlab/internal/link"
	"github.com/agentlab-vm/agentlab/internal/lock"
)

// Name is the driver's name.
const Name = "proxmox"

// Node is a node that sandboxes may run on.
type Node struct {
	Name      string
	Templates map[string]int // template VMs by image
	Host      Host           // its network; nil means that it runs no sandbox
	Local     bool           // the daemon runs on it, and writes snippets there
}

// Config is the configuration of a Driver.
type Config struct {
	StateDir  string // handles and the master key are in StateDir/proxmox
	Transport pve.Transport
	TokenID   string // of transport REST, for Check; "" over the shell
	Nodes     []Node // at least one

	// Sandboxes get numbers from First to Last. The driver never changes VMs
	// with other numbers.
	First, Last int

	Bridge             string
	Subnet4, Subnet6   netip.Prefix // Subnet6 is zero without IPv6
	Gateway4, Gateway6 netip.Addr   // the host's addresses on the bridge
	Nameserver         netip.Addr   // of guests; zero means Gateway4
	DHCP               bool         // guests get their address by DHCP

	FullClone bool
	Storage   string   // of full clones; "" means the template's
	Pool      string   // "" means none
	Firewall  bool     // firewall flag of network devices
	Models    []string // of network devices that sandboxes may have
	Model     string   // the default of Models; "" means virtio
	SSHKeys   []string // of users who may log in as agent: authorized_keys lines

	Remotes []io.Closer // hosts of Nodes to close with the driver

	// Settle is how long a call without a known answer may still arrive at the
	// node; 0 means 10 s.
	Settle time.Duration

	// BootID returns the boot ID of the daemon's node, on which sandboxes run;
	// nil means the kernel's.
	BootID func() string

	// Modules and CPUInfo describe the processor of the daemon's node; "" means the
	// kernel's files.
	Modules, CPUInfo string

	Poll   pve.Poll         // of tasks; zero means 500 ms, at most 5 s
	Now    func() time.Time // nil means time.Now
	Logger *slog.Logger     // nil means none
}

// Driver implements backend.Driver.
type Driver struct {
	cfg          Config
	log          *slog.Logger
	pve          *pve.Client
	dir          string
	master       []byte
	installation string

	cache     vmCache
	inventory inventory
	templates templateCache
	networks  networks

	locks       lock.Keyed[string] // by UID; held during a change of a sandbox
	volumeLocks lock.Keyed[string] // by UID of a volume; before locks
	claiming    sync.Mutex         // held while the number of a VM is chosen

	crash func(point string) // tests simulate a crash here; nil otherwise
}

// at marks a point at which the driver's process may die safely.
func (d *Driver) at(point string) {
	if d.crash != nil {
		d.crash(point)
	}
}

var (
	_ backend.Driver    = (*Driver)(nil)
	_ backend.Power     = (*Driver)(nil)
	_ backend.Net       = (*Driver)(nil)
	_ backend.Snapshots = (*Driver)(nil)
	_ backend.Volumes   = (*Driver)(nil)
	_ backend.Host      = (*Driver)(nil)
)

// New returns a Driver. It creates its directory and its master key, and makes
// no call, so that the daemon starts even if no node answers.
func New(cfg Config) (*Driver, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	cfg.Modules, cfg.CPUInfo = cmp.Or(cfg.Modules, hostvirt.Modules), cmp.Or(cfg.CPUInfo, hostvirt.CPUInfo)
	d := &Driver{cfg: cfg, log: cfg.Logger, dir: filepath.Join(cfg.StateDir, Name)}
	if err := os.MkdirAll(d.volumeDir(), 0o700); err != nil {
		return nil, fault(err, "cannot make %s", d.volumeDir())
	}
	var err error
	if d.master, err = link.KeyFile(filepath.Join(d.dir, "master.key")); err != nil {
		return nil, err
	}
	d.installation = installationID(d.master)
	d.pve = pve.New(cfg.Transport).WithPoll(cfg.Poll)
	return d, nil
}

func (c *Config) validate() error {
	bad := func(field, why string) error {
		return agentlab.Errorf(agentlab.CodeInvalid, "%s", why).WithField(field)
	}
	switch {
	case !filepath.IsAbs(c.StateDir):
		return bad("StateDir", "not an absolute path")
	case c.Transport == nil:
		return bad("Transport", "missing")
	case len(c.Nodes) == 0:
		return bad("proxmox.nodes", "missing")
	case c.First < 100 || c.Last < c.First || c.Last > 999999999:
		return bad("vmid_range", "not a range within 100 to 999999999")
	case c.Bridge == "":
		return bad("host_network.bridge", "missing")
	case !c.Subnet4.Contains(c.Gateway4) || c.Subnet6.IsValid() && !c.Subnet6.Contains(c.Gateway6):
		return bad("host_network.subnet", "the gateway is not in it")
	}
	if !c.Nameserver.IsValid() {
		c.Nameserver = c.Gateway4
	}
	if c.Model == "" {
		c.Model = "virtio"
	}
	if !slices.Contains(c.Models, c.Model) {
		return bad("proxmox.model", "not a supported network device model")
	}
	if c.BootID == nil {
		c.BootID = hostos.BootID // if it is "", restarts are not detected
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	if c.Settle == 0 {
		c.Settle = 10 * time.Second
	}
	if c.Poll == (pve.Poll{}) {
		c.Poll = pve.Poll{First: 500 * time.Millisecond, Max: 5 * time.Second}
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return nil
}

// Info implements backend.Driver.
func (d *Driver) Info() backend.Info {
	gw := d.cfg.Gateway4.String()
	reserved := []netip.Addr{d.cfg.Gateway4}
	limit := time.Duration(0)
	if d.cfg.TokenID == "" { // over the shell, each call starts a program
		limit = 3 * time.Minute
	}
	return backend.Info{
		CheckLimit: limit,
		Name:       Name, Version: strconv.Itoa(handleVersion),
		Capabilities:  backend.Capabilities{NetworkOff: true, Allowlist: true, Private: true, SharedNumbers: true},
		Options:       profileOptions,
		OptionsOK:     d.optionsOK,
		ConsoleHint:   "open the console of the VM in the web interface, or run 'qm terminal VMID' on its node",
		ControllerURL: "http://" + gw + ":" + strconv.Itoa(backend.ControllerPort),
		UploadURL:     "http://" + gw + ":" + strconv.Itoa(backend.UploadPort) + "/upload",
		Addresses:     &backend.AddressPool{IPv4: d.cfg.Subnet4, IPv6: d.cfg.Subnet6, Reserved: reserved},
	}
}

// Validate implements backend.Driver.
func (d *Driver) Validate(spec backend.Spec) error {
	if err := spec.CheckVM(); err != nil {
		return err
	}
	if spec.Resources.Cores > 128 {
		return agentlab.Errorf(agentlab.CodeUnsupported, "Proxmox VE limits the CPU time of a VM to 128 CPUs").WithField("resources.cores")
	}
	if err := d.Info().CheckOptions(spec.Options); err != nil {
		return err
	}
	if err := backend.CheckMode(Name, spec.Network); err != nil {
		return err
	}
	_, err := egress.New(spec.Network)
	return err
}

// validNumber rejects numbers outside of the range of sandboxes, and addresses
// that were not leased from the driver's network.
func (d *Driver) validNumber(spec backend.Spec) error {
	if err := d.checkNumber(spec.VMID); err != nil {
		return err
	}
	switch {
	case !spec.IPv4.Is4() || !d.cfg.Subnet4.Contains(spec.IPv4) || spec.IPv4 == d.cfg.Gateway4:
		return agentlab.Errorf(agentlab.CodeInvalid, "%s is not a sandbox address in %s", spec.IPv4, d.cfg.Subnet4).WithField("ipv4")
	case spec.IPv6.IsValid() != d.cfg.Subnet6.IsValid() || spec.IPv6.IsValid() && (!d.cfg.Subnet6.Contains(spec.IPv6) || spec.IPv6 == d.cfg.Gateway6):
		return agentlab.Errorf(agentlab.CodeInvalid, "%s is not a sandbox address in %s", spec.IPv6, d.cfg.Subnet6).WithField("ipv6")
	}
	return nil
}

// inRange is checkNumber without the reason.
func (d *Driver) inRange(vmid int) bool { return d.checkNumber(vmid) == nil }

// checkNumber returns an error for every number that is not a sandbox's.
func (d *Driver) checkNumber(vmid int) error {
	if vmid < d.cfg.First || vmid > d.cfg.Last {
		return agentlab.Errorf(agentlab.CodeDenied, "VM %d is not in the range of sandboxes, %d to %d", vmid, d.cfg.First, d.cfg.Last).WithField("vmid_range")
	}
	if d.isTemplate(vmid) {
		return agentlab.Errorf(agentlab.CodeExists, "%d is the number of a template", vmid).WithField("proxmox.templates")
	}
	return nil
}

// isTemplate reports whether a number is that of a configured template.
func (d *Driver) isTemplate(vmid int) bool {
	for _, n := range d.cfg.Nodes {
		for _, t := range n.Templates {
			if t == vmid {
				return true
			}
		}
	}
	return false
}

// node returns a node of the configuration.
func (d *Driver) node(name string) (*Node, error) {
	for i := range d.cfg.Nodes {
		if d.cfg.Nodes[i].Name == name {
			return &d.cfg.Nodes[i], nil
		}
	}
	return nil, agentlab.Errorf(agentlab.CodeUnavailable, "node %s is not listed in proxmox.nodes", name).
		WithField("proxmox.nodes").WithHint("move the VM back, or add the node to proxmox.nodes")
}

// Close implements backend.Driver.
func (d *Driver) Close() error {
	err := d.pve.Close()
	for _, r := range d.cfg.Remotes {
		err = errors.Join(err, r.Close())
	}
	return err
}

// lock waits for the sandbox's lock, which is local to this process.
func (d *Driver) lock(ctx context.Context, uid string) (unlock func(), err error) {
	if err := validUID(uid); err != nil {
		return nil, err
	}
	unlock, err = d.locks.Lock(ctx, uid)
	if err != nil {
		return nil, agentlab.Errorf(agentlab.CodeBusy, "the call was cancelled before it began: %w", err)
	}
	return unlock, nil
}

// absent returns the error for a sandbox that does not exist, even if a VM has
// its number.
func absent(uid string) error {
	return agentlab.Errorf(agentlab.CodeNotFound, "sandbox %s has no VM", uid)
}

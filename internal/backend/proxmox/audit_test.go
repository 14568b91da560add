package proxmox

import (
	"errors"
	"maps"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/backend/proxmox/pve"
)

const uid1, uid2 = "abcdefghijkmnpqrstuvwxyz23", "bbcdefghijkmnpqrstuvwxyz23"

// plain is a driver that is not opened: for what makes no call.
func plain() *Driver {
	return &Driver{installation: "0123456789abcdef", cfg: Config{
		Bridge: "vmbr1", Model: "virtio", First: 1000, Last: 1999, Now: time.Now,
		Subnet4: netip.MustParsePrefix("10.77.0.0/16"), Gateway4: netip.MustParseAddr("10.77.0.1"), Nameserver: netip.MustParseAddr("10.77.0.1"),
		Subnet6: netip.MustParsePrefix("fd77::/64"), Gateway6: netip.MustParseAddr("fd77::1"),
	}}
}

func aHandle() *handle {
	return &handle{MAC: macOf(uid1, 0).String(), Spec: backend.Spec{
		VMID: 1001, UID: uid1, Name: "sb-1", Resources: agentlab.Resources{Cores: 2, MemoryMB: 1024},
		IPv4: netip.MustParseAddr("10.77.3.4"), IPv6: netip.MustParseAddr("fd77::a4d:304"),
	}}
}

// good is the configuration of a sandbox as a node tells it.
func good() pve.Config {
	return pve.Config{
		"agent": "enabled=1", "boot": "order=scsi0", "ciupgrade": "0", "ciuser": "agent", "cores": "2", "cpulimit": "2", "balloon": "0",
		"description": description(vmID{VMID: 1001, UID: uid1}, "0123456789abcdef"),
		"digest":      "da39a3ee", "ide2": "local-zfs:vm-1001-cloudinit,media=cdrom,size=4M",
		"ipconfig0": "gw=10.77.0.1,ip=10.77.3.4/16,ip6=fd77::a4d:304/64,gw6=fd77::1", "memory": "1024",
		"meta": "creation-qemu=9.0.2,ctime=1", "name": "sb-1", "nameserver": "10.77.0.1",
		"net0": "virtio=" + "BC:24:11" + upper(macOf(uid1, 0).String()[8:]) + ",bridge=vmbr1", "ostype": "l26", "onboot": "0",
		"scsi0":  "local-zfs:base-9000-disk-0/vm-1001-disk-0,size=20G,discard=on",
		"scsihw": "virtio-scsi-single", "serial0": "socket", "smbios1": "uuid=x", "tags": "agentlab;al-" + uid1, "vga": "serial0", "vmgenid": "x",
	}
}

func upper(s string) string {
	b := []byte(s)
	for i, c := range b {
		if c >= 'a' && c <= 'f' {
			b[i] = c - 32
		}
	}
	return string(b)
}

func TestAuditAcceptsExpectedConfig(t *testing.T) {
	d, h := plain(), aHandle()
	if err := audit(good(), d.wanted(h), 1001); err != nil {
		t.Fatal(err)
	}
	for key, value := range map[string]string{
		"scsi0":   "local:9000/base-9000-disk-0.qcow2/1001/vm-1001-disk-0.qcow2,size=20G",
		"unused0": "local-zfs:vm-1001-disk-3", "parent": "snap1", "rng0": "source=/dev/urandom", "cpu": "x86-64-v2-AES",
		"efidisk0": "local-zfs:vm-1001-disk-1,efitype=4m,pre-enrolled-keys=1,size=1M", "ide3": "none,media=cdrom", "onboot": "",
	} {
		cfg := good()
		cfg[key] = value
		if err := audit(cfg, d.wanted(h), 1001); err != nil {
			t.Errorf("%s=%s: %v", key, value, err)
		}
	}
}

// Whatever gives the guest a way to the host, to another VM's disk or to
// another network keeps it from being started.
func TestAuditRefuses(t *testing.T) {
	d, h := plain(), aHandle()
	for _, c := range []struct{ key, value string }{
		{"args", "-drive file=/etc/shadow"}, {"hookscript", "local:snippets/x.sh"}, {"hostpci0", "0000:01:00.0"}, {"usb0", "host=1-1"},
		{"virtiofs0", "home,cache=auto"}, {"net1", "virtio=BC:24:11:00:00:01,bridge=vmbr0"}, {"serial1", "/dev/ttyS0"}, {"serial0", "/dev/ttyS0"},
		{"parallel0", "/dev/parport0"}, {"ivshmem", "size=32"}, {"audio0", "device=intel-hda"}, {"scsi1", "local-zfs:vm-1001-disk-1"},
		{"scsi0", "/dev/sda"}, {"scsi0", "local-zfs:vm-1002-disk-0"}, {"scsi0", "local:9000/base.qcow2/1002/vm-1001-disk-0.qcow2"},
		{"scsi0", "local-zfs:vm-1001-disk-0,media=cdrom"}, {"scsi0", "file=/dev/sdb"}, {"ide0", "local:iso/debian.iso,media=cdrom"},
		{"ide2", "local-zfs:vm-1002-cloudinit,media=cdrom"}, {"tpmstate0", "local-zfs:vm-1001-disk-2"}, {"cicustom", "user=local:snippets/other.yaml"},
		{"net0", "virtio=BC:24:11:00:00:01,bridge=vmbr1"}, {"net0", "virtio=" + h.MAC + ",bridge=vmbr0"},
		{"net0", "virtio=" + h.MAC + ",bridge=vmbr1,tag=7"}, {"ipconfig0", "ip=10.77.3.5/16,gw=10.77.0.1"}, {"nameserver", "192.168.1.1"},
		{"protection", "1"}, {"onboot", "1"}, {"template", "1"}, {"tags", "agentlab;al-" + uid2}, {"description", "mine"}, {"name", "other"},
		{"cipassword", "**********"}, {"sshkeys", "ssh-ed25519%20AAAA"}, {"affinity", "0-3"}, {"memory", "4096"}, {"cores", "8"}, {"sockets", "2"},
		{"startup", "order=1"}, {"searchdomain", "lan"}, {"vga", "std,clipboard=vnc"}, {"rng0", "source=/dev/hwrng"}, {"machine", "type=q35,viommu=intel"},
		{"lock", "backup"}, {"hugepages", "1024"}, {"amd-sev", "type=std"}, {"spice_enhancements", "foldersharing=1"},
		{"never-heard-of", "1"}, {"net0", ""}, {"tags", ""},
	} {
		cfg := good()
		if cfg[c.key] = c.value; c.value == "" {
			delete(cfg, c.key)
		}
		err := audit(cfg, d.wanted(h), 1001)
		if e, ok := errors.AsType[*agentlab.Error](err); !ok || e.Code != agentlab.CodeDenied || e.Field != c.key && c.key != "scsi0" {
			t.Errorf("%s=%s: %v", c.key, c.value, err)
		}
	}
}

// Trap 18: protection, onboot, tags, cicustom, hookscript, args and more come
// along with a clone. Without this a protected template gives sandboxes that
// cannot be destroyed, and a hookscript of the template runs for each of them.
func TestTrap18InheritedOptionsGo(t *testing.T) {
	d, h := plain(), aHandle()
	inherited := good()
	maps.Copy(inherited, pve.Config{
		"protection": "1", "onboot": "1", "hookscript": "local:snippets/x", "args": "-x", "cicustom": "vendor=local:snippets/v", "affinity": "0",
		"startup": "order=1", "cipassword": "*", "sshkeys": "k", "net1": "virtio,bridge=vmbr0", "hostpci0": "1", "usb0": "spice", "virtiofs0": "x",
		"searchdomain": "lan", "cpuunits": "10", "sockets": "4", "vcpus": "1", "template": "1", "unused0": "local-zfs:vm-9000-disk-9", "parent": "s",
		"never-heard-of": "1", "tpmstate0": "x", "watchdog": "i6300esb", "citype": "configdrive2",
	})
	ch := changes(inherited, d.wanted(h))
	after := maps.Clone(inherited)
	delete(after, "template") // Proxmox does that
	delete(after, "unused0")
	maps.Copy(after, ch.Set)
	for _, key := range ch.Delete {
		delete(after, key)
	}
	if err := audit(after, d.wanted(h), 1001); err != nil {
		t.Error(err)
	}
	if ch.Set["protection"] != "0" || ch.Set["onboot"] != "0" {
		t.Errorf("protection %q, onboot %q", ch.Set["protection"], ch.Set["onboot"])
	}
}

// Trap 24: an address of ip=dhcp with a gateway gives a guest without any
// network, and none at all gives none either.
func TestTrap24DHCPWithoutGateway(t *testing.T) {
	d, h := plain(), aHandle()
	d.cfg.DHCP = true
	if got := d.wanted(h)["ipconfig0"]; got != "ip=dhcp,ip6=fd77::a4d:304/64,gw6=fd77::1" {
		t.Error(got)
	}
	d.cfg.DHCP, h.Spec.IPv6 = false, netip.Addr{}
	if got := d.wanted(h)["ipconfig0"]; got != "ip=10.77.3.4/16,gw=10.77.0.1" {
		t.Error(got)
	}
}

// Trap 25: net0 without its MAC gets another one with each change, and with
// it go the DHCP lease and every rule that names it.
func TestTrap25MAC(t *testing.T) {
	d, h := plain(), aHandle()
	if net := d.wanted(h)["net0"]; net != "virtio="+upper(h.MAC)+",bridge=vmbr1" {
		t.Errorf("net0 %s", net)
	}
}

// Trap 26: firewall=1 moves the port off the tap device, where our rules would
// then miss it. By itself it does nothing: a rule must be enabled, and so must
// the VM's firewall.
func TestTrap26Firewall(t *testing.T) {
	for firewall, want := range map[bool]string{false: "tap1001i0", true: "fwpr1001p0"} {
		if p := portOf(1001, firewall); p != want {
			t.Errorf("port %s, want %s", p, want)
		}
	}
	w := newWorld(t, worldConfig{})
	spec := w.spec(1)
	spec.Options = `{"firewall_group":"agents"}`
	w.firewall(t, "agents")
	ok(t, "Create", w.driver.Create(t.Context(), spec))
	root := pve.New(w.root)
	cfg, err := root.Config(t.Context(), w.node.Name(), spec.VMID)
	ok(t, "config", err)
	if on, _ := pve.ParseProps(cfg["net0"]).Get("firewall"); on != "1" {
		t.Errorf("net0 is %s", cfg["net0"])
	}
	rules, err := root.FirewallRules(t.Context(), w.node.Name(), spec.VMID)
	ok(t, "rules", err)
	if len(rules) != 1 || rules[0].Type != "group" || rules[0].Action != "agents" || !bool(rules[0].Enable) {
		t.Errorf("rules: %+v", rules)
	}
	data, err := w.root.Call(t.Context(), pve.Get, w.vmPath(spec.VMID)+"/firewall/options", nil)
	if err != nil || !strings.Contains(string(data), `"enable":1`) {
		t.Errorf("options: %s, %v", data, err)
	}
	if h, err := w.driver.readHandle(spec.Ref()); err != nil || h.Port != "fwpr1001p0" {
		t.Errorf("%+v, %v", h, err)
	}
	ok(t, "Start", w.driver.Start(t.Context(), spec.Ref()))
}

// Trap 27: ciupgrade is on unless it is off: every first boot would upgrade.
func TestTrap27NoUpgrade(t *testing.T) {
	if got := plain().wanted(aHandle())["ciupgrade"]; got != "0" {
		t.Errorf("ciupgrade %s", got)
	}
}

// Only a VM with both marks is ours.
func TestOwnershipTags(t *testing.T) {
	d := plain()
	ref := vmID{VMID: 1001, UID: uid1}
	cloning := pve.Config{"lock": "clone", "description": description(ref, d.installation), "name": "sb-1", "tags": "golden"}
	for what, c := range map[string]struct {
		cfg  pve.Config
		ours bool
	}{
		"complete":                    {good(), true},
		"being cloned":                {cloning, true},
		"its name agrees":             {with(good(), "tags", "golden"), true},
		"neither tag nor name":        {with(with(good(), "tags", "golden"), "name", "x"), false},
		"no description":              {with(good(), "description", ""), false},
		"another mark":                {with(good(), "description", description(vmID{UID: uid2}, d.installation)), false},
		"another installation":        {with(good(), "description", description(ref, "ffffffffffffffff")), false},
		"two marks":                   {with(good(), "description", description(ref, d.installation)+markUID+uid2), false},
		"a template":                  {with(good(), "template", "1"), false},
		"our name, nothing else":      {pve.Config{"name": "sb-1"}, false},
		"our tag, nothing else":       {pve.Config{"name": "sb-1", "tags": "agentlab;al-" + uid1}, false},
		"another user's clone begins": {pve.Config{"lock": "clone", "description": "qmclone temporary file\n"}, false},
	} {
		if got := d.ours(c.cfg, ref, "sb-1"); got != c.ours {
			t.Errorf("%s: %v, want %v", what, got, c.ours)
		}
	}
}

func with(cfg pve.Config, key, value string) pve.Config { cfg[key] = value; return cfg }

// Traps 1 and 2: whose a volume is, its name alone tells.
func TestTrap01VolumeOwner(t *testing.T) {
	for volid, want := range map[string]int{
		"local-zfs:vm-1001-disk-0": 1001, "local-zfs:base-9000-disk-0/vm-1001-disk-0": 1001, "local-zfs:base-9000-disk-0": 9000,
		"local-zfs:vm-1001-agentlab-ws": 1001, "local:1001/vm-1001-disk-0.qcow2": 1001, "local:9000/base-9000-disk-0.raw/1001/vm-1001-disk-0.qcow2": 1001,
		"local:1002/vm-1001-disk-0.qcow2": 1002, "local:iso/debian.iso": 0, "local:snippets/x.yaml": 0, "none": 0, "/dev/sda": 0,
	} {
		if got := volumeOwner(volid); got != want {
			t.Errorf("%s: %d, want %d", volid, got, want)
		}
	}
}

func TestDriveSize(t *testing.T) {
	for value, want := range map[string]int64{
		"x:y,size=20G": 20 << 30, "x:y,size=128M": 128 << 20, "x:y,size=4T": 4 << 40, "x:y,size=512K": 512 << 10, "x:y": 0, "x:y,size=-1G": 0, "x:y,size=": 0,
	} {
		if got := driveSize(value); got != want {
			t.Errorf("%s: %d, want %d", value, got, want)
		}
	}
}

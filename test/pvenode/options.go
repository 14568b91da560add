package pvenode

import (
	"regexp"
	"strconv"
	"strings"
)

// optionGroup is the privilege that setting an option needs beside the
// special ones.
type optionGroup int

const (
	grpRoot optionGroup = iota // root@pam alone
	grpCPU
	grpMemory
	grpHWType
	grpDisk
	grpNetwork
	grpOptions
	grpCloudinit
	grpPower
	grpStartup // Sys.Modify on /
	grpSpecial // judged by its value
)

// option is one key of a VM's configuration.
type option struct {
	param
	group optionGroup
	// hot means that a change is applied to a running VM.
	hot bool
	// props is the format of a property string.
	props *propFormat
	// internal options cannot be set by a call.
	internal bool
}

// numbered options are a stem and how many there are.
type numbered struct {
	option
	count int
}

var driveBase = []param{
	{name: "file", need: true, format: formatDriveFile}, {name: "media", enum: []string{"cdrom", "disk"}},
	{name: "snapshot", kind: kBool}, {name: "cache", enum: []string{"none", "writethrough", "writeback", "unsafe", "directsync"}},
	{name: "format", enum: []string{"raw", "qcow", "qed", "qcow2", "vmdk", "cloop"}},
	{name: "size"}, {name: "backup", kind: kBool}, {name: "replicate", kind: kBool},
	{name: "rerror", enum: []string{"ignore", "report", "stop"}}, {name: "werror", enum: []string{"enospc", "ignore", "report", "stop"}},
	{name: "aio", enum: []string{"native", "threads", "io_uring"}}, {name: "discard", enum: []string{"ignore", "on"}},
	{name: "detect_zeroes", kind: kBool}, {name: "serial", maxLen: 60, format: formatURLEncoded}, {name: "shared", kind: kBool},
	{name: "import-from"},
	{name: "bps", kind: kInt}, {name: "bps_rd", kind: kInt}, {name: "bps_wr", kind: kInt},
	{name: "mbps", kind: kNum}, {name: "mbps_rd", kind: kNum}, {name: "mbps_wr", kind: kNum},
	{name: "mbps_max", kind: kNum}, {name: "mbps_rd_max", kind: kNum}, {name: "mbps_wr_max", kind: kNum},
	{name: "iops", kind: kInt}, {name: "iops_rd", kind: kInt}, {name: "iops_wr", kind: kInt},
	{name: "iops_max", kind: kInt}, {name: "iops_rd_max", kind: kInt}, {name: "iops_wr_max", kind: kInt},
	{name: "bps_max_length", kind: kInt, min: f64(1)}, {name: "bps_rd_max_length", kind: kInt, min: f64(1)}, {name: "bps_wr_max_length", kind: kInt, min: f64(1)},
	{name: "iops_max_length", kind: kInt, min: f64(1)}, {name: "iops_rd_max_length", kind: kInt, min: f64(1)}, {name: "iops_wr_max_length", kind: kInt, min: f64(1)},
}

func driveProps(extra ...param) *propFormat {
	return &propFormat{def: "file", alias: map[string]string{"volume": "file"}, props: append(append([]param{}, driveBase...), extra...)}
}

var (
	wwn      = param{name: "wwn", pattern: regexp.MustCompile(`^(0x)[0-9a-fA-F]{16}`)}
	iothread = param{name: "iothread", kind: kBool}
	ssd      = param{name: "ssd", kind: kBool}
	readonly = param{name: "ro", kind: kBool}

	ideProps    = driveProps(param{name: "model"}, ssd, wwn)
	scsiProps   = driveProps(iothread, ssd, readonly, wwn, param{name: "queues", kind: kInt, min: f64(2)}, param{name: "scsiblock", kind: kBool}, param{name: "product", maxLen: 16}, param{name: "vendor", maxLen: 8})
	sataProps   = driveProps(ssd, wwn)
	virtioProps = driveProps(iothread, readonly)
	efiProps    = driveProps(param{name: "efitype", enum: []string{"2m", "4m"}}, param{name: "pre-enrolled-keys", kind: kBool})
	tpmProps    = driveProps(param{name: "version", enum: []string{"v1.2", "v2.0"}})
)

var nicModels = []string{
	"e1000", "e1000-82540em", "e1000-82544gc", "e1000-82545em", "e1000e", "i82551", "i82557b", "i82559er",
	"ne2k_isa", "ne2k_pci", "pcnet", "rtl8139", "virtio", "vmxnet3",
}

var netProps = &propFormat{def: "model", models: nicModels, props: []param{
	{name: "model", need: true, enum: nicModels}, {name: "macaddr", format: formatMAC},
	{name: "bridge", format: func(_ *Node, s string) string {
		if !bridgeRe.MatchString(s) {
			return "invalid bridge ID '" + s + "'\n"
		}
		return ""
	}},
	{name: "queues", kind: kInt, min: f64(0), max: f64(64)}, {name: "rate", kind: kNum, min: f64(0)},
	{name: "tag", kind: kInt, min: f64(1), max: f64(4094)}, {name: "trunks", pattern: regexp.MustCompile(`^\d+(?:-\d+)?(?:;\d+(?:-\d+)?)*$`)},
	{name: "firewall", kind: kBool}, {name: "link_down", kind: kBool}, {name: "mtu", kind: kInt, min: f64(1), max: f64(65520)}, {name: "host-tunnel", kind: kBool, only9: true},
}}

var (
	ipconfigProps = &propFormat{props: []param{
		{name: "ip", format: formatIPv4Config}, {name: "gw", format: formatIPv4, requires: "ip"},
		{name: "ip6", format: formatIPv6Config}, {name: "gw6", format: formatIPv6, requires: "ip6"},
	}}
	agentProps = &propFormat{def: "enabled", props: []param{
		{name: "enabled", kind: kBool, need: true}, {name: "fstrim_cloned_disks", kind: kBool}, {name: "freeze-fs-on-backup", kind: kBool},
		{name: "guest-fsfreeze", kind: kBool, only9: true}, {name: "freeze-fs", kind: kBool, only9: true}, {name: "type", enum: []string{"virtio", "isa"}},
	}}
	memoryProps   = &propFormat{def: "current", props: []param{{name: "current", kind: kInt, need: true, min: f64(16)}}}
	cicustomProps = &propFormat{props: []param{
		{name: "meta", format: formatVolid}, {name: "network", format: formatVolid}, {name: "user", format: formatVolid}, {name: "vendor", format: formatVolid},
	}}
	bootProps = &propFormat{def: "legacy", props: []param{{name: "legacy", pattern: regexp.MustCompile(`^[acdn]{1,4}$`)}, {name: "order", format: formatBootOrder}}}
	vgaProps  = &propFormat{def: "type", props: []param{
		{name: "type", enum: []string{"cirrus", "qxl", "qxl2", "qxl3", "qxl4", "none", "serial0", "serial1", "serial2", "serial3", "std", "virtio", "virtio-gl", "vmware"}},
		{name: "memory", kind: kInt, min: f64(4), max: f64(512)}, {name: "clipboard", enum: []string{"vnc"}},
	}}
	machineProps = &propFormat{def: "type", props: []param{
		{name: "type", maxLen: 40, pattern: regexp.MustCompile(`^(pc|pc(-i440fx)?-\d+(\.\d+)+(\+pve\d+)?(\.pxe)?|q35|pc-q35-\d+(\.\d+)+(\+pve\d+)?(\.pxe)?|virt(?:-\d+(\.\d+)+)?(\+pve\d+)?)$`)},
		{name: "viommu", enum: []string{"intel", "virtio"}}, {name: "aw-bits", kind: kNum, min: f64(32), max: f64(64), only9: true},
		{name: "enable-s3", kind: kBool}, {name: "enable-s4", kind: kBool},
	}}
	cpuProps = &propFormat{def: "cputype", props: []param{
		{name: "cputype", format: formatCPUType}, {name: "reported-model"}, {name: "hidden", kind: kBool},
		{name: "hv-vendor-id", pattern: regexp.MustCompile(`^[a-zA-Z0-9]{1,12}$`)}, {name: "flags", pattern: regexp.MustCompile(`^[+-][a-zA-Z0-9\-_.]+(;[+-][a-zA-Z0-9\-_.]+)*$`)},
		{name: "phys-bits", pattern: regexp.MustCompile(`^(host|\d{1,2})$`)}, {name: "guest-phys-bits", kind: kInt, only9: true},
	}}
	base64Re    = regexp.MustCompile(`^[A-Za-z0-9+/]+={0,2}$`)
	smbiosProps = &propFormat{props: []param{
		{name: "uuid", pattern: regexp.MustCompile(`^[a-fA-F0-9]{8}(?:-[a-fA-F0-9]{4}){3}-[a-fA-F0-9]{12}$`)}, {name: "version", pattern: base64Re}, {name: "serial", pattern: base64Re},
		{name: "manufacturer", pattern: base64Re}, {name: "product", pattern: base64Re}, {name: "sku", pattern: base64Re}, {name: "family", pattern: base64Re}, {name: "base64", kind: kBool},
	}}
	startupRe = regexp.MustCompile(`^(order=)?\d*(,?(up|down)=\d+)*$`)
)

func opt(name string, k kind, g optionGroup) option {
	return option{param: param{name: name, kind: k}, group: g}
}

func (o option) asHot() option            { o.hot = true; return o }
func (o option) asInternal() option       { o.internal = true; return o }
func (o option) len(n int) option         { o.maxLen = n; return o }
func (o option) in(enum ...string) option { o.enum = enum; return o }
func (o option) between(lo, hi float64) option {
	o.min, o.max = f64(lo), f64(hi)
	return o
}
func (o option) atLeast(lo float64) option { o.min = f64(lo); return o }
func (o option) as(format func(*Node, string) string) option {
	o.format = format
	return o
}

func (o option) of(f *propFormat) option {
	o.props = f
	return o
}

// plainOptions are those that there is one of.
var plainOptions = []option{
	opt("onboot", kBool, grpOptions).asHot(), opt("autostart", kBool, grpOptions), opt("hotplug", kString, grpHWType), opt("reboot", kBool, grpOptions),
	opt("lock", kString, grpRoot).asHot().in("backup", "clone", "create", "migrate", "rollback", "snapshot", "snapshot-delete", "suspending", "suspended"),
	opt("cpulimit", kNum, grpCPU).asHot().between(0, 128), opt("cpuunits", kInt, grpCPU).asHot().between(1, 262144),
	opt("memory", kString, grpMemory).of(memoryProps), opt("balloon", kInt, grpMemory).asHot().atLeast(0), opt("shares", kInt, grpMemory).asHot().between(0, 50000),
	opt("keyboard", kString, grpOptions), opt("name", kString, grpOptions).asHot().as(formatDNSName),
	opt("scsihw", kString, grpHWType).in("lsi", "lsi53c810", "virtio-scsi-pci", "virtio-scsi-single", "megasas", "pvscsi"),
	opt("description", kString, grpOptions).asHot().len(8192),
	opt("ostype", kString, grpOptions).in("other", "wxp", "w2k", "w2k3", "w2k8", "wvista", "win7", "win8", "win10", "win11", "l24", "l26", "solaris"),
	opt("boot", kString, grpDisk).of(bootProps), opt("bootdisk", kString, grpDisk), opt("smp", kInt, grpCPU).atLeast(1),
	opt("sockets", kInt, grpCPU).atLeast(1), opt("cores", kInt, grpCPU).atLeast(1), opt("numa", kBool, grpCPU), opt("vcpus", kInt, grpCPU).atLeast(1),
	opt("hugepages", kString, grpRoot).in("any", "2", "1024"), opt("keephugepages", kBool, grpRoot),
	opt("acpi", kBool, grpHWType), opt("agent", kString, grpOptions).of(agentProps), opt("kvm", kBool, grpHWType),
	opt("tdf", kBool, grpOptions), opt("localtime", kBool, grpOptions), opt("freeze", kBool, grpPower),
	opt("vga", kString, grpHWType).of(vgaProps), opt("watchdog", kString, grpHWType), opt("startdate", kString, grpOptions),
	{param: param{name: "startup", pattern: startupRe}, group: grpStartup, hot: true},
	opt("template", kBool, grpOptions), opt("args", kString, grpRoot), opt("tablet", kBool, grpHWType).asHot(),
	opt("migrate_speed", kInt, grpOptions).asHot().atLeast(0), opt("migrate_downtime", kNum, grpOptions).asHot().atLeast(0),
	opt("cpu", kString, grpCPU).of(cpuProps), opt("machine", kString, grpHWType).of(machineProps), opt("arch", kString, grpRoot).in("x86_64", "aarch64"),
	opt("smbios1", kString, grpHWType).of(smbiosProps).len(512), opt("protection", kBool, grpOptions).asHot(), opt("bios", kString, grpOptions).in("seabios", "ovmf"),
	{param: param{name: "vmgenid", pattern: regexp.MustCompile(`^(?:[a-fA-F0-9]{8}(?:-[a-fA-F0-9]{4}){3}-[a-fA-F0-9]{12}|[01])$`)}, group: grpRoot},
	opt("hookscript", kString, grpRoot).asHot().as(formatVolid), opt("ivshmem", kString, grpRoot), opt("audio0", kString, grpHWType), opt("spice_enhancements", kString, grpRoot),
	opt("tags", kString, grpSpecial).asHot().as(formatTags), opt("rng0", kString, grpHWType), opt("affinity", kString, grpRoot).as(formatCPUSet),
	opt("vmstatestorage", kString, grpDisk).asHot().as(formatStorageID), opt("amd-sev", kString, grpRoot),
	opt("meta", kString, grpRoot).asInternal(), opt("parent", kString, grpRoot).asInternal(), opt("snaptime", kInt, grpRoot).asInternal(),
	opt("vmstate", kString, grpRoot).asInternal(), opt("runningmachine", kString, grpRoot).asInternal(), opt("runningcpu", kString, grpRoot).asInternal(),
	{param: param{name: "allow-ksm", kind: kBool, only9: true}, group: grpMemory}, {param: param{name: "intel-tdx", only9: true}, group: grpRoot},
	opt("citype", kString, grpCloudinit).asHot().in("configdrive2", "nocloud", "opennebula"), opt("ciuser", kString, grpCloudinit).asHot(),
	opt("cipassword", kString, grpCloudinit).asHot(), opt("ciupgrade", kBool, grpCloudinit).asHot(), opt("cicustom", kString, grpCloudinit).asHot().of(cicustomProps),
	opt("searchdomain", kString, grpCloudinit).asHot(), opt("nameserver", kString, grpCloudinit).asHot().as(formatAddressList),
	opt("sshkeys", kString, grpCloudinit).asHot().as(formatURLEncoded),
	opt("efidisk0", kString, grpDisk).of(efiProps), opt("tpmstate0", kString, grpDisk).of(tpmProps),
}

var numberedOptions = map[string]numbered{
	"net": {opt("net", kString, grpNetwork).asHot().of(netProps), 32}, "ipconfig": {opt("ipconfig", kString, grpCloudinit).asHot().of(ipconfigProps), 32},
	"scsi": {opt("scsi", kString, grpDisk).asHot().of(scsiProps), 31}, "virtio": {opt("virtio", kString, grpDisk).asHot().of(virtioProps), 16},
	"ide": {opt("ide", kString, grpDisk).of(ideProps), 4}, "sata": {opt("sata", kString, grpDisk).of(sataProps), 6},
	"unused": {opt("unused", kString, grpDisk).asHot().as(formatVolid), 256},
	"serial": {option{param: param{name: "serial", pattern: regexp.MustCompile(`^(/dev/.+|socket)$`)}, group: grpSpecial}, 4}, "parallel": {opt("parallel", kString, grpRoot), 3},
	"usb": {opt("usb", kString, grpSpecial), 14}, "hostpci": {opt("hostpci", kString, grpSpecial), 16},
	"numa": {opt("numa", kString, grpCPU), 8}, "virtiofs": {opt("virtiofs", kString, grpSpecial), 10},
}

var plainByName = func() map[string]option {
	out := map[string]option{}
	for _, o := range plainOptions {
		out[o.name] = o
	}
	return out
}()

var numberedRe = regexp.MustCompile(`^([a-z]+)(0|[1-9]\d*)$`)

// lookupOption finds an option by its name.
func lookupOption(name string) (option, bool) {
	if o, ok := plainByName[name]; ok {
		return o, true
	}
	m := numberedRe.FindStringSubmatch(name)
	if m == nil {
		return option{}, false
	}
	g, ok := numberedOptions[m[1]]
	i, err := strconv.Atoi(m[2])
	if !ok || err != nil || i >= g.count {
		return option{}, false
	}
	o := g.option
	o.name = name
	return o, true
}

// option finds an option that a call may set, with its whole check.
func (n *Node) option(name string) (param, bool) {
	o, ok := lookupOption(name)
	if !ok && name == "cdrom" {
		o, ok = lookupOption("ide2")
	}
	if !ok || o.internal || (o.only9 && !n.v9()) {
		return param{}, false
	}
	d := o.param
	if o.props != nil {
		d.format = func(n *Node, s string) string { return o.props.check(n, name, s) }
	}
	return d, true
}

// isDrive reports whether an option is a drive.
func isDrive(name string) bool {
	if name == "efidisk0" || name == "tpmstate0" {
		return true
	}
	m := numberedRe.FindStringSubmatch(name)
	return m != nil && (m[1] == "scsi" || m[1] == "virtio" || m[1] == "ide" || m[1] == "sata")
}

func isUnused(name string) bool { return strings.HasPrefix(name, "unused") }

// drive is a parsed drive.
type drive struct {
	file  string
	props map[string]string
	order []string // keys of props beside file, as they were written
}

func parseDrive(s string) drive {
	d := drive{props: map[string]string{}}
	for _, part := range strings.Split(s, ",") {
		k, v, ok := strings.Cut(part, "=")
		switch {
		case !ok:
			d.file = part
		case k == "file" || k == "volume":
			d.file = v
		default:
			if _, twice := d.props[k]; !twice {
				d.order = append(d.order, k)
			}
			d.props[k] = v
		}
	}
	return d
}

// String writes a drive as the config has it: the volume, then its options by
// name.
func (d drive) String() string {
	out := d.file
	for _, k := range sortedKeys(d.props) {
		out += "," + k + "=" + d.props[k]
	}
	return out
}

func (d drive) cdrom() bool { return d.props["media"] == "cdrom" }

// cloudinit reports whether it is a cloud-init drive.
func (d drive) cloudinit() bool {
	return strings.HasSuffix(d.file, ":cloudinit") || cloudinitRe.MatchString(d.file)
}

var cloudinitRe = regexp.MustCompile(`[:/]vm-\d+-cloudinit(\.(raw|qcow2))?$`)

package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/test/cloudimage"
	"github.com/agentlab-vm/agentlab/test/netlab"
	"github.com/agentlab-vm/agentlab/test/pvenode"
	"github.com/agentlab-vm/agentlab/test/sample"
)

// pveLab is a lab whose daemon runs on a node of Proxmox VE: the node is fake,
// but its VMs are real ones on a real bridge, and so are the rules around
// them. Everything is in namespaces of the test's own; behind the uplink are a
// fake internet and a LAN.
type pveLab struct {
	*lab
	dir      string // of the fake node
	name     string // of the node, and of this machine
	node     *pvenode.Node
	machines pvenode.Machines
	guests   *lightGuests // instead of machines
	internet *netlab.Peer
	lan      *netlab.Peer
}

const (
	pveTemplate = "9000"
	pveStorage  = "vmstore"
)

// templateDisk is the disk that the template VM is made of. It is built
// outside of the namespaces, where packages are available;
// AGENTLAB_TEST_TEMPLATE names an existing one.
func templateDisk(t testing.TB) string {
	t.Helper()
	if disk := os.Getenv("AGENTLAB_TEST_TEMPLATE"); disk != "" {
		return disk
	}
	bin, err := programs()
	if err != nil {
		t.Fatal(err)
	}
	disk, err := cloudimage.Template(t.Context(), cacheDir(t), filepath.Join(bin, "agent-runner"), os.Stderr)
	if err != nil {
		t.Fatal(err)
	}
	return disk
}

// insidePVE reports whether the test is in its namespaces; outside it runs
// itself there.
func insidePVE(t *testing.T) bool {
	t.Helper()
	sample.Long(t, "it boots virtual machines")
	for _, p := range []string{"qemu-system-x86_64", "qemu-img", "mmdebstrap", "nft", "ip"} {
		if _, err := exec.LookPath(p); err != nil {
			t.Skipf("%v: scripts/deps.sh installs it", err)
		}
	}
	if os.Geteuid() == 0 && !netlab.IsInside(t) {
		templateDisk(t)
	}
	return netlab.Inside(t)
}

// newPVELab makes the network, the node with its template, and the home of a
// daemon of that node.
func newPVELab(t *testing.T, transport string) *pveLab {
	t.Helper()
	p := newPVEHost(t)
	p.internet = netlab.NewPeer(t, "inet0", "vmbr0", "192.168.1.1/24")
	p.lan = netlab.NewPeer(t, "lan0", "vmbr0", "192.168.1.50/24")
	if err := p.lan.Net.ProbeWorld(); err != nil { // it answers whatever comes
		t.Fatal(err)
	}
	netlab.Resolver(t, netip.MustParseAddr("192.31.196.200"))
	p.machines = pvenode.Machines{Dir: filepath.Join(p.dir, "run"), KVM: os.Getenv("AGENTLAB_TEST_KVM") == "1"}
	p.newNode(t, pvenode.Config{Boot: p.machines.Boot, Files: p.machines})
	p.makeTemplate(t)
	p.newHome(t, transport)
	return p
}

// newLightPVELab is the same with light guests: VMs without machines, which
// know no more than who they are.
func newLightPVELab(t testing.TB, transport string, cfg pvenode.Config) *pveLab {
	t.Helper()
	p := newPVEHost(t)
	p.guests = new(lightGuests)
	cfg.Boot = p.guests.boot
	p.newNode(t, cfg)
	p.node.AddTemplate(t, pvenode.Template{Storage: pveStorage, Node: p.name, Name: "agentlab-base"})
	p.newHome(t, transport)
	return p
}

// newPVEHost makes this machine's network that of a node.
func newPVEHost(t testing.TB) *pveLab {
	t.Helper()
	name, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	p := &pveLab{}
	p.name, _, _ = strings.Cut(name, ".")
	netlab.Sh(t, `ip link add vmbr0 type bridge; ip addr add 192.168.1.2/24 dev vmbr0; ip link set vmbr0 up; ip route add default via 192.168.1.1
sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1; mount -t tmpfs tmpfs /mnt; mkdir -p /mnt/pve`)
	if p.dir, err = os.MkdirTemp("/var/tmp", "pve-*"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(p.dir) })
	return p
}

// newNode starts the fake node with a storage for disks and one for snippets.
func (p *pveLab) newNode(t testing.TB, cfg pvenode.Config) {
	t.Helper()
	cfg.Nodes, cfg.Dir = []string{p.name}, filepath.Join(p.dir, "root")
	cfg.Storages = []pvenode.Storage{
		{ID: pveStorage, Type: pvenode.Dir, Path: "/mnt/pve/" + pveStorage, Content: []string{"images"}},
		{ID: "seeds", Type: pvenode.Dir, Path: "/mnt/pve/seeds", Content: []string{"snippets"}},
	}
	p.node = pvenode.New(t, cfg)
	// Where the node's programs say that snippets are.
	netlab.Sh(t, "mkdir -p %[1]s; mount --bind %[1]s /mnt/pve", p.node.HostPath("/mnt/pve"))
}

// newHome makes the home of a daemon of the node.
func (p *pveLab) newHome(t testing.TB, transport string) {
	t.Helper()
	p.lab = newLabIn(t, newHome(t))
	if transport == "shell" {
		p.env = append(p.env, "PATH="+p.bin+":"+p.node.Bin()+":"+os.Getenv("PATH"))
	}
	p.configure(transport)
}

// call is a call of the API by root, as a tool on the node makes it: it ends
// when its task does.
func (p *pveLab) call(t testing.TB, method, path string, params ...string) any {
	t.Helper()
	values := map[string][]string{}
	for _, param := range params {
		k, v, _ := strings.Cut(param, "=")
		values[k] = []string{v}
	}
	var log bytes.Buffer
	r := p.node.Invoke(t.Context(), pvenode.Request{Method: method, Path: path, Params: values, User: "root@pam", CLI: true, Out: &log, Err: &log})
	if r.Err != nil || r.TaskError != "" {
		t.Fatalf("%s %s: %v %s\n%s", method, path, r.Err, r.TaskError, log.String())
	}
	return r.Data
}

// makeTemplate does what scripts/create_template.sh does on a node with a disk
// that is ready.
func (p *pveLab) makeTemplate(t testing.TB) {
	t.Helper()
	const disk = "/root/disk.qcow2" // on the node
	if err := os.MkdirAll(filepath.Dir(p.node.HostPath(disk)), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(templateDisk(t), p.node.HostPath(disk)); err != nil {
		t.Fatal(err)
	}
	p.call(t, "POST", "/nodes/"+p.name+"/qemu", "vmid="+pveTemplate, "name=agentlab-base", "memory=512", "cores=1", "ostype=l26",
		"net0=virtio,bridge=vmbr1", "scsihw=virtio-scsi-pci", "scsi0="+pveStorage+":0,import-from="+disk+",format=qcow2",
		"ide2="+pveStorage+":cloudinit", "boot=order=scsi0", "serial0=socket", "vga=serial0", "agent=enabled=1")
	p.call(t, "POST", "/nodes/"+p.name+"/qemu/"+pveTemplate+"/template")
}

const pveConfig = `backend: proxmox
vmid_range: {first: 1000, last: 1999}
images: {base: base, agents: base}
limits: {boot_minutes: 15}
host_network: {bridge: vmbr1, uplink: vmbr0}
proxmox:
  templates: {base: %s}
`

// configure writes config.yaml.
func (p *pveLab) configure(transport string) {
	p.Helper()
	text := fmt.Sprintf(pveConfig, pveTemplate)
	switch transport {
	case "shell":
		text += "  transport: shell\n  snippets_storage: seeds\n"
	case "rest":
		id, secret := p.token()
		file := filepath.Join(p.home, "token")
		if err := os.WriteFile(file, []byte(secret+"\n"), 0o600); err != nil {
			p.Fatal(err)
		}
		text += fmt.Sprintf("  transport: rest\n  url: %s\n  token_id: %s\n  token_file: %s\n  ca_file: %s\n  pool: agentlab\n",
			p.node.URL(), id, file, p.node.CAFile())
	}
	dir := filepath.Join(p.home, "config")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		p.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "config.yaml"), []byte(text), 0o600); err != nil {
		p.Fatal(err)
	}
}

// token makes the token that scripts/create_api_token.sh makes, with the
// smallest role.
func (p *pveLab) token() (id, secret string) {
	p.Helper()
	p.node.AddPool("agentlab")
	roles := map[string]struct {
		on    string
		privs []string
	}{
		"AgentLab": {"/pool/agentlab", []string{
			"VM.Allocate", "VM.Clone", "VM.Audit", "VM.PowerMgmt", "VM.Config.Disk", "VM.Config.CPU", "VM.Config.Memory", "VM.Config.Network",
			"VM.Config.Options", "VM.Config.Cloudinit", "VM.Config.CDROM", "VM.Config.HWType", "VM.Monitor", "VM.Snapshot", "Pool.Audit",
		}},
		"AgentLabTemplate": {"/vms/" + pveTemplate, []string{"VM.Clone", "VM.Audit"}},
		"AgentLabStorage":  {"/storage/" + pveStorage, []string{"Datastore.AllocateSpace", "Datastore.Audit"}},
		"AgentLabNetwork":  {"/sdn/zones/localnetwork/vmbr1", []string{"SDN.Use"}},
	}
	header := p.node.AddUser(pvenode.User{ID: "agentlab@pve", Tokens: []pvenode.Token{{ID: "lab", Privsep: true}}})
	for name, r := range roles {
		if err := p.node.AddRole(name, r.privs...); err != nil {
			p.Fatal(err)
		}
		for _, who := range []string{"agentlab@pve", "agentlab@pve!lab"} {
			p.node.Grant(r.on, who, name)
		}
	}
	id, secret, _ = strings.Cut(strings.TrimPrefix(header[0], "PVEAPIToken="), "=")
	return id, secret
}

// vms are the VMs of the node but for the template, by number.
func (p *pveLab) vms() []string {
	p.Helper()
	text, err := json.Marshal(p.call(p, "GET", "/nodes/"+p.name+"/qemu"))
	if err != nil {
		p.Fatal(err)
	}
	var list []struct {
		VMID json.Number `json:"vmid"`
	}
	if err := json.Unmarshal(text, &list); err != nil {
		p.Fatalf("%v in %s", err, text)
	}
	var ids []string
	for _, v := range list {
		if v.VMID.String() != pveTemplate {
			ids = append(ids, v.VMID.String())
		}
	}
	return ids
}

// clean fails the test when anything of a sandbox remains on the node: a VM, a
// volume, a snippet, an interface, a process or a rule.
func (p *pveLab) clean() {
	p.Helper()
	left := func() []string {
		left := p.vms()
		images, _ := filepath.Glob(p.node.HostPath("/mnt/pve/" + pveStorage + "/images/1*/*"))
		snippets, _ := filepath.Glob(p.node.HostPath("/mnt/pve/seeds/snippets/*"))
		ports, _ := filepath.Glob("/sys/class/net/tap*")
		left = slices.Concat(left, images, snippets, ports)
		rules, err := exec.Command("nft", "list", "ruleset").CombinedOutput()
		if err != nil {
			p.Fatalf("nft: %v\n%s", err, rules)
		}
		set := ""
		for line := range strings.Lines(string(rules)) {
			if f := strings.Fields(line); len(f) == 3 && (f[0] == "set" || f[0] == "map") {
				set = f[1]
			}
			// The set "ports" allows nothing: ports that were on the bridge
			// stay filtered, whatever is connected to them later.
			if set != "ports" && (strings.Contains(line, `"tap1`) || strings.Contains(line, "10.77.0.2")) {
				left = append(left, set+": "+strings.TrimSpace(line))
			}
		}
		return left
	}
	if !eventually(settleLimit, func() bool { return len(left()) == 0 }) {
		p.Errorf("left on the node: %q", left())
	}
}

// consoles tells what the last lines of the VMs' consoles are.
func (p *pveLab) consoles() {
	files, _ := filepath.Glob(filepath.Join(p.machines.Dir, "*.console.log"))
	for _, f := range files {
		text, _ := os.ReadFile(f)
		p.Logf("%s:\n%s", filepath.Base(f), tail(string(text), 40))
	}
}

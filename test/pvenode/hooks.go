package pvenode

import (
	"fmt"
	"testing"
)

// Template describes a template VM for tests.
type Template struct {
	VMID    int    // 9000
	Node    string // the first one
	Storage string // "local-zfs"
	Name    string // "tmpl"
	Size    int64  // of its disk; 128 MiB
	Format  string // on a dir: raw or qcow2, the default
	Bridge  string // "vmbr1"
	Options map[string]string
}

// AddTemplate makes a template with one disk on scsi0 and a cloud-init drive
// on ide2.
func (n *Node) AddTemplate(tb testing.TB, t Template) {
	tb.Helper()
	if t.VMID == 0 {
		t.VMID = 9000
	}
	if t.Node == "" {
		t.Node = n.name
	}
	if t.Storage == "" {
		t.Storage = "local-zfs"
	}
	if t.Name == "" {
		t.Name = "tmpl"
	}
	if t.Size == 0 {
		t.Size = 128 << 20
	}
	if t.Bridge == "" {
		t.Bridge = "vmbr1"
	}
	conf := map[string]string{
		"name": t.Name, "memory": "256", "cores": "1", "net0": "virtio,bridge=" + t.Bridge, "scsihw": "virtio-scsi-single",
		"ide2": t.Storage + ":cloudinit", "serial0": "socket", "vga": "serial0", "agent": "enabled=1", "ostype": "l26",
		"template": "1", "boot": "order=scsi0",
	}
	for k, v := range t.Options {
		conf[k] = v
	}
	if err := n.addVM(t, conf, true); err != nil {
		tb.Fatalf("template %d: %v", t.VMID, err)
	}
}

// AddForeignVM creates a VM of another owner, with one disk, and starts it if
// requested.
func (n *Node) AddForeignVM(tb testing.TB, vmid int, name string, running bool, options map[string]string) {
	tb.Helper()
	conf := map[string]string{"name": name, "memory": "512", "cores": "1", "net0": "virtio,bridge=vmbr0", "ostype": "l26", "boot": "order=scsi0"}
	for k, v := range options {
		conf[k] = v
	}
	t := Template{VMID: vmid, Node: n.name, Size: 1 << 30}
	n.mu.Lock()
	for _, id := range sortedKeys(n.storages) {
		if n.storages[id].holds("images") && t.Storage == "" {
			t.Storage = id
		}
	}
	n.mu.Unlock()
	if err := n.addVM(t, conf, false); err != nil {
		tb.Fatalf("VM %d: %v", vmid, err)
	}
	if running {
		n.PowerOn(tb, vmid)
	}
}

// AddContainer makes a container, of which the model knows only that it has a
// number.
func (n *Node) AddContainer(tb testing.TB, vmid int, node string) {
	tb.Helper()
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.taken(vmid) {
		tb.Fatalf("container %d: the VMID is taken", vmid)
	}
	n.cts[vmid] = node
}

// taken reports whether a VM or container of the cluster has a number. The
// caller holds mu.
func (n *Node) taken(vmid int) bool { return n.vms[vmid] != nil || n.cts[vmid] != "" }

// addVM writes a VM into the model, with its disk.
func (n *Node) addVM(t Template, conf map[string]string, base bool) error {
	c := n.asRoot(t.Node)
	v := newVM(t.VMID, t.Node)
	n.mu.Lock()
	s := n.storages[t.Storage]
	if s == nil || n.vms[t.VMID] != nil {
		n.mu.Unlock()
		return fmt.Errorf("no storage %q, or the VMID is taken", t.Storage)
	}
	n.mu.Unlock()
	format := "raw"
	if s.Type == Dir {
		format = "qcow2"
		if t.Format != "" {
			format = t.Format
		}
	}
	volid, err := c.alloc(s.ID, t.VMID, format, "", t.Size/1024)
	if err != nil {
		return err
	}
	if base {
		if volid, err = c.makeBase(volid); err != nil {
			return err
		}
	}
	for k, val := range conf {
		if isDrive(k) {
			made, err := c.makeDrive(t.VMID, nil, k, parseDrive(val))
			if err != nil {
				return err
			}
			val = made
		}
		if o, ok := lookupOption(k); ok && o.props == netProps {
			d := parseNet(val)
			if d["macaddr"] == "" {
				d["macaddr"] = n.newMAC()
			}
			val = d.String()
		}
		v.conf[k] = val
	}
	v.conf["scsi0"] = volid + ",size=" + formatSize(t.Size)
	v.conf["smbios1"] = "uuid=" + newUUID()
	v.conf["vmgenid"] = newUUID()
	v.conf["meta"] = "creation-qemu=7.2.22,ctime=" + itoa(int(n.started.Unix()))
	n.mu.Lock()
	defer n.mu.Unlock()
	n.vms[t.VMID] = v
	return nil
}

// asRoot is a call of the model's own.
func (n *Node) asRoot(node string) *call {
	return &call{n: n, ctx: n.ctx, p: values{}, user: "root@pam", node: node, proc: newHolder(), ep: &endpoint{}, resp: &Response{}}
}

// PowerOn starts a VM manually.
func (n *Node) PowerOn(tb testing.TB, vmid int) {
	tb.Helper()
	n.mu.Lock()
	v := n.vms[vmid]
	n.mu.Unlock()
	if v == nil {
		tb.Fatalf("no VM %d", vmid)
	}
	c := n.asRoot(v.node)
	defer n.locks.drop(c.proc)
	if err := c.start(v); err != nil {
		tb.Fatalf("VM %d: %v", vmid, err)
	}
}

// PowerOff ends a VM manually, as if its guest had powered itself off.
func (n *Node) PowerOff(vmid int) {
	n.mu.Lock()
	var run *running
	if v := n.vms[vmid]; v != nil {
		run = v.run
	}
	n.mu.Unlock()
	if run != nil {
		n.asRoot("").kill(n.vm(vmid))
	}
}

func (n *Node) vm(vmid int) *vm {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.vms[vmid]
}

// Edit changes a config manually: "" removes an option.
func (n *Node) Edit(vmid int, options map[string]string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	v := n.vms[vmid]
	if v == nil {
		return
	}
	for k, val := range options {
		if val == "" {
			delete(v.conf, k)
			continue
		}
		v.conf[k] = val
	}
}

// Config returns the current configuration of a VM, nil when there is none.
func (n *Node) Config(vmid int) map[string]string {
	n.mu.Lock()
	defer n.mu.Unlock()
	v := n.vms[vmid]
	if v == nil {
		return nil
	}
	return v.conf.reread()
}

// ConfigFile returns the config file of a VM.
func (n *Node) ConfigFile(vmid int) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	if v := n.vms[vmid]; v != nil {
		return v.render()
	}
	return ""
}

// VMs lists the numbers of all VMs of the cluster.
func (n *Node) VMs() []int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.vmids()
}

// Running reports whether a VM runs.
func (n *Node) Running(vmid int) bool {
	v := n.vm(vmid)
	n.mu.Lock()
	defer n.mu.Unlock()
	return v != nil && v.run != nil
}

// Guest returns what runs in a VM, nil when it does not run.
func (n *Node) Guest(vmid int) Guest {
	n.mu.Lock()
	defer n.mu.Unlock()
	if v := n.vms[vmid]; v != nil && v.run != nil {
		return v.run.guest
	}
	return nil
}

// Volumes lists the volume ids of a VM on all storages of the first node; 0
// lists all.
func (n *Node) Volumes(vmid int) []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	var out []string
	for _, id := range sortedKeys(n.storages) {
		s := n.storages[id]
		for _, node := range sortedKeys(n.nodes) {
			if s.Shared && node != n.name {
				continue
			}
			for _, v := range s.volumesOf(node, vmid) {
				out = append(out, s.volid(v))
			}
		}
	}
	return out
}

// Lock holds the lock file of a VM's config exclusively, as another process
// does, until the returned function is called.
func (n *Node) Lock(vmid int) (unlock func()) { return n.holdFile(vmLockFile(vmid)) }

func (n *Node) holdFile(path string) func() {
	h := newHolder()
	_ = n.locks.take(n.ctx, h, n.name+":"+path, false, n.cfg.Waits.ConfigLock, func() {}, func() {})
	return func() { n.locks.drop(h) }
}

// Fill makes a storage full: no further volume can be created on it.
func (n *Node) Fill(storage string, full bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if s := n.storages[storage]; s != nil {
		s.full = full
	}
}

// Busy makes a volume one that cannot be freed.
func (n *Node) Busy(volid string, busy bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for node := range n.nodes {
		if _, _, v, err := n.findVolume(node, volid); err == nil && v != nil {
			v.busy = busy
		}
	}
}

// AddVolume creates a volume manually: name is that of the plugin, e.g.
// "vm-9999-ws".
func (n *Node) AddVolume(tb testing.TB, storage string, vmid int, name string, size int64) string {
	tb.Helper()
	format := "raw"
	if m := fileExt.FindStringSubmatch(name); m != nil {
		format = m[1]
	}
	volid, err := n.asRoot(n.name).alloc(storage, vmid, format, name, size/1024)
	if err != nil {
		tb.Fatalf("volume %s: %v", name, err)
	}
	return volid
}

// SetNextIDs sets the range of /cluster/nextid: lower included, upper not.
func (n *Node) SetNextIDs(lower, upper int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.nextIDs = [2]int{lower, upper}
}

// Restart is a power failure of the node: running VMs are gone, running
// workers die and leave what they made, locks are free.
func (n *Node) Restart() {
	n.mu.Lock()
	var runs []*running
	for _, v := range n.vms {
		if v.run != nil {
			runs = append(runs, v.run)
			v.run = nil
		}
	}
	var tasks []*task
	for _, t := range n.tasks.all {
		if t.status == "" && t.stop != nil {
			tasks = append(tasks, t)
		}
	}
	n.mu.Unlock()
	for _, r := range runs {
		r.guest.Kill()
		<-r.guest.Done()
	}
	for _, t := range tasks {
		t.stop(errRestart)
	}
	for _, t := range tasks {
		<-t.done
	}
}

var errRestart = dief("node restart")

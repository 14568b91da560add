package pvenode

import (
	"cmp"
	"crypto/rand"
	"crypto/sha1"
	"encoding/hex"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strings"
	"time"
)

// section is one part of a VM's configuration.
type section map[string]string

func (s section) clone() section {
	out := section{}
	for k, v := range s {
		out[k] = v
	}
	return out
}

// vm is a virtual machine. Node.mu guards it; its config changes only while
// its lock file is held too.
type vm struct {
	id      int
	node    string
	conf    section
	pending section
	// drop are the options whose removal is pending, and whether with force.
	drop  map[string]bool
	snaps map[string]section
	run   *running // nil when it does not run
}

// running is a QEMU process.
type running struct {
	guest   Guest
	pid     int
	started time.Time
	disks   map[string]string // slot -> volume id
}

func newVM(id int, node string) *vm {
	return &vm{id: id, node: node, conf: section{}, pending: section{}, drop: map[string]bool{}, snaps: map[string]section{}}
}

// vmids lists all VMs in order; mu is held.
func (n *Node) vmids() []int {
	return slices.Sorted(maps.Keys(n.vms))
}

// vmOn finds a VM on a node; mu is held. Its error is that of the calls that
// load a config.
func (n *Node) vmOn(vmid int, node string) (*vm, *Error) {
	v := n.vms[vmid]
	if v == nil || v.node != node {
		return nil, dief("Configuration file 'nodes/%s/qemu-server/%d.conf' does not exist", node, vmid).exit(2)
	}
	return v, nil
}

// load is vmOn for a call.
func (c *call) load(vmid int) (*vm, *Error) {
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	return c.n.vmOn(vmid, c.node)
}

// loadOther is the other wording, of the calls that look the VM up in the
// cluster first.
func (c *call) loadOther(vmid int) (*vm, *Error) {
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	v := c.n.vms[vmid]
	if v == nil || v.node != c.node {
		return nil, dief("unable to find configuration file for VM %d on node '%s'", vmid, c.node).exit(2)
	}
	return v, nil
}

// checkLock refuses a config with a lock: property.
func (v *vm) checkLock() *Error {
	if l := v.conf["lock"]; l != "" {
		return dief("VM is locked (%s)", l)
	}
	return nil
}

func (v *vm) template() bool { return v.conf["template"] == "1" }

// checkLock is vm.checkLock for a call.
func (c *call) checkLock(v *vm) *Error {
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	return v.checkLock()
}

// lockUnlocked takes the lock of a VM for a change of its config, which is
// refused when that has a lock: property.
func (c *call) lockUnlocked(vmid int) (*vm, func(), *Error) {
	unlock, err := c.lockVM(vmid)
	if err != nil {
		return nil, nil, err
	}
	v, err := c.load(vmid)
	if err == nil {
		err = c.checkLock(v)
	}
	if err != nil {
		unlock()
		return nil, nil, err
	}
	return v, unlock, nil
}

// isRunning reports whether QEMU runs. The caller must not hold mu.
func (c *call) isRunning(v *vm) bool {
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	return v.run != nil
}

// drives returns the slots of a section that are drives, by name.
func (s section) drives() []string {
	var out []string
	for k := range s {
		if isDrive(k) {
			out = append(out, k)
		}
	}
	slices.Sort(out)
	return out
}

// driveOrder sorts drives as the real node walks them: ide, scsi, virtio,
// sata, then the special ones, each by number.
func driveOrder(slots []string) {
	rank := map[string]int{"ide": 0, "scsi": 1, "virtio": 2, "sata": 3, "efidisk": 4, "tpmstate": 5, "unused": 6}
	key := func(s string) (int, int) {
		stem := strings.TrimRight(s, "0123456789")
		return rank[stem], atoi(s[len(stem):])
	}
	slices.SortFunc(slots, func(a, b string) int {
		ra, na := key(a)
		rb, nb := key(b)
		return cmp.Or(cmp.Compare(ra, rb), cmp.Compare(na, nb))
	})
}

// addUnused remembers a volume as unusedN, unless it is used or remembered
// already.
func (v *vm) addUnused(_ *Node, volid string) {
	for i := range 256 {
		if v.conf["unused"+itoa(i)] == volid {
			return
		}
	}
	for i := range 256 {
		k := "unused" + itoa(i)
		if _, used := v.conf[k]; !used {
			v.conf[k] = volid
			return
		}
	}
}

// sameVolume reports whether two IDs refer to one volume. The caller holds mu.
func (n *Node) sameVolume(a, b string) bool {
	if a == b {
		return true
	}
	_, ra, ea := n.parseVolid(a)
	_, rb, eb := n.parseVolid(b)
	return ea == nil && eb == nil && ra.store == rb.store && ra.key == rb.key
}

// render writes the config file.
func (v *vm) render() string {
	var b strings.Builder
	writeSection(&b, v.conf)
	if len(v.pending)+len(v.drop) > 0 {
		b.WriteString("\n[PENDING]\n")
		p := v.pending.clone()
		if len(v.drop) > 0 {
			var list []string
			for _, k := range sortedKeys(v.drop) {
				if v.drop[k] {
					k = "!" + k
				}
				list = append(list, k)
			}
			p["delete"] = strings.Join(list, ",")
		}
		writeSection(&b, p)
	}
	for _, name := range sortedKeys(v.snaps) {
		b.WriteString("\n[" + name + "]\n")
		writeSection(&b, v.snaps[name])
	}
	return b.String()
}

func writeSection(b *strings.Builder, s section) {
	if d, ok := s["description"]; ok {
		for _, line := range strings.Split(d, "\n") {
			b.WriteString("#" + encodeText(line) + "\n")
		}
	}
	for _, k := range sortedKeys(s) {
		if k != "description" {
			b.WriteString(k + ": " + s[k] + "\n")
		}
	}
}

// encodeText is how text stands in configs: all but printable ASCII without
// "%" and ":" is percent-encoded.
func encodeText(s string) string {
	var b strings.Builder
	for i := range len(s) {
		ch := s[i]
		if ch < 0x20 || ch > 0x7e || ch == '%' || ch == ':' {
			fmt.Fprintf(&b, "%%%02X", ch)
			continue
		}
		b.WriteByte(ch)
	}
	return b.String()
}

func (v *vm) digest() string {
	sum := sha1.Sum([]byte(v.render()))
	return hex.EncodeToString(sum[:])
}

// jsonValue types a value of a config as the API does: integers and booleans
// are numbers, everything else is text.
func jsonValue(name, value string) any {
	o, ok := lookupOption(name)
	if ok && (o.kind == kInt || o.kind == kBool) && intRe.MatchString(value) {
		return atoi(value)
	}
	return value
}

// newMAC returns the MAC address of a new VM.
func (n *Node) newMAC() string {
	b := make([]byte, 3)
	_, _ = rand.Read(b)
	return fmt.Sprintf("BC:24:11:%02X:%02X:%02X", b[0], b[1], b[2])
}

// netDevice is a parsed netN.
type netDevice map[string]string

func parseNet(s string) netDevice {
	m, _ := netProps.parse(s)
	return m
}

// String writes a network device as configs have it.
func (d netDevice) String() string {
	out := d["model"]
	if d["macaddr"] != "" {
		out += "=" + strings.ToUpper(d["macaddr"])
	}
	for _, k := range []string{"bridge", "firewall", "link_down", "mtu", "queues", "rate", "tag", "trunks"} {
		if d[k] != "" {
			out += "," + k + "=" + d[k]
		}
	}
	return out
}

// effective is what GET config shows: pending values as if they were current,
// pending removals as done.
func (v *vm) effective() section {
	out := v.conf.clone()
	for k := range v.drop {
		delete(out, k)
	}
	for k, val := range v.pending {
		out[k] = val
	}
	return out
}

func decodeURL(s string) string {
	if u, err := url.PathUnescape(s); err == nil {
		return u
	}
	return s
}

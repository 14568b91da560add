package pvenode

import (
	"crypto/sha256"
	"encoding/hex"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"
)

// change is a set call, taken apart.
type change struct {
	set    section
	drop   []string
	revert []string
	force  bool
	line   string // what the log says
}

// controlParams of a set call are not options.
var controlParams = setOf("node", "vmid", "digest", "background_delay", "skiplock", "delete", "revert", "force", "skip_cloud_init", "import-working-storage")

// apiSetSync is PUT …/config.
func apiSetSync(c *call) (any, *Error) { return c.update(true) }

// apiSetTask is POST …/config.
func apiSetTask(c *call) (any, *Error) { return c.update(false) }

func (c *call) update(sync bool) (any, *Error) {
	vmid := c.p.num("vmid")
	ch, err := c.readChange(vmid)
	if err != nil {
		return nil, err
	}
	if err := c.changeAllowed(vmid, ch); err != nil {
		return nil, err
	}
	work := func(w *call) *Error {
		v, err := w.load(vmid)
		if err != nil {
			return err
		}
		w.say("update VM %d: %s", vmid, ch.line)
		return w.apply(v, ch)
	}
	if c.n.v9() { // checked before the fork, without the lock file
		if err := c.changePossible(vmid, ch); err != nil {
			return nil, err
		}
	}
	if !sync && c.n.v9() {
		return c.background(vmid, func(w *call) *Error {
			unlock, err := w.lockVM(vmid)
			if err != nil {
				return err
			}
			defer unlock()
			if err := w.changePossible(vmid, ch); err != nil {
				return err
			}
			return work(w)
		})
	}
	unlock, err := c.lockVM(vmid)
	if err != nil {
		return nil, err
	}
	if err := c.changePossible(vmid, ch); err != nil {
		unlock()
		return nil, err
	}
	if sync {
		defer unlock()
		return nil, work(c)
	}
	return c.background(vmid, func(w *call) *Error { // it inherits the lock
		defer unlock()
		return work(w)
	})
}

// background forks a qmconfig worker and waits for it as long as
// background_delay says.
func (c *call) background(vmid int, work func(*call) *Error) (any, *Error) {
	data, err := c.fork("qmconfig", itoa(vmid), work)
	if err != nil || !c.p.has("background_delay") || c.cli {
		return data, err
	}
	c.n.mu.Lock()
	t := c.n.tasks.byID[c.resp.Task]
	c.n.mu.Unlock()
	timer := time.NewTimer(time.Duration(c.p.num("background_delay")) * c.n.cfg.Waits.Second)
	defer timer.Stop()
	select {
	case <-t.done:
	case <-timer.C:
		return data, nil
	}
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	if t.status != "OK" && !strings.HasPrefix(t.status, "WARNINGS") {
		return nil, dief("failed to update VM %d: %s", vmid, t.status)
	}
	return nil, nil
}

// readChange takes the parameters apart and refuses what needs no config.
func (c *call) readChange(vmid int) (*change, *Error) {
	ch := &change{set: section{}, force: c.p.yes("force")}
	var words []string
	for _, k := range sortedKeys(c.p) {
		if k == "node" || k == "vmid" || k == "digest" || k == "background_delay" {
			continue
		}
		val := c.p.str(k)
		if k == "cipassword" {
			val = "<hidden>"
		}
		words = append(words, "-"+k+" "+val)
		if !controlParams[k] {
			ch.set[k] = c.p.str(k)
		}
	}
	ch.line = strings.Join(words, " ")
	if err := c.onlyRoot("skiplock"); err != nil {
		return nil, err
	}
	if k, ok := ch.set["sshkeys"]; ok && !validKeys(decodeURL(k)) {
		return nil, dief("SSH public key validation error")
	}
	if !c.p.has("delete") && !c.p.has("revert") && len(ch.set) == 0 {
		return nil, dief("no options specified").exit(255)
	}
	if v, ok := ch.set["cdrom"]; ok {
		ch.set["ide2"] = v
		delete(ch.set, "cdrom")
	}
	for _, o := range c.p.list("revert") {
		if _, ok := lookupOption(o); !ok {
			return nil, &Error{Status: 400, Message: "Parameter verification failed.", Params: map[string]string{"revert": "unknown option '" + o + "'"}}
		}
		ch.revert = append(ch.revert, o)
	}
	for _, o := range c.p.list("delete") {
		if o == "cdrom" {
			o = "ide2"
		}
		if _, set := ch.set[o]; set {
			return nil, badParam("delete", "you can't use '-"+o+"' and -delete "+o+"' at the same time")
		}
		if _, ok := lookupOption(o); !ok {
			return nil, &Error{Status: 400, Message: "Parameter verification failed.", Params: map[string]string{"delete": "unknown option '" + o + "'"}}
		}
		ch.drop = append(ch.drop, o)
	}
	return ch, c.normalize(vmid, ch)
}

// normalize brings values into the form in which they are kept.
func (c *call) normalize(vmid int, ch *change) *Error {
	for _, k := range sortedKeys(ch.set) {
		val := ch.set[k]
		switch {
		case isDrive(k):
			if err := c.checkDriveParam(k, val); err != nil {
				return err
			}
		case strings.HasPrefix(k, "net") && numberedRe.MatchString(k):
			d := parseNet(val)
			if d["macaddr"] == "" {
				d["macaddr"] = c.n.newMAC()
			}
			ch.set[k] = d.String()
		case k == "vmgenid" && val == "1":
			ch.set[k] = newUUID()
		case k == "hookscript":
			if err := c.checkHookscript(val); err != nil {
				return err
			}
		case k == "cpuunits":
			if atoi(val) > 10000 {
				ch.set[k] = "10000"
			}
		case k == "tags":
			ch.set[k] = uniqueTags(val)
		}
	}
	_ = vmid
	return nil
}

// uniqueTags sorts tags, in lower case and each once.
func uniqueTags(s string) string {
	seen := map[string]bool{}
	var out []string
	for _, t := range splitList(strings.ToLower(s)) {
		if !seen[t] {
			seen[t] = true
			out = append(out, t)
		}
	}
	slices.Sort(out)
	return strings.Join(out, ";")
}

var keyLineRe = regexp.MustCompile(`^(ssh-ed25519|ssh-rsa|ecdsa-sha2-\S+|sk-\S+) [A-Za-z0-9+/]+={0,2}( .*)?$`)

func validKeys(s string) bool {
	for _, line := range strings.Split(strings.TrimSpace(s), "\n") {
		if !keyLineRe.MatchString(strings.TrimSpace(line)) {
			return false
		}
	}
	return true
}

func (c *call) checkHookscript(volid string) *Error {
	c.n.mu.Lock()
	s, r, err := c.n.parseVolid(volid)
	c.n.mu.Unlock()
	if err != nil {
		return badParam("hookscript", err.Message+"\n")
	}
	if r.content != "snippets" {
		return badParam("hookscript", "'"+volid+"' is not in the snippets directory\n")
	}
	st, e := os.Stat(c.n.HostPath(s.filePath(r)))
	if e != nil {
		return badParam("hookscript", "script '"+volid+"' does not exist\n")
	}
	if st.Mode()&0o111 == 0 {
		return badParam("hookscript", "script '"+volid+"' is not executable\n")
	}
	return nil
}

// newDiskRe is "STORE:SIZE", the request for a new volume.
var newDiskRe = regexp.MustCompile(`^(?:([^/:\s]+):)?(\d+(?:\.\d+)?)$`)

// checkDriveParam refuses drives whose request is invalid.
func (c *call) checkDriveParam(slot, val string) *Error {
	d := parseDrive(val)
	m := newDiskRe.FindStringSubmatch(d.file)
	if d.props["import-from"] != "" && (m == nil || m[1] == "" || m[2] != "0") {
		return badParam(slot, "'import-from' requires special syntax - use <storage ID>:0,import-from=<source>")
	}
	return nil
}

// changeAllowed checks the privileges that the change needs.
func (c *call) changeAllowed(vmid int, ch *change) *Error {
	if c.root() {
		return nil
	}
	keys := append(append([]string{}, ch.drop...), sortedKeys(ch.set)...)
	for _, k := range keys {
		if err := c.optionAllowed(vmid, "", k); err != nil {
			return err
		}
	}
	for _, k := range sortedKeys(ch.set) {
		if !isDrive(k) {
			continue
		}
		if err := c.driveAllowed(vmid, ch.set[k], ""); err != nil {
			return err
		}
	}
	for _, k := range sortedKeys(ch.set) {
		if strings.HasPrefix(k, "net") && numberedRe.MatchString(k) {
			if err := c.bridgeAllowed(parseNet(ch.set[k])); err != nil {
				return err
			}
		}
	}
	return nil
}

// optionAllowed is the privilege of one option.
func (c *call) optionAllowed(vmid int, poolID, name string) *Error {
	o, ok := lookupOption(name)
	if !ok || isDrive(name) || isUnused(name) {
		return nil
	}
	if name == "vmstate" {
		return c.needVM(vmid, poolID, "VM.Config.Disk", "VM.PowerMgmt")
	}
	priv := map[optionGroup]string{
		grpCPU: "VM.Config.CPU", grpMemory: "VM.Config.Memory", grpHWType: "VM.Config.HWType", grpDisk: "VM.Config.Disk",
		grpNetwork: "VM.Config.Network", grpOptions: "VM.Config.Options", grpPower: "VM.PowerMgmt", grpStartup: "VM.Config.Options",
	}[o.group]
	switch o.group {
	case grpRoot:
		return dief("only root can set '%s' config", name)
	case grpCloudinit:
		if c.needVM(vmid, poolID, "VM.Config.Cloudinit") == nil || c.needVM(vmid, poolID, "VM.Config.Network") == nil {
			return nil
		}
		return denied("/vms/" + itoa(vmid) + ", VM.Config.Cloudinit|VM.Config.Network")
	case grpSpecial:
		return c.specialAllowed(vmid, poolID, name)
	case grpStartup:
		if err := c.needVM(vmid, poolID, priv); err != nil {
			return err
		}
		return c.need("/", "Sys.Modify")
	default:
		return c.needVM(vmid, poolID, priv)
	}
}

// specialAllowed are options whose value decides; devices of the host are
// root's.
func (c *call) specialAllowed(vmid int, poolID, name string) *Error {
	switch {
	case name == "tags":
		return c.needVM(vmid, poolID, "VM.Config.Options")
	case strings.HasPrefix(name, "serial"):
		if c.p.has(name) && c.p.str(name) != "socket" {
			return dief("only root can modify '%s' config for real devices", name)
		}
		return c.needVM(vmid, poolID, "VM.Config.HWType")
	case strings.HasPrefix(name, "usb") && strings.HasPrefix(c.p.str(name), "spice"):
		return c.needVM(vmid, poolID, "VM.Config.HWType")
	}
	if c.p.has(name) {
		return dief("only root can set '%s' config for non-mapped devices", name)
	}
	return c.needVM(vmid, poolID, "VM.Config.HWType")
}

// bridgeAllowed is the privilege to use a bridge.
func (c *call) bridgeAllowed(d netDevice) *Error {
	if d["bridge"] == "" {
		return nil
	}
	path := "/sdn/zones/localnetwork/" + d["bridge"]
	if t := d["tag"]; t != "" {
		path += "/" + t
	}
	return c.need(path, "SDN.Use")
}

// driveAllowed is the access to the storage or volume of a drive.
func (c *call) driveAllowed(vmid int, val, poolID string) *Error {
	d := parseDrive(val)
	switch {
	case d.file == "none":
		return nil
	case strings.HasPrefix(d.file, "/"):
		return dief("Only root can pass arbitrary filesystem paths. at /usr/share/perl5/PVE/Storage.pm line 581.")
	case strings.HasSuffix(d.file, ":cloudinit"), newDiskRe.MatchString(d.file):
		id, _, _ := strings.Cut(d.file, ":")
		if err := c.need("/storage/"+id, "Datastore.AllocateSpace"); err != nil {
			return err
		}
		return c.importAllowed(vmid, d.props["import-from"])
	}
	_ = poolID
	return c.volumeAllowed(vmid, d.file)
}

// volumeAllowed is check_volume_access: the owner, or who may configure the
// owner's disks, or who manages the storage.
func (c *call) volumeAllowed(vmid int, volid string) *Error {
	c.n.mu.Lock()
	_, r, err := c.n.parseVolid(volid)
	c.n.mu.Unlock()
	if err != nil {
		return err
	}
	if c.may("/storage/"+r.store, "Datastore.Allocate") {
		return nil
	}
	switch {
	case r.content == "iso" || r.content == "vztmpl" || r.content == "import":
		return c.needAny("/storage/"+r.store, "Datastore.AllocateSpace", "Datastore.Audit")
	case r.vmid == vmid && vmid != 0:
		return nil
	case r.content == "images" && r.vmid != 0:
		if err := c.need("/storage/"+r.store, "Datastore.Audit"); err != nil {
			return err
		}
		return c.need("/vms/"+itoa(r.vmid), "VM.Config.Disk")
	}
	return dief("missing privileges to access %s", volid)
}

func (c *call) importAllowed(vmid int, src string) *Error {
	if src == "" {
		return nil
	}
	if strings.HasPrefix(src, "/") {
		return dief("Only root can pass arbitrary filesystem paths. at /usr/share/perl5/PVE/Storage.pm line 581.")
	}
	c.n.mu.Lock()
	_, r, err := c.n.parseVolid(src)
	c.n.mu.Unlock()
	if err != nil {
		return err
	}
	if r.content == "images" {
		return c.need("/vms/"+itoa(r.vmid), "VM.Clone")
	}
	return c.volumeAllowed(vmid, src)
}

// changePossible is what is refused once the config is locked.
func (c *call) changePossible(vmid int, ch *change) *Error {
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	v, err := c.n.vmOn(vmid, c.node)
	if err != nil {
		return err
	}
	if d := c.p.str("digest"); d != "" && d != "0" && d != v.digest() {
		return dief("checksum mismatch (file change by other user?)")
	}
	if contains(ch.drop, "vmstate") && v.conf["lock"] == "suspended" {
		if !contains(ch.drop, "lock") { // a state that is thrown away
			ch.drop = append(ch.drop, "lock")
		}
	} else if !c.p.yes("skiplock") {
		if err := v.checkLock(); err != nil {
			return err
		}
	}
	for _, o := range ch.revert {
		if val, ok := v.conf[o]; ok {
			ch.set[o] = val
		} else if _, ok := v.pending[o]; ok && !contains(ch.drop, o) {
			ch.drop = append(ch.drop, o)
		}
	}
	return v.checkBalloon(ch)
}

func (v *vm) checkBalloon(ch *change) *Error {
	now := v.effective()
	mem, balloon := now["memory"], now["balloon"]
	m, okM := ch.set["memory"]
	b, okB := ch.set["balloon"]
	if !okM && !okB {
		return nil
	}
	if okM {
		mem = m
	}
	if okB {
		balloon = b
	}
	if mem == "" {
		mem = "512"
	}
	if balloon != "" && balloon != "0" && atoi(balloon) > atoi(strings.TrimPrefix(mem, "current=")) {
		return dief("balloon value too large (must be smaller than assigned memory)")
	}
	return nil
}

// hashPassword replaces crypt(3): the API never shows the result.
func hashPassword(s string) string {
	sum := sha256.Sum256([]byte(s))
	return "$5$fake$" + hex.EncodeToString(sum[:])
}

package pvenode

import (
	"regexp"
	"strconv"
	"strings"
)

var resizeRe = regexp.MustCompile(`^\+?\d+(\.\d+)?[KMGT]?$`)

var diskTable = []endpoint{
	{method: "PUT", path: "/nodes/{node}/qemu/{vmid}/resize", perm: vmPriv("VM.Config.Disk"), run: apiResize, params: []param{
		{name: "disk", need: true, format: formatDrive}, {name: "size", need: true, pattern: resizeRe}, str("digest").upTo(40), boolean("skiplock"),
	}},
	{method: "PUT", path: "/nodes/{node}/qemu/{vmid}/unlink", perm: vmPriv("VM.Config.Disk"), run: apiUnlink, params: []param{
		str("idlist").must(), boolean("force"),
	}},
	{method: "POST", path: "/nodes/{node}/qemu/{vmid}/template", perm: vmPriv("VM.Allocate"), run: apiTemplate, params: []param{
		{name: "disk", format: formatDrive},
	}},
}

func formatDrive(_ *Node, s string) string {
	if !isDrive(s) {
		return "value '" + s + "' does not have a value in the enumeration of drives\n"
	}
	return ""
}

// apiUnlink is a deletion of drives by another name.
func apiUnlink(c *call) (any, *Error) {
	u := *c
	u.p = values{"vmid": c.p["vmid"], "node": c.p["node"], "delete": c.p["idlist"]}
	if c.p.has("force") {
		u.p["force"] = c.p["force"]
	}
	return u.update(true)
}

func apiResize(c *call) (any, *Error) {
	if err := c.onlyRoot("skiplock"); err != nil {
		return nil, err
	}
	vmid := c.p.num("vmid")
	return c.fork("resize", itoa(vmid), func(w *call) *Error {
		unlock, err := w.lockVM(vmid)
		if err != nil {
			return err
		}
		defer unlock()
		return w.resize(vmid, w.p.str("disk"), w.p.str("size"))
	})
}

func (c *call) resize(vmid int, slot, asked string) *Error {
	n := c.n
	v, err := c.load(vmid)
	if err != nil {
		return err
	}
	n.mu.Lock()
	digest := v.digest()
	line, there := v.conf[slot]
	n.mu.Unlock()
	d := parseDrive(line)
	if g := c.p.str("digest"); g != "" && g != digest {
		return dief("checksum mismatch (file change by other user?)")
	}
	if !c.p.yes("skiplock") {
		if err := c.checkLock(v); err != nil {
			return err
		}
	}
	switch {
	case !there:
		return dief("disk '%s' does not exist", slot)
	case d.cdrom():
		return dief("you can't resize a cdrom")
	}
	store, _, _ := strings.Cut(d.file, ":")
	if err := c.need("/storage/"+store, "Datastore.AllocateSpace"); err != nil {
		return err
	}
	old, err := c.volumeSize(d.file)
	if err != nil {
		return err
	}
	size := newSize(old, asked)
	switch {
	case size < old:
		return dief("shrinking disks is not supported")
	case size == old:
		return nil
	}
	if err := n.point(c, "resize.volume"); err != nil {
		return err
	}
	if size, err = c.resizeVolume(d.file, size); err != nil {
		return err
	}
	d.props["size"] = formatSize(size)
	n.mu.Lock()
	defer n.mu.Unlock()
	v.conf[slot] = d.String()
	return nil
}

// newSize is the size that is asked for, in bytes.
func newSize(old int64, asked string) int64 {
	more, plus := strings.CutPrefix(asked, "+")
	shift := map[byte]uint{'K': 10, 'M': 20, 'G': 30, 'T': 40}[more[len(more)-1]]
	f, _ := strconv.ParseFloat(strings.TrimRight(more, "KMGT"), 64)
	size := int64(f * float64(int64(1)<<shift))
	if plus {
		size += old
	}
	return size
}

// resizeVolume grows a volume to the next size that its storage has.
func (c *call) resizeVolume(volid string, size int64) (int64, *Error) {
	err := c.withVolume(volid, func(s *storage, r ref, v *volume) *Error {
		if s.full {
			return s.noSpace(r.key)
		}
		size = roundUp(s, (size+1023)/1024) * 1024
		if c.n.cfg.Files != nil && s.Type == Dir {
			if err := c.n.cfg.Files.Resize(c.ctx, c.n.HostPath(s.filePath(r)), size); err != nil {
				return dief("resize failed: %v", err)
			}
		}
		v.size = size
		return nil
	})
	return size, err
}

// apiTemplate makes a VM a template: its disks become bases, also those of
// another owner.
func apiTemplate(c *call) (any, *Error) {
	vmid := c.p.num("vmid")
	if _, err := c.templatable(vmid); err != nil {
		return nil, err
	}
	return c.fork("qmtemplate", itoa(vmid), func(w *call) *Error {
		unlock, err := w.lockVM(vmid)
		if err != nil {
			return err
		}
		defer unlock()
		v, err := w.templatable(vmid)
		if err != nil {
			return err
		}
		return w.makeTemplate(v, w.p.str("disk"))
	})
}

func (c *call) templatable(vmid int) (*vm, *Error) {
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	v, err := c.n.vmOn(vmid, c.node)
	if err != nil {
		return nil, err
	}
	if err := v.checkLock(); err != nil {
		return nil, err
	}
	switch {
	case len(v.snaps) > 0:
		return nil, dief("unable to create template, because VM contains snapshots")
	case v.template() && !c.p.has("disk"):
		return nil, dief("you can't convert a template to a template")
	case v.run != nil:
		return nil, dief("you can't convert a VM to template if VM is running").exit(25)
	}
	return v, nil
}

func (c *call) makeTemplate(v *vm, only string) *Error {
	c.n.mu.Lock()
	v.conf["template"] = "1"
	conf := v.conf.clone()
	c.n.mu.Unlock()
	slots := conf.drives()
	driveOrder(slots)
	for _, slot := range slots {
		d := parseDrive(conf[slot])
		if d.cdrom() || (only != "" && only != slot) {
			continue
		}
		volid, err := c.makeBase(d.file)
		if err != nil {
			return err
		}
		d.file = volid
		c.n.mu.Lock()
		v.conf[slot] = d.String()
		c.n.mu.Unlock()
	}
	return nil
}

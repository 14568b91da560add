package pvenode

import (
	"os"
	"strings"
)

// makeDrive makes what a drive asks for: a new volume, an import, a
// cloud-init image, or nothing when it names one that is there. It returns
// the drive as the config has it.
func (c *call) makeDrive(vmid int, v *vm, slot string, d drive) (string, *Error) {
	m := newDiskRe.FindStringSubmatch(d.file)
	switch {
	case d.file == "none" || d.file == "cdrom":
		return d.String(), nil
	case strings.HasSuffix(d.file, ":cloudinit"):
		return c.makeCloudinit(vmid, v, slot, d)
	case m != nil && m[1] == "":
		return "", dief("no storage ID specified (and no default storage)")
	case m != nil && d.props["import-from"] != "":
		return c.makeImport(vmid, slot, m[1], d)
	case m != nil:
		gib, _ := parseSize(m[2] + "G")
		volid, err := c.alloc(m[1], vmid, c.formatFor(m[1], d), "", gib/1024)
		if err != nil {
			return "", err
		}
		return c.madeDrive(slot, volid, d)
	case strings.HasPrefix(d.file, "/"):
		return d.String(), nil
	}
	return c.useVolume(d)
}

// formatFor is the format of a new volume.
func (c *call) formatFor(storeID string, d drive) string {
	if f := d.props["format"]; f != "" {
		return f
	}
	return "raw"
}

// madeDrive is a drive with a new volume, as it is announced.
func (c *call) madeDrive(slot, volid string, d drive) (string, *Error) {
	size, err := c.volumeSize(volid)
	if err != nil {
		return "", err
	}
	d.file = volid
	delete(d.props, "format")
	delete(d.props, "import-from")
	d.props["size"] = formatSize(size)
	c.say("%s: successfully created disk '%s'", slot, d.String())
	return d.String(), nil
}

func (c *call) makeCloudinit(vmid int, v *vm, slot string, d drive) (string, *Error) {
	if v != nil {
		c.n.mu.Lock()
		all := v.effective()
		c.n.mu.Unlock()
		for _, other := range all.drives() {
			if other != slot && parseDrive(all[other]).cloudinit() {
				return "", dief("%s - cloud-init drive is already attached at '%s'", slot, other)
			}
		}
	}
	id := strings.TrimSuffix(d.file, ":cloudinit")
	s, err := c.storeFor(id)
	if err != nil {
		return "", err
	}
	volid, err := c.allocCloudinit(s, vmid)
	if err != nil {
		return "", err
	}
	d.file = volid
	d.props["media"] = "cdrom"
	delete(d.props, "size")
	c.say("%s: successfully created disk '%s'", slot, d.String())
	if v != nil {
		d.props["size"] = "4M"
	}
	return d.String(), nil
}

// makeImport copies another volume or a file into a new volume.
func (c *call) makeImport(vmid int, slot, storeID string, d drive) (string, *Error) {
	src := d.props["import-from"]
	var size int64
	var file string
	sparse := true
	if strings.HasPrefix(src, "/") {
		st, err := os.Stat(c.n.HostPath(src))
		if err != nil {
			return "", dief("can't find file '%s'", src)
		}
		size, file = st.Size(), c.n.HostPath(src)
		if virtual, err := imageSize(file); err == nil {
			size = virtual
		}
		if c.n.cfg.Files != nil {
			if virtual, err := c.n.cfg.Files.Size(c.ctx, file); err == nil {
				size = virtual
			}
		}
	} else {
		c.n.mu.Lock()
		s, r, v, err := c.n.findVolume(c.node, src)
		c.n.mu.Unlock()
		if err != nil {
			return "", err
		}
		file = c.n.HostPath(s.filePath(r))
		switch {
		case r.content == "import":
			st, e := os.Stat(file)
			if e != nil {
				return "", dief("volume '%s' does not exist", src)
			}
			size = st.Size()
			if virtual, err := imageSize(file); err == nil {
				size = virtual
			}
			if c.n.cfg.Files != nil {
				if virtual, err := c.n.cfg.Files.Size(c.ctx, file); err == nil {
					size = virtual
				}
			}
		case v == nil:
			return "", dief("volume '%s' does not exist", src)
		default:
			c.say("create full clone of drive (%s)", src)
			size, sparse = v.size, false
		}
	}
	volid, err := c.alloc(storeID, vmid, c.formatFor(storeID, d), "", size/1024)
	if err != nil {
		return "", err
	}
	if !sparse {
		c.allocated(volid)
	}
	if err := c.copyInto(volid, file); err != nil {
		return "", err
	}
	lines := progress(size)
	if sparse {
		lines = []string{progressLine(size, 0), progressLine(size, 100)}
	}
	for _, l := range lines {
		c.say("%s", l)
	}
	return c.madeDrive(slot, volid, d)
}

// copyInto fills the file of a new volume.
func (c *call) copyInto(volid, file string) *Error {
	c.n.mu.Lock()
	s, r, v, err := c.n.findVolume(c.node, volid)
	c.n.mu.Unlock()
	if err != nil || c.n.cfg.Files == nil || s.Type != Dir {
		return err
	}
	if err := c.n.cfg.Files.FullClone(c.ctx, file, "", c.n.HostPath(s.filePath(r)), v.format); err != nil {
		return dief("copy failed: %v", err)
	}
	return nil
}

// useVolume attaches a volume that is there.
func (c *call) useVolume(d drive) (string, *Error) {
	c.n.mu.Lock()
	s, r, err := c.n.parseVolid(d.file)
	c.n.mu.Unlock()
	if err != nil {
		return "", err
	}
	if r.content == "iso" {
		if st, e := os.Stat(c.n.HostPath(s.filePath(r))); e == nil {
			d.props["size"] = formatSize(st.Size())
			return d.String(), nil
		}
		return "", dief("volume '%s' does not exist", d.file)
	}
	size, err := c.volumeSize(d.file)
	if err != nil {
		return "", err
	}
	d.props["size"] = formatSize(size)
	return d.String(), nil
}

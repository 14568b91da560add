package pvenode

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

// status is what storage calls say of a storage; mu is held.
func (s *storage) status(node string) map[string]any {
	content := slices.Sorted(slices.Values(s.Content))
	slices.Reverse(content)
	used := s.used(node)
	shared := 0
	if s.Shared {
		shared = 1
	}
	return map[string]any{
		"type": string(s.Type), "content": strings.Join(content, ","), "active": 1, "enabled": 1, "shared": shared,
		"total": s.Size, "used": used, "avail": s.Size - used,
	}
}

// apiStorages is GET /nodes/N/storage.
func apiStorages(c *call) (any, *Error) {
	n := c.n
	n.mu.Lock()
	ids := sortedKeys(n.storages)
	n.mu.Unlock()
	one := c.p.str("storage")
	out := []map[string]any{}
	found := false
	for _, id := range ids {
		n.mu.Lock()
		s := n.storages[id]
		here := s != nil && s.on(c.node)
		n.mu.Unlock()
		if !here || (c.p.has("content") && !anyOf(s.Content, c.p.list("content"))) {
			continue
		}
		found = found || id == one
		if one != "" && id != one || c.needAny("/storage/"+id, "Datastore.Audit", "Datastore.AllocateSpace") != nil {
			continue
		}
		n.mu.Lock()
		e := s.status(c.node)
		n.mu.Unlock()
		e["storage"] = id
		e["used_fraction"] = float64(e["used"].(int64)) / float64(s.Size)
		out = append(out, e)
	}
	if one != "" && !found {
		return nil, badParam("storage", "No such storage.")
	}
	return out, nil
}

func anyOf(have, want []string) bool {
	for _, w := range want {
		if contains(have, w) {
			return true
		}
	}
	return false
}

// apiStorageStatus is GET /nodes/N/storage/S/status.
func apiStorageStatus(c *call) (any, *Error) {
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	s := c.n.storages[c.p.str("storage")]
	if s == nil || !s.on(c.node) {
		return nil, badParam("storage", "No such storage.")
	}
	return s.status(c.node), nil
}

// apiContent is GET …/content: what the caller may access.
func apiContent(c *call) (any, *Error) {
	s, err := c.storeFor(c.p.str("storage"))
	if err != nil {
		return nil, err
	}
	kind := c.p.str("content")
	var all []map[string]any
	if s.holds("images") && (kind == "" || kind == "images") {
		if all, err = c.imageEntries(s); err != nil {
			return nil, err
		}
	}
	if s.Type == Dir { // vmid narrows images alone
		for _, k := range []string{"backup", "import", "iso", "snippets", "vztmpl"} {
			if s.holds(k) && (kind == "" || kind == k) {
				all = append(all, c.fileEntries(s, k)...)
			}
		}
	}
	out := []map[string]any{}
	for _, e := range all {
		volid, _ := e["volid"].(string)
		if c.root() || c.volumeAllowed(0, volid) == nil {
			out = append(out, e)
		}
	}
	return out, nil
}

// imageEntries lists the volumes of one VM or of all. On a dir storage the real
// node runs qemu-img on each file, and fails as a whole for one that is gone
// or damaged.
func (c *call) imageEntries(s *storage) ([]map[string]any, *Error) {
	c.n.mu.Lock()
	vols := s.volumesOf(c.node, c.p.num("vmid"))
	c.n.mu.Unlock()
	var out []map[string]any
	for _, v := range vols {
		if s.Type == Dir {
			if err := c.qemuImgInfo(s, v); err != nil {
				return nil, err
			}
		}
		c.n.mu.Lock()
		out = append(out, s.imageEntry(v))
		c.n.mu.Unlock()
	}
	return out, nil
}

// qemuImgInfo fails as qemu-img info does.
func (c *call) qemuImgInfo(s *storage, v *volume) *Error {
	if err := c.n.pointOf(c, v.vmid, "list.volume"); err != nil {
		return err
	}
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	file := s.filePath(ref{content: "images", key: v.key})
	switch {
	case s.at(c.node)[v.key] != v:
		return dief("qemu-img: Could not open '%s': Could not open '%s': No such file or directory", file, file)
	case v.damaged:
		return dief("qemu-img: Could not open '%s': Unsupported cluster size: 2^0", file)
	}
	return nil
}

// imageEntry is a volume in a list; mu is held.
func (s *storage) imageEntry(v *volume) map[string]any {
	e := map[string]any{"volid": s.volid(v), "format": v.format, "size": v.size, "vmid": v.vmid, "content": "images"}
	switch s.Type {
	case ZFSPool:
		e["name"], e["parent"] = v.key, nil
		if v.parent != "" {
			e["parent"] = v.parent + "@" + v.parentSnap
		}
	case LVMThin:
		e["ctime"] = itoa(int(v.ctime.Unix()))
	case Dir:
		e["ctime"], e["parent"], e["used"] = v.ctime.Unix(), nil, 196616
		if v.parent != "" {
			e["parent"] = "../" + v.parent
		}
	}
	return e
}

// contentDirs are where a dir storage keeps its files.
var contentDirs = map[string]string{"iso": "template/iso", "vztmpl": "template/cache", "backup": "dump", "snippets": "snippets", "import": "import"}

func (c *call) fileEntries(s *storage, kind string) []map[string]any {
	var out []map[string]any
	entries, _ := os.ReadDir(c.n.HostPath(filepath.Join(s.Path, contentDirs[kind])))
	for _, f := range entries {
		info, err := f.Info()
		if err != nil || !info.Mode().IsRegular() {
			continue
		}
		format := strings.TrimPrefix(filepath.Ext(f.Name()), ".")
		if kind == "snippets" {
			format = "snippet"
		}
		out = append(out, map[string]any{
			"volid": s.ID + ":" + kind + "/" + f.Name(), "ctime": info.ModTime().Unix(), "size": info.Size(), "format": format, "content": kind,
		})
	}
	return out
}

var contentSizeRe = regexp.MustCompile(`^(?:\d+[MG]?)$`)

// apiContentCreate is POST …/content: a volume, synchronously. A bare size
// counts KiB.
func apiContentCreate(c *call) (any, *Error) {
	size := c.p.str("size")
	kib := int64(atoi(strings.TrimRight(size, "MG")))
	switch {
	case strings.HasSuffix(size, "M"):
		kib *= 1024
	case strings.HasSuffix(size, "G"):
		kib *= 1024 * 1024
	}
	name, format := c.p.str("filename"), c.p.str("format")
	if m := fileExt.FindStringSubmatch(name); m != nil && m[1] != "subvol" {
		if format != "" && format != m[1] {
			return nil, badParam("format", "different storage formats ("+format+" != "+m[1]+")")
		}
		format = m[1]
	}
	volid, err := c.alloc(c.p.str("storage"), c.p.num("vmid"), format, name, kib)
	if err != nil {
		return nil, err
	}
	return volid, nil
}

// volumeID completes the name of a volume that a path names.
func (c *call) volumeID() (string, *Error) {
	name := c.p.str("volume")
	id := c.p.str("storage")
	if !strings.Contains(name, ":") {
		return id + ":" + name, nil
	}
	if sid, _, _ := strings.Cut(name, ":"); sid != id {
		return "", badParam("volume", "storage ID mismatch ("+sid+" != "+id+")\n")
	}
	return name, nil
}

// apiVolume is GET …/content/VOLUME.
func apiVolume(c *call) (any, *Error) {
	volid, err := c.volumeID()
	if err != nil {
		return nil, err
	}
	if !c.root() {
		if err := c.volumeAllowed(0, volid); err != nil {
			return nil, err
		}
	}
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	s, r, v, err := c.n.findVolume(c.node, volid)
	if err != nil {
		return nil, err
	}
	if r.content != "images" {
		st, e := os.Stat(c.n.HostPath(s.filePath(r)))
		if e != nil {
			return nil, dief("volume_size_info on '%s' failed - no size", volid)
		}
		return map[string]any{"path": s.filePath(r), "size": st.Size(), "used": st.Size(), "format": r.format}, nil
	}
	switch {
	case v == nil && s.Type == ZFSPool:
		return nil, dief("zfs error: cannot open '%s/%s': dataset does not exist", s.Pool, r.key)
	case v == nil:
		return nil, dief("volume_size_info on '%s' failed - no format", volid)
	}
	return map[string]any{"path": s.filePath(r), "size": v.size, "used": 1 << 20, "format": v.format}, nil
}

// apiVolumeDelete is DELETE …/content/VOLUME. No config is asked whether it
// uses the volume.
func apiVolumeDelete(c *call) (any, *Error) {
	volid, err := c.volumeID()
	if err != nil {
		return nil, err
	}
	n := c.n
	n.mu.Lock()
	s, r, err := n.parseVolid(volid)
	inUse := err == nil && n.baseInUse(c.node, s, r)
	n.mu.Unlock()
	if err != nil {
		return nil, err
	}
	if err := c.need("/storage/"+s.ID, "Datastore.Allocate"); err != nil {
		return nil, err
	}
	if inUse {
		return nil, dief("base volume '%s' is still in use by linked clones", r.volname)
	}
	id := s.ID
	if r.vmid != 0 {
		id = itoa(r.vmid) + "@" + s.ID
	}
	data, err := c.fork("imgdel", id, func(w *call) *Error {
		if err := w.removeVolume(s, r, volid); err != nil {
			return err
		}
		w.say("Removed volume '%s'", volid)
		return nil
	})
	if err != nil || !c.p.has("delay") || c.cli {
		return data, err
	}
	return c.waitDelay(data)
}

// removeVolume frees a volume, or removes a file of a dir storage.
func (c *call) removeVolume(s *storage, r ref, volid string) *Error {
	if r.content == "images" {
		return c.freeBusy(volid)
	}
	if err := os.Remove(c.n.HostPath(s.filePath(r))); err != nil && !os.IsNotExist(err) {
		return dief("unlink '%s' failed - %v", s.filePath(r), err)
	}
	return nil
}

// waitDelay answers null when the task has ended in time.
func (c *call) waitDelay(upid any) (any, *Error) {
	c.n.mu.Lock()
	t := c.n.tasks.byID[c.resp.Task]
	c.n.mu.Unlock()
	timer := time.NewTimer(time.Duration(c.p.num("delay")) * c.n.cfg.Waits.Second)
	defer timer.Stop()
	select {
	case <-t.done:
	case <-timer.C:
		return upid, nil
	}
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	if t.status != "OK" && !strings.HasPrefix(t.status, "WARNINGS") {
		return nil, dief("%s", t.status)
	}
	return nil, nil
}

// storagePriv is the privilege to see a storage.
func storagePriv(privs ...string) func(c *call) *Error {
	return func(c *call) *Error { return c.needAny("/storage/"+c.p.str("storage"), privs...) }
}

var volumeFormat = str("format").of("raw", "qcow2", "subvol", "vmdk")

var contentKinds = []string{"images", "rootdir", "vztmpl", "iso", "backup", "snippets", "import", "none"}

var storageCalls = []endpoint{
	{method: "GET", path: "/nodes/{node}/storage", run: apiStorages, params: []param{
		storageParam, str("content"), boolean("enabled"), str("target").as(formatNode), boolean("format"),
	}},
	{method: "GET", path: "/nodes/{node}/storage/{storage}/status", run: apiStorageStatus, perm: storagePriv("Datastore.Audit", "Datastore.AllocateSpace")},
	{method: "GET", path: "/nodes/{node}/storage/{storage}/content", run: apiContent, perm: storagePriv("Datastore.Audit", "Datastore.AllocateSpace"), params: []param{
		str("content").of(contentKinds...), integer("vmid").as(formatVMID),
	}},
	{method: "POST", path: "/nodes/{node}/storage/{storage}/content", run: apiContentCreate, perm: storagePriv("Datastore.AllocateSpace"), params: []param{
		str("filename").must(), integer("vmid").must().as(formatVMID), {name: "size", need: true, pattern: contentSizeRe}, volumeFormat,
	}},
	{method: "GET", path: "/nodes/{node}/storage/{storage}/content/{volume}", run: apiVolume},
	{method: "DELETE", path: "/nodes/{node}/storage/{storage}/content/{volume}", run: apiVolumeDelete, params: []param{integer("delay").between(1, 30)}},
	{method: "POST", path: "/nodes/{node}/storage/{storage}/upload", run: apiUpload, perm: storagePriv("Datastore.AllocateTemplate"), params: []param{
		str("content").must().of("iso", "vztmpl", "import"), str("filename").must().upTo(255), str("checksum"),
		str("checksum-algorithm").of("md5", "sha1", "sha224", "sha256", "sha384", "sha512"), str("tmpfilename"),
	}},
}

// apiUpload is POST …/upload: files of three kinds, never snippets.
func apiUpload(c *call) (any, *Error) {
	s, err := c.storeFor(c.p.str("storage"))
	if err != nil {
		return nil, err
	}
	kind, name := c.p.str("content"), c.p.str("filename")
	switch {
	case s.Type != Dir:
		return nil, dief("can't upload to storage type '%s'", s.Type)
	case !c.p.has("tmpfilename"):
		return nil, dief("missing temporary file name")
	case kind == "iso" && !isoRe.MatchString(name):
		return nil, badParam("filename", "wrong file extension")
	case !s.holds(kind):
		return nil, dief("storage '%s' does not support '%s' content", s.ID, kind)
	}
	dest := s.filePath(ref{content: kind, key: kind + "/" + name})
	return c.fork("imgcopy", "", func(w *call) *Error {
		b, err := os.ReadFile(w.n.HostPath(c.p.str("tmpfilename")))
		if err != nil {
			return dief("import failed: %v", err)
		}
		if kind == "import" && strings.HasSuffix(name, ".qcow2") && !strings.HasPrefix(string(b), "QFI\xfb") {
			return dief("qemu-img: Could not open '%s': Image is not in qcow2 format", name)
		}
		if err := writeFile(w.n.HostPath(dest), b, 0o644); err != nil {
			return dief("import failed: %v", err)
		}
		w.say("finished file import successfully")
		return nil
	})
}

var isoRe = regexp.MustCompile(`(?i)\.(iso|img)$`)

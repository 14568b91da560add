package pvenode

import (
	"context"
	"fmt"
	"os"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// StorageType is a kind of storage.
type StorageType string

// The storages that the model knows.
const (
	ZFSPool StorageType = "zfspool"
	Dir     StorageType = "dir"
	LVMThin StorageType = "lvmthin"
)

// Storage describes a storage. Zero fields have the values that stand beside
// them.
type Storage struct {
	ID      string
	Type    StorageType
	Content []string // zfspool and lvmthin: images, rootdir; dir: all kinds
	Shared  bool     // all nodes see the same volumes
	Nodes   []string // where it is; none is everywhere
	Size    int64    // bytes in all; 60 GiB
	Path    string   // of a dir: /var/lib/vz for "local", else /mnt/pve/ID
	Pool    string   // of a zfspool, "rpool/data"; of lvmthin "pve"
}

// Files makes the real files of volumes on dir storages. Renaming and removing
// is the model's.
type Files interface {
	Create(ctx context.Context, file, format string, size int64) error
	LinkedClone(ctx context.Context, base, file string) error
	// FullClone copies an image, or what it was at a snapshot.
	FullClone(ctx context.Context, src, snap, file, format string) error
	// Snapshot saves an image under a name ("-c"), returns it to that state ("-a") or
	// deletes the state ("-d"), as qemu-img does: no machine uses it.
	Snapshot(ctx context.Context, option, file, name string) error
	Resize(ctx context.Context, file string, size int64) error
	Size(ctx context.Context, file string) (int64, error)
}

// storage is a storage with its volumes, by node ("" when shared) and then by
// key: the volume's own name, of a dir with the directory before it. Node.mu
// guards it.
type storage struct {
	Storage
	vols map[string]map[string]*volume
	full bool
}

type volume struct {
	key        string
	vmid       int
	format     string
	size       int64
	parent     string // key of the volume that it is a clone of
	parentSnap string // and of which snapshot
	snaps      []string
	snapSizes  map[string]int64 // bytes that the volume had at a snapshot
	ctime      time.Time
	busy       bool // a test says that it cannot be freed
	damaged    bool // a test says that qemu-img cannot read it
}

func (n *Node) addStorage(s Storage) error {
	switch s.Type {
	case ZFSPool, LVMThin:
		if s.Content == nil {
			s.Content = []string{"images", "rootdir"}
		}
		if s.Pool == "" {
			s.Pool = map[StorageType]string{ZFSPool: "rpool/data", LVMThin: "pve"}[s.Type]
		}
	case Dir:
		if s.Content == nil {
			s.Content = []string{"images", "rootdir", "vztmpl", "iso", "backup", "snippets", "import"}
		}
		if s.Path == "" {
			s.Path = "/mnt/pve/" + s.ID
			if s.ID == "local" {
				s.Path = "/var/lib/vz"
			}
		}
		if err := os.MkdirAll(n.HostPath(s.Path), 0o755); err != nil {
			return err
		}
	default:
		return fmt.Errorf("storage %q: unknown type %q", s.ID, s.Type)
	}
	if s.Size == 0 {
		s.Size = 60 << 30
	}
	n.storages[s.ID] = &storage{Storage: s, vols: map[string]map[string]*volume{}}
	return nil
}

func (s *storage) at(node string) map[string]*volume {
	if s.Shared {
		node = ""
	}
	if s.vols[node] == nil {
		s.vols[node] = map[string]*volume{}
	}
	return s.vols[node]
}

func (s *storage) on(node string) bool { return len(s.Nodes) == 0 || contains(s.Nodes, node) }

func (s *storage) holds(content string) bool { return contains(s.Content, content) }

// used is what is taken; thin volumes count nothing.
func (s *storage) used(string) int64 {
	used := int64(10 << 30)
	if s.Size < 40<<30 {
		used = s.Size / 6
	}
	if s.full {
		return s.Size
	}
	return used
}

// store finds a storage as the plugins' lookup does; mu is held.
func (n *Node) store(id string) (*storage, *Error) {
	s := n.storages[id]
	if s == nil {
		return nil, dief("storage '%s' does not exist", id)
	}
	return s, nil
}

// storeOn is store for a storage that must be on a node.
func (n *Node) storeOn(id, node string) (*storage, *Error) {
	s, err := n.store(id)
	if err != nil {
		return nil, err
	}
	if !s.on(node) {
		return nil, dief("storage '%s' is not available on node '%s'", id, node)
	}
	return s, nil
}

// ref is a parsed volume id.
type ref struct {
	store   string
	volname string
	key     string
	vmid    int
	isBase  bool
	format  string
	content string // images, iso, snippets, import, vztmpl, backup
}

var (
	zfsName = regexp.MustCompile(`^(?:(base-(\d+)-\S+)/)?((base|vm)-(\d+)-\S+)$`)
	lvmName = regexp.MustCompile(`^((vm|base)-(\d+)-\S+)$`)
	dirDisk = regexp.MustCompile(`^(?:(\d+/[^\s/]+)/)?(\d+)/([^\s/]+)$`)
	dirFile = regexp.MustCompile(`^(iso|vztmpl|backup|snippets|import)/([^/]+)$`)
	fileExt = regexp.MustCompile(`\.(raw|qcow2|vmdk|subvol)$`)
)

// parseVolname reads the name of a volume as the plugin does.
func (s *storage) parseVolname(name string) (ref, *Error) {
	r := ref{store: s.ID, volname: name, format: "raw", content: "images"}
	switch s.Type {
	case ZFSPool:
		m := zfsName.FindStringSubmatch(name)
		if m == nil {
			return r, dief("unable to parse zfs volume name '%s'", name)
		}
		r.key, r.isBase, r.vmid = m[3], m[4] == "base", atoi(m[5])
	case LVMThin:
		m := lvmName.FindStringSubmatch(name)
		if m == nil {
			return r, dief("unable to parse lvm volume name '%s'", name)
		}
		r.key, r.isBase, r.vmid = m[1], m[2] == "base", atoi(m[3])
	case Dir:
		return s.parseDirVolname(r)
	}
	return r, nil
}

func (s *storage) parseDirVolname(r ref) (ref, *Error) {
	if m := dirFile.FindStringSubmatch(r.volname); m != nil {
		r.content, r.key = m[1], r.volname
		r.format = map[string]string{"snippets": "snippet"}[m[1]]
		if r.format == "" {
			r.format = strings.TrimPrefix(path.Ext(m[2]), ".")
		}
		return r, nil
	}
	m := dirDisk.FindStringSubmatch(r.volname)
	if m == nil {
		return r, dief("unable to parse directory volume name '%s'", r.volname)
	}
	f := fileExt.FindStringSubmatch(m[3])
	if f == nil {
		return r, dief("unable to parse volume filename '%s'", m[3])
	}
	r.vmid, r.key, r.format = atoi(m[2]), m[2]+"/"+m[3], f[1]
	r.isBase = strings.HasPrefix(m[3], "base-")
	return r, nil
}

// parseVolid reads a volume id; mu is held.
func (n *Node) parseVolid(volid string) (*storage, ref, *Error) {
	id, name, ok := strings.Cut(volid, ":")
	if !ok || !volidRe.MatchString(volid) {
		return nil, ref{}, dief("unable to parse volume ID '%s'", volid)
	}
	s, err := n.store(id)
	if err != nil {
		return nil, ref{}, err
	}
	r, err := s.parseVolname(name)
	return s, r, err
}

// owner returns the VMID in the name of a volume, or 0; mu is held.
func (n *Node) owner(volid string) int {
	_, r, err := n.parseVolid(volid)
	if err != nil {
		return 0
	}
	return r.vmid
}

// volid builds the id of a volume: with its base before it where the plugin
// names that.
func (s *storage) volid(v *volume) string {
	if v.parentSnap == baseSnap && s.Type != LVMThin && baseKeyRe.MatchString(v.parent) {
		return s.ID + ":" + v.parent + "/" + v.key
	}
	return s.ID + ":" + v.key
}

// baseSnap is the snapshot that a base volume is cloned from.
const baseSnap = "__base__"

var baseKeyRe = regexp.MustCompile(`^(\d+/)?base-`)

// filePath is the path of a volume on the node.
func (s *storage) filePath(r ref) string {
	switch s.Type {
	case ZFSPool:
		return "/dev/zvol/" + s.Pool + "/" + r.key
	case LVMThin:
		return "/dev/" + s.Pool + "/" + r.key
	case Dir:
	}
	switch r.content {
	case "images":
		return s.Path + "/images/" + r.key
	case "iso":
		return s.Path + "/template/" + r.key
	case "vztmpl":
		return s.Path + "/template/cache/" + strings.TrimPrefix(r.key, "vztmpl/")
	case "backup":
		return s.Path + "/dump/" + strings.TrimPrefix(r.key, "backup/")
	}
	return s.Path + "/" + r.key
}

// freeName finds the next free name of a VM's volume.
func (s *storage) freeName(node string, vmid int, format, prefix string) string {
	vols := s.at(node)
	for i := range 1024 {
		key := fmt.Sprintf("%s-%d-disk-%d", prefix, vmid, i)
		if s.Type == Dir {
			if s.taken(vols, itoa(vmid)+"/"+key) {
				continue
			}
			return itoa(vmid) + "/" + key + "." + format
		}
		_, asVM := vols[fmt.Sprintf("vm-%d-disk-%d", vmid, i)]
		_, asBase := vols[fmt.Sprintf("base-%d-disk-%d", vmid, i)]
		if asVM || asBase {
			continue
		}
		return key
	}
	return ""
}

// taken reports whether a disk number is used on a dir storage, in any format.
func (s *storage) taken(vols map[string]*volume, stem string) bool {
	num := stem[strings.LastIndex(stem, "-")+1:]
	dir, _, _ := strings.Cut(stem, "/")
	for k := range vols {
		d, f, _ := strings.Cut(k, "/")
		f = fileExt.ReplaceAllString(f, "")
		if d == dir && diskNumRe.MatchString(f) && f[strings.LastIndex(f, "-")+1:] == num {
			return true
		}
	}
	return false
}

var diskNumRe = regexp.MustCompile(`^(vm|base)-\d+-disk-\d+$`)

// hasFeature is volume_has_feature of the plugins.
func (s *storage) hasFeature(v *volume, r ref, feature, snap string) bool {
	kind := "current"
	switch {
	case snap != "":
		kind = "snap"
	case r.isBase:
		kind = "base"
	}
	table := map[StorageType]map[string]string{
		ZFSPool: {"snapshot": "current snap", "clone": "base", "template": "current", "copy": "base current", "sparseinit": "base current", "rename": "current", "replicate": "base current"},
		LVMThin: {"snapshot": "current", "clone": "base snap", "template": "current", "copy": "base current snap", "sparseinit": "base current", "rename": "current"},
		Dir:     {"snapshot": "current snap", "clone": "base", "template": "current", "copy": "base current snap", "sparseinit": "base current snap", "rename": "current"},
	}
	if s.Type == Dir && v != nil && v.format == "raw" {
		table[Dir] = map[string]string{"clone": "base", "template": "current", "copy": "base current", "sparseinit": "base current", "rename": "current"}
	}
	return contains(strings.Fields(table[s.Type][feature]), kind)
}

func atoi(s string) int { i, _ := strconv.Atoi(s); return i }

// volumesOf lists the keys of a VM's volumes on a storage, in order.
func (s *storage) volumesOf(node string, vmid int) []*volume {
	var out []*volume
	for _, v := range s.at(node) {
		if vmid == 0 || v.vmid == vmid {
			out = append(out, v)
		}
	}
	slices.SortFunc(out, func(a, b *volume) int { return strings.Compare(s.volid(a), s.volid(b)) })
	return out
}

// formatSize writes a size as configs have it: "128M", "1G", "4M".
func formatSize(size int64) string {
	units := []string{"", "K", "M", "G", "T"}
	i := 0
	for size > 0 && size%1024 == 0 && i < len(units)-1 {
		size /= 1024
		i++
	}
	return strconv.FormatInt(size, 10) + units[i]
}

var sizeRe = regexp.MustCompile(`^(\d+(?:\.\d+)?)([KMGT])?$`)

// parseSize reads a size with a unit; without one it counts bytes.
func parseSize(s string) (int64, bool) {
	m := sizeRe.FindStringSubmatch(s)
	if m == nil {
		return 0, false
	}
	f, err := strconv.ParseFloat(m[1], 64)
	if err != nil {
		return 0, false
	}
	shift := map[string]uint{"": 0, "K": 10, "M": 20, "G": 30, "T": 40}[m[2]]
	return int64(f * float64(int64(1)<<shift)), true
}

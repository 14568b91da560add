package qemu

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/qemuvm"
)

// mergeFrom is how many layers a disk may have when its VM starts: more are
// merged into one first.
const mergeFrom = 16

// maxDisks bounds what the files of a disk occupy, in sizes of the disk: deleted
// data stays in layers. If they occupy more they are merged, or the disk is not
// saved.
const maxDisks = 4

// mergePatience limits a merge of layers, which copies what they occupy.
// startMergePatience limits it before a start, which works without it.
const (
	mergePatience      = 10 * time.Minute
	startMergePatience = time.Minute
)

// Files of a merge in a sandbox's directory.
const (
	fileMerged   = "merged" + layerSuffix + tmpSuffix // the new layer, until it is complete
	fileMergeTop = "merge" + layerSuffix + tmpSuffix  // an empty overlay on the disk, to which qemu-img may write
)

// qcow2Header is the begin of a qcow2 file of version 3.
type qcow2Header struct {
	Magic, Version uint32
	NameAt         int64 // of the backing file
	NameSize       uint32
	ClusterBits    uint32
	Size           uint64
	Encryption     uint32
	_              [36]byte
	Features       uint64 // without which the file cannot be read
}

// readQcow2 reads the header of a qcow2 file, and the name of the file that it reads
// from; "" if there is none. The QEMU of a guest wrote the header, so its content is not
// to be trusted: a file that may read from yet another one, or that is encrypted, is an
// error.
func readQcow2(path string) (h struct {
	qcow2Header
	backing string
}, err error) {
	f, err := os.Open(path)
	if err != nil {
		return h, err
	}
	defer func() { _ = f.Close() }()
	if err := binary.Read(f, binary.BigEndian, &h.qcow2Header); err != nil {
		return h, fmt.Errorf("%s: %w", path, err)
	}
	const dirty = 1 // the only feature that our files can have
	if h.Magic != qcowMagic || h.Version != 3 || h.Encryption != 0 || h.Features&^dirty != 0 || h.NameSize > qcowMaxBacking {
		return h, fmt.Errorf("%s is not a disk that AgentLab made", path)
	}
	name := make([]byte, h.NameSize)
	if _, err := f.ReadAt(name, h.NameAt); err != nil {
		return h, fmt.Errorf("%s: %w", path, err)
	}
	h.backing = string(name)
	return h, nil
}

// chain returns the layers from which the disk reads, the newest first. It is an error
// if it reads from anything but them and the image, or if one of the files describes a
// larger disk: its size was forged.
func (f diskFiles) chain() ([]string, error) {
	var chain []string
	for name := fileRoot; ; {
		h, err := readQcow2(filepath.Join(f.dir, name))
		switch {
		case err != nil:
			return nil, err
		case h.Size > uint64(f.size):
			return nil, fmt.Errorf("%s in %s describes a disk of %d bytes, not of %d", name, f.dir, h.Size, f.size)
		case h.backing == f.image:
			return chain, nil
		case !layerName.MatchString(h.backing) || slices.Contains(chain, h.backing):
			return nil, fmt.Errorf("%s in %s reads from %q, which is no layer of it", name, f.dir, h.backing)
		}
		chain = append(chain, h.backing)
		name = h.backing
	}
}

// tidyStopped calls tidyLayers before a start, unless the VM runs already. A start
// has little time, so it begins afterwards.
func (d *Driver) tidyStopped(ctx context.Context, f found) error {
	var in backend.Instance
	if err := d.supervised(f).Power(&in); err != nil || in.Power == backend.PowerRunning || in.Power == backend.PowerSuspended {
		return err
	}
	lock, err := d.supervised(f).LockProcess() // a QEMU whose supervisor was killed has ended
	if err != nil {
		return err
	}
	defer func() { _ = lock.Close() }()
	ctx, cancel := context.WithTimeoutCause(ctx, startMergePatience, errors.New("it takes too long"))
	defer cancel()
	d.tidyLayers(ctx, f)
	return nil
}

// tidyLayers removes what interrupted calls left of layers and restorations, and
// merges the layers of a disk if this is worth it. The caller makes sure that no VM
// uses the disk. A disk that cannot be merged, for example because there is no
// space, stays as it is.
func (d *Driver) tidyLayers(ctx context.Context, f found) {
	_ = os.RemoveAll(filepath.Join(f.Dir, dirRestore+tmpSuffix))
	removeMerge(f.Dir)
	layers, err := layersIn(f.Dir)
	if err != nil || len(layers) == 0 {
		return // who opens the disk reports the error
	}
	size, err := savedSize(f.Handle, f.Dir)
	if err == nil {
		err = d.tidyDisk(ctx, diskFiles{dir: f.Dir, image: f.Image.RootDisk, size: size}, layers)
	}
	if err != nil {
		d.log.Warn("the layers of a disk were not merged", "vmid", f.VMID, "layers", len(layers), "err", err)
	}
}

// diskFiles are root.qcow2 and its layers in a directory.
type diskFiles struct {
	dir   string
	image string // from which the last layer reads; "" for a volume
	size  int64  // of the disk, in bytes
}

// tidyDisk removes the layers that the disk does not need, and merges the others if
// this is worth it.
func (d *Driver) tidyDisk(ctx context.Context, f diskFiles, layers []string) error {
	chain, err := f.chain()
	if err == nil {
		err = removeUnused(f.dir, layers, chain)
	}
	var worth bool
	if err == nil {
		worth, err = d.worthMerging(f, chain)
	}
	if err != nil || !worth {
		return err
	}
	began := time.Now()
	if err = d.mergeLayers(ctx, f, chain); err == nil {
		d.log.Info("the layers of a disk were merged", "dir", f.dir, "layers", len(chain), "took", time.Since(began).Round(time.Millisecond).String())
	}
	return err
}

// diskUse is what the files of a disk occupy, in bytes.
type diskUse struct {
	all, own, shared int64 // own and shared are of the layers that have no link elsewhere, and that have one
	owned            int   // number of the layers without a link elsewhere
}

// diskUseOf examines root.qcow2 and layers in dir.
func diskUseOf(dir string, layers []string) (diskUse, error) {
	var u diskUse
	for _, name := range append([]string{fileRoot}, layers...) {
		var st unix.Stat_t
		if err := unix.Lstat(filepath.Join(dir, name), &st); err != nil {
			return u, fault(err, "cannot check %s", filepath.Join(dir, name))
		}
		n := st.Blocks * 512
		u.all += n
		switch {
		case name == fileRoot:
		case st.Nlink > 1:
			u.shared += n
		default:
			u.own += n
			u.owned++
		}
	}
	return u, nil
}

// worthMerging reports whether the layers of a disk should be merged: they are
// many or large, or several were of snapshots that have been deleted. Layers that
// others use are copied, so these must not be most of what is merged. Without room
// for the copy it is an error.
func (d *Driver) worthMerging(f diskFiles, chain []string) (bool, error) {
	u, err := diskUseOf(f.dir, chain)
	if err != nil {
		return false, err
	}
	if len(chain) < mergeFrom && u.all <= maxDisks*f.size && (u.owned < 2 || u.own < u.shared) {
		return false, nil
	}
	err = qemuvm.RoomFor("a merge", f.dir, d.cfg.PauseBelow, min(u.all, f.size))
	return err == nil, err
}

// removeUnused removes the layers that are not in the chain of the disk.
func removeUnused(dir string, layers, chain []string) error {
	for _, name := range layers {
		if slices.Contains(chain, name) {
			continue
		}
		if err := os.Remove(filepath.Join(dir, name)); err != nil {
			return err
		}
	}
	return nil
}

// removeMerge removes the files of a merge that has ended.
func removeMerge(dir string) {
	for _, name := range []string{fileMerged, fileMergeTop} {
		_ = os.Remove(filepath.Join(dir, name))
	}
}

// mergeLayers merges root.qcow2 and its layers into one new layer. Their files do
// not change: others may have links to them.
func (d *Driver) mergeLayers(ctx context.Context, f diskFiles, chain []string) (err error) {
	img := d.host.QEMUImg()
	path := func(name string) string { return filepath.Join(f.dir, name) }
	defer removeMerge(f.dir)
	if err := createOverlay(ctx, img, path(fileMerged), f.image, "raw", f.size); err != nil {
		return err
	}
	if err := createOverlay(ctx, img, path(fileMergeTop), fileRoot, "qcow2", f.size); err != nil {
		return err
	}
	disk := diskChain(append([]string{fileMergeTop, fileRoot}, chain...), diskFile("qcow2", fileMerged))
	if err := runQEMUImgFor(ctx, mergePatience, img, f.dir, "commit", "-q", "-d", "-b", fileMerged, disk); err != nil {
		return err
	}
	d.at("layers merged")
	layer := newLayerName()
	if err := createOverlay(ctx, img, path(fileRoot+tmpSuffix), layer, "qcow2", f.size); err != nil {
		return err
	}
	err = errors.Join(durable.SyncPath(path(fileMerged)), durable.SyncPath(path(fileRoot+tmpSuffix)), os.Rename(path(fileMerged), path(layer)))
	if err == nil {
		d.at("merged layer named")
		err = os.Rename(path(fileRoot+tmpSuffix), path(fileRoot))
	}
	if err == nil {
		err = durable.SyncPath(f.dir) // before the old ones are removed
	}
	if err != nil {
		return fault(err, "cannot replace the layers of the disk")
	}
	d.at("disk merged")
	return removeUnused(f.dir, chain, nil)
}

// blockNode describes a disk for qemu-img.
type blockNode struct {
	Driver   string     `json:"driver"`
	Filename string     `json:"filename,omitempty"`
	File     *blockNode `json:"file,omitempty"`
	Backing  *blockNode `json:"backing,omitempty"`
}

// diskFile describes a disk in a file.
func diskFile(format, path string) *blockNode {
	return &blockNode{Driver: format, File: &blockNode{Driver: "file", Filename: path}}
}

// diskChain names a disk for qemu-img: qcow2 files, each of which reads from the next
// one, and the last one from base. No name in the files counts.
func diskChain(names []string, base *blockNode) string {
	for _, name := range slices.Backward(names) {
		top := diskFile("qcow2", name)
		top.Backing, base = base, top
	}
	text, _ := json.Marshal(base) // it has only strings
	return "json:" + string(text)
}

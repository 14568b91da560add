package qemu

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/fsfault"
	"github.com/agentlab-vm/agentlab/internal/qemuvm"
)

// The root disk of a sandbox is root.qcow2, an overlay on the image, with any
// number of layers between them. A volume is a root.qcow2 without an image. A layer
// is the former root.qcow2 of a sandbox that was saved; it never changes. Every
// directory that needs a layer has a hard link to it under the same name. So layers
// are shared without counting their users, and a template or a snapshot can be
// deleted at any time.

const layerPrefix, layerSuffix = "disk-", ".qcow2"

// maxLayers bounds the layers of a disk: each one makes reads slower.
const maxLayers = 32

var layerName = regexp.MustCompile(`^disk-[a-z2-9]{16}\.qcow2$`)

func newLayerName() string { return layerPrefix + agentlab.NewUID()[:16] + layerSuffix }

// layersIn returns the names of the layers in dir.
func layersIn(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		if layerName.MatchString(e.Name()) {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// linkFiles links files of one directory into another one. Existing names stay.
func linkFiles(from, to string, names ...string) error {
	for _, name := range names {
		if err := os.Link(filepath.Join(from, name), filepath.Join(to, name)); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	return nil
}

// freezeDisk gives root.qcow2 in dir the name of a new layer, and makes
// root.qcow2 an empty overlay of size bytes on it. A QEMU that has the file open
// continues to write to the layer until a command switches it to the overlay; as
// long as the overlay is empty, both are the same disk. unfreeze undoes it.
func freezeDisk(ctx context.Context, qemuImg, dir string, size int64) (layer string, err error) {
	old, err := layersIn(dir)
	if err != nil {
		return "", fault(err, "cannot read %s", dir)
	}
	if len(old) >= maxLayers {
		return "", agentlab.Errorf(agentlab.CodeConflict, "the disk has %d layers already, one for each save since they were merged", len(old)).
			WithHint("stop the sandbox and start it again, or suspend it to disk and resume it: this merges them; the layers of a volume are merged when it is saved while its sandbox does not run")
	}
	u, err := diskUseOf(dir, old)
	if err != nil {
		return "", err
	}
	if u.all > maxDisks*size {
		return "", agentlab.Errorf(agentlab.CodeNoSpace, "the files of the disk occupy %d MiB, and the disk has %d", u.all>>20, size>>20).
			WithHint("stop the sandbox before you save it: this merges them, if there is enough free disk space")
	}
	layer = newLayerName()
	path := filepath.Join(dir, fileRoot)
	if err := createOverlay(ctx, qemuImg, path+tmpSuffix, layer, "qcow2", size); err != nil {
		return "", err
	}
	if err := durable.SyncPath(path + tmpSuffix); err != nil { // it replaces the only file of the disk's name
		return "", fault(err, "cannot sync %s", path+tmpSuffix)
	}
	if err := os.Link(path, filepath.Join(dir, layer)); err != nil {
		return "", fault(err, "cannot link %s", path)
	}
	if err := os.Rename(path+tmpSuffix, path); err != nil {
		_ = os.Remove(filepath.Join(dir, layer))
		return "", fault(err, "cannot rename %s", path+tmpSuffix)
	}
	return layer, nil
}

// unfreezeDisk undoes freezeDisk, if no QEMU has used the overlay.
func unfreezeDisk(dir, layer string) error {
	return os.Rename(filepath.Join(dir, layer), filepath.Join(dir, fileRoot))
}

// linkDisk gives another directory the disk in dir as it was before freezeDisk:
// all layers, and an empty overlay of size bytes on the last one.
func linkDisk(ctx context.Context, qemuImg, dir, to, layer string, size int64, how durable.Sync) error {
	names, err := layersIn(dir)
	if err == nil {
		err = linkFiles(dir, to, names...)
	}
	if err != nil {
		return fault(err, "cannot link the disk")
	}
	root := filepath.Join(to, fileRoot)
	if err := createOverlay(ctx, qemuImg, root, layer, "qcow2", size); err != nil || how == durable.None {
		return err
	}
	for _, path := range []string{root, filepath.Join(to, layer)} {
		if err := durable.SyncPath(path); err != nil {
			return fault(err, "cannot sync %s", path)
		}
	}
	return nil
}

// createOverlay creates an empty qcow2 file that reads from backing, which is
// not opened: it may be in use. If backing is relative it is in the same
// directory; "" is none.
func createOverlay(ctx context.Context, qemuImg, path, backing, format string, size int64) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fault(err, "cannot remove %s", path)
	}
	args := []string{"create", "-q", "-f", "qcow2"}
	if backing != "" {
		args = append(args, "-u", "-F", format, "-b", backing)
	}
	err := runQEMUImg(ctx, qemuImg, filepath.Dir(path), append(args, filepath.Base(path), strconv.FormatInt(size, 10))...)
	if err == nil {
		if err = os.Chmod(path, 0o600); err != nil {
			err = fault(err, "cannot set permissions of the disk")
		}
	}
	if err != nil {
		_ = os.Remove(path)
	}
	return err
}

// runQEMUImg runs qemu-img in dir, which it writes to. Like QEMU it has no
// capabilities. It must not open a file that a guest's QEMU wrote, unless all that
// this file may refer to is named in its place (merge.go).
func runQEMUImg(ctx context.Context, program, dir string, args ...string) error {
	return runQEMUImgFor(ctx, time.Minute, program, dir, args...)
}

// runQEMUImgFor is runQEMUImg with a time limit.
func runQEMUImgFor(ctx context.Context, limit time.Duration, program, dir string, args ...string) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Dir, cmd.Stderr, cmd.WaitDelay = dir, &stderr, time.Second
	ended, err := qemuvm.StartUnprivileged(cmd, nil, false)
	if err == nil {
		<-ended
		if cmd.ProcessState.Success() {
			return nil
		}
		err = errors.New(cmd.ProcessState.String())
	}
	if ctx.Err() != nil {
		return agentlab.Errorf(agentlab.CodeUnavailable, "qemu-img %s: %w", args[0], context.Cause(ctx))
	}
	if werr := fsfault.ProbeWrite(dir); werr != nil { // it has the errno that qemu-img reports as text only
		err = werr
	}
	return fault(err, "qemu-img %s failed (%s)", args[0], agentlab.OneLine(strings.TrimPrefix(stderr.String(), "qemu-img: "), qemuvm.MaxReason))
}

package machine

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
)

// CreateDisk makes an empty image of that size in bytes. A file that is there
// is an error.
func CreateDisk(ctx context.Context, file, format string, size int64) error {
	if err := vacant(file); err != nil {
		return err
	}
	return qemuImg(ctx, "create", "-q", "-f", format, file, strconv.FormatInt(size, 10))
}

// LinkedClone makes a qcow2 file whose content is base's until it is written
// to, and which needs base for as long as it lives.
func LinkedClone(ctx context.Context, base, baseFormat, file string) error {
	if err := vacant(file); err != nil {
		return err
	}
	rel, err := filepath.Rel(filepath.Dir(file), base)
	if err != nil {
		return err
	}
	return qemuImg(ctx, "create", "-q", "-f", "qcow2", "-F", baseFormat, "-b", rel, file)
}

// FullClone copies an image, or with snap what it was at that snapshot, into one of
// that format; what file held is replaced, as an image is made before it is copied to.
func FullClone(ctx context.Context, from, fromFormat, snap, file, format string) error {
	if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
		return err
	}
	args := []string{"convert", "-f", fromFormat, "-O", format}
	if snap != "" {
		args = append(args, "-l", "snapshot.name="+snap)
	}
	return qemuImg(ctx, append(args, from, file)...)
}

// SnapshotDisk makes ("-c"), applies ("-a") or deletes ("-d") a snapshot inside a qcow2
// image that no machine uses.
func SnapshotDisk(ctx context.Context, option, file, name string) error {
	return qemuImg(ctx, "snapshot", option, name, file)
}

// ResizeDisk makes an image that no machine uses larger; size is in bytes.
func ResizeDisk(ctx context.Context, file, format string, size int64) error {
	return qemuImg(ctx, "resize", "-q", "-f", format, file, strconv.FormatInt(size, 10))
}

// DiskSize returns the virtual size of an image in bytes.
func DiskSize(ctx context.Context, file, format string) (int64, error) {
	out, err := exec.CommandContext(ctx, "qemu-img", "info", "-U", "--output=json", "-f", format, file).Output()
	if err != nil {
		return 0, fmt.Errorf("qemu-img info %s: %w", file, err)
	}
	var info struct {
		Size int64 `json:"virtual-size"`
	}
	err = json.Unmarshal(out, &info)
	return info.Size, err
}

func vacant(file string) error {
	if _, err := os.Lstat(file); err == nil {
		return fmt.Errorf("disk image '%s' already exists", file)
	}
	return os.MkdirAll(filepath.Dir(file), 0o700)
}

func qemuImg(ctx context.Context, args ...string) error {
	var stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, "qemu-img", args...)
	cmd.Stderr = &stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("qemu-img %s: %w: %s", args[0], err, strings.TrimSpace(stderr.String()))
	}
	return nil
}

package machine

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	diskfs "github.com/diskfs/go-diskfs"
	"github.com/diskfs/go-diskfs/disk"
	"github.com/diskfs/go-diskfs/filesystem"
	"github.com/diskfs/go-diskfs/filesystem/iso9660"
)

// SeedSize is the size of a cloud-init drive, in bytes.
const SeedSize = 4 << 20

// WriteSeed fills a cloud-init drive: a NoCloud ISO (volume label cidata, Rock
// Ridge names) with these files, in an image of that format. The image is
// made when it is missing and replaced whole otherwise.
func WriteSeed(ctx context.Context, image, format string, files map[string]string) error {
	dir, err := os.MkdirTemp(filepath.Dir(image), ".seed-*")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	iso := filepath.Join(dir, "seed.iso")
	if err := writeISO(iso, files); err != nil {
		return fmt.Errorf("making the cloud-init ISO: %w", err)
	}
	if err := os.Truncate(iso, SeedSize); err != nil {
		return err
	}
	made := filepath.Join(dir, "image")
	if err := qemuImg(ctx, "convert", "-f", "raw", "-O", format, iso, made); err != nil {
		return err
	}
	return os.Rename(made, image)
}

func writeISO(path string, files map[string]string) error {
	d, err := diskfs.Create(path, SeedSize, diskfs.SectorSizeDefault)
	if err != nil {
		return err
	}
	defer func() { _ = d.Close() }()
	d.LogicalBlocksize = 2048
	made, err := d.CreateFilesystem(disk.FilesystemSpec{FSType: filesystem.TypeISO9660, VolumeLabel: "cidata"})
	if err != nil {
		return err
	}
	defer func() { _ = made.Close() }()
	for name, text := range files {
		f, err := made.OpenFile("/"+name, os.O_CREATE|os.O_RDWR)
		if err != nil {
			return err
		}
		if _, err := f.Write([]byte(text)); err != nil {
			return err
		}
		if err := f.Close(); err != nil {
			return err
		}
	}
	iso, ok := made.(*iso9660.FileSystem)
	if !ok {
		return fmt.Errorf("go-diskfs returned a %T", made)
	}
	return iso.Finalize(iso9660.FinalizeOptions{RockRidge: true, VolumeIdentifier: "cidata"})
}

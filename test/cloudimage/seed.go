package cloudimage

import (
	"errors"
	"os"
	"path/filepath"

	"github.com/diskfs/go-diskfs/backend/file"
	"github.com/diskfs/go-diskfs/filesystem/iso9660"
)

// Seed writes the medium of cloud-init's NoCloud source, as Proxmox makes it:
// an ISO 9660 file system with the label cidata, that holds files by name
// (user-data, meta-data, network-config, vendor-data).
func Seed(path string, files map[string][]byte) error {
	work, err := os.MkdirTemp(filepath.Dir(path), ".seed-*")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(work) }()
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	err = writeISO(f, work, files)
	return errors.Join(err, f.Close())
}

func writeISO(f *os.File, work string, files map[string][]byte) error {
	const size, block = 4 << 20, 2048 // Proxmox's volume has 4 MiB
	if err := f.Truncate(size); err != nil {
		return err
	}
	fs, err := iso9660.Create(file.New(f, false), size, 0, block, work)
	if err != nil {
		return err
	}
	for name, content := range files {
		w, err := fs.OpenFile("/"+name, os.O_CREATE|os.O_RDWR)
		if err != nil {
			return err
		}
		if _, err := w.Write(content); err != nil {
			return errors.Join(err, w.Close())
		}
		if err := w.Close(); err != nil {
			return err
		}
	}
	return fs.Finalize(iso9660.FinalizeOptions{RockRidge: true, VolumeIdentifier: "cidata"})
}

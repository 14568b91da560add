//go:build linux

package initd

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// switchRoot frees the initrd and makes the root disk "/". The mounts below
// /proc, /sys, /dev and /run move along.
func switchRoot() error {
	for _, dir := range []string{"/proc", "/sys", "/dev", "/run"} {
		to := filepath.Join(newRoot, dir)
		if err := os.MkdirAll(to, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(dir, to, "", unix.MS_MOVE, ""); err != nil {
			return fmt.Errorf("moving %s: %w", dir, err)
		}
	}
	if err := freeInitrd(); err != nil {
		return err
	}
	if err := os.Chdir(newRoot); err != nil {
		return err
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return err
	}
	if err := unix.Chroot("."); err != nil {
		return err
	}
	return os.Chdir("/")
}

// freeInitrd removes the files of the initrd, which are memory. It never
// leaves the file system of "/".
func freeInitrd() error {
	var st unix.Statfs_t
	if err := unix.Statfs("/", &st); err != nil {
		return err
	}
	const tmpfs, ramfs = 0x01021994, 0x858458f6
	if st.Type != tmpfs && st.Type != ramfs {
		return fmt.Errorf("the root is not an initrd (file system %#x)", st.Type)
	}
	var dev unix.Stat_t
	if err := unix.Lstat("/", &dev); err != nil {
		return err
	}
	return removeBelow("/", dev.Dev)
}

func removeBelow(dir string, dev uint64) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		name := filepath.Join(dir, e.Name())
		var st unix.Stat_t
		if unix.Lstat(name, &st) != nil || st.Dev != dev {
			continue // a mount point
		}
		if e.IsDir() {
			if err := removeBelow(name, dev); err != nil {
				return err
			}
		}
		_ = os.Remove(name)
	}
	return nil
}

// ensureMachineID creates the machine-id if the image has none, before systemd
// would, and records that it is of this boot (see guestd).
func ensureMachineID() error {
	const name, fresh = "/etc/machine-id", "/run/agentlab/machine-id.new"
	b, err := os.ReadFile(name)
	if err == nil && len(strings.TrimSpace(string(b))) == 32 {
		return nil
	}
	var r [16]byte
	_, _ = rand.Read(r[:])
	r[6], r[8] = r[6]&0x0f|0x40, r[8]&0x3f|0x80
	id := []byte(hex.EncodeToString(r[:]) + "\n")
	if err := os.WriteFile(fresh, id, 0o644); err != nil {
		return err
	}
	_ = os.Remove(name)
	return os.WriteFile(name, id, 0o444)
}

// loopbackUp brings up the loopback device.
func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	ifr, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	ifr.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, ifr)
}

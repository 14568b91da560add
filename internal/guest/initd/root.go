package initd

import (
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// switchRoot frees the initrd and makes the root disk "/". The mounts below
// /proc, /sys, /dev and /run move along.
func switchRoot() error {
	for _, dir := range []string{"/proc", "/sys", "/dev", "/run"} {
		to := filepath.Join(newRoot, dir)
		if err := os.MkdirAll(to, 0o755); err != nil { //nolint:gosec // mount points
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

// ext4 superblock: its position and the fields that are read.
const (
	sbOffset    = 1024
	sbBlocksLo  = 0x04
	sbLogBlock  = 0x18
	sbMagic     = 0x38
	sbBlocksHi  = 0x150
	ext4Magic   = 0xEF53
	ext4Resize  = 0x40086610 // EXT4_IOC_RESIZE_FS, _IOW('f', 16, __u64)
	sectorBytes = 512
)

// ext4Size returns the blocks of the file system whose superblock is sb, and
// the size of a block in bytes.
func ext4Size(sb []byte) (blocks, blockSize uint64, err error) {
	if len(sb) < sbBlocksHi+4 || binary.LittleEndian.Uint16(sb[sbMagic:]) != ext4Magic {
		return 0, 0, fmt.Errorf("no ext4 superblock")
	}
	log := binary.LittleEndian.Uint32(sb[sbLogBlock:])
	if log > 6 {
		return 0, 0, fmt.Errorf("block size 1024<<%d", log)
	}
	blocks = uint64(binary.LittleEndian.Uint32(sb[sbBlocksHi:]))<<32 | uint64(binary.LittleEndian.Uint32(sb[sbBlocksLo:]))
	return blocks, 1024 << log, nil
}

// grow extends the file system mounted at root to the end of its disk, while
// it is in use.
func grow(root string) error {
	var st unix.Stat_t
	if err := unix.Stat(root, &st); err != nil {
		return err
	}
	sys := fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(st.Dev), unix.Minor(st.Dev))
	disk, err := os.Readlink(sys)
	if err != nil {
		return err
	}
	var sectors uint64
	text, err := os.ReadFile(sys + "/size")
	if err == nil {
		_, err = fmt.Sscan(string(text), &sectors)
	}
	if err != nil {
		return err
	}
	sb, err := superblock("/dev/" + filepath.Base(disk))
	if err != nil {
		return err
	}
	have, size, err := ext4Size(sb)
	if err != nil {
		return err
	}
	want := sectors * sectorBytes / size
	if want <= have {
		return nil
	}
	f, err := os.Open(root)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), ext4Resize, uintptr(unsafe.Pointer(&want))); errno != 0 {
		return os.NewSyscallError("EXT4_IOC_RESIZE_FS", errno)
	}
	return nil
}

func superblock(dev string) ([]byte, error) {
	f, err := os.Open(dev)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	sb := make([]byte, 1024)
	_, err = f.ReadAt(sb, sbOffset)
	return sb, err
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
	if err := os.WriteFile(fresh, id, 0o644); err != nil { //nolint:gosec // public
		return err
	}
	_ = os.Remove(name)
	return os.WriteFile(name, id, 0o444) //nolint:gosec // public
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

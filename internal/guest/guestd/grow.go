//go:build linux

package guestd

import (
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ext4 superblock: its position and the fields that are read.
const (
	sbOffset    = 1024
	sbBlocksLo  = 0x04
	sbLogBlock  = 0x18
	sbMagic     = 0x38
	sbLabel     = 0x78
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

// Grow extends the file system mounted at root to the end of its disk, while
// it is in use. It waits up to wait until the disk has least bytes, and returns the
// size of the disk.
func Grow(root string, least int64, wait time.Duration) (int64, error) {
	var st unix.Stat_t
	if err := unix.Stat(root, &st); err != nil {
		return 0, err
	}
	sys := fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(st.Dev), unix.Minor(st.Dev))
	disk, err := os.Readlink(sys)
	if err != nil {
		return 0, err
	}
	bytes, err := diskBytes(sys, least, wait)
	if err != nil {
		return 0, err
	}
	return bytes, growTo(root, "/dev/"+filepath.Base(disk), uint64(bytes))
}

// growTo extends the file system mounted at root, on dev, to bytes.
func growTo(root, dev string, bytes uint64) error {
	sb, err := superblock(dev)
	if err != nil {
		return err
	}
	have, size, err := ext4Size(sb)
	if err != nil {
		return err
	}
	want := bytes / size
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

// diskBytes returns the size of a disk, once it has least bytes.
func diskBytes(sys string, least int64, wait time.Duration) (int64, error) {
	for deadline := time.Now().Add(wait); ; time.Sleep(time.Millisecond) {
		text, err := os.ReadFile(sys + "/size")
		if err != nil {
			return 0, err
		}
		sectors, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
		if err != nil || sectors*sectorBytes >= least {
			return sectors * sectorBytes, err
		}
		if time.Now().After(deadline) {
			return 0, fmt.Errorf("the disk has %d bytes, not %d", sectors*sectorBytes, least)
		}
	}
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

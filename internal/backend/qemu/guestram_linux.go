package qemu

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab/internal/backend/qemu/migration"
)

// guestRAM is the guest's memory in the process of QEMU.
type guestRAM struct {
	pid     int
	start   uint64 // its address in that process
	size    int64  // in bytes
	pagemap *os.File
}

// Bits of an entry of /proc/PID/pagemap (Documentation/admin-guide/mm/pagemap.rst).
const (
	pagePresent = 1 << 63
	pageSwapped = 1 << 62
	pageOfFile  = 1 << 61 // or shared
)

const (
	pagemapEntry = 8
	pagemapRead  = 64 << 10 // bytes at a time
	ramRead      = 1 << 20  // bytes at a time
)

// openRAM returns the memory at an address of a process. The host's rules for
// ptrace (Yama, seccomp) can refuse it.
func openRAM(pid int, start uint64, size int64) (*guestRAM, error) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/pagemap", pid))
	if err != nil {
		return nil, err
	}
	r := &guestRAM{pid: pid, start: start, size: size, pagemap: f}
	if err := r.read(make([]byte, migration.PageSize), 0); err != nil {
		_ = f.Close()
		return nil, err
	}
	return r, nil
}

func (r *guestRAM) Close() error { return r.pagemap.Close() }

// pages is a file to which pages are written.
type pages interface {
	io.WriterAt
	Zero(at, size int64) error // makes a part of it read as zeros
}

// copyWritten copies every page that was written since QEMU mapped the memory. The
// others have the content of the mapped file. The guest must be stopped.
func (r *guestRAM) copyWritten(ctx context.Context, to pages) error {
	entries, buf := make([]byte, pagemapRead), make([]byte, ramRead)
	for at := int64(0); at < r.size; {
		if ctx.Err() != nil {
			return notSaved(ctx)
		}
		n := min(pagemapRead, (r.size-at)/migration.PageSize*pagemapEntry)
		first := (int64(r.start) + at) / migration.PageSize * pagemapEntry
		if _, err := r.pagemap.ReadAt(entries[:n], first); err != nil {
			return err
		}
		for i := int64(0); i < n; {
			begin := i
			for i < n && i-begin < ramRead/migration.PageSize*pagemapEntry && written(entries[i:]) {
				i += pagemapEntry
			}
			if i == begin {
				i += pagemapEntry
				continue
			}
			offset, b := at+begin/pagemapEntry*migration.PageSize, buf[:(i-begin)/pagemapEntry*migration.PageSize]
			if err := r.read(b, offset); err != nil {
				return err
			}
			if err := writePages(to, b, offset); err != nil {
				return err
			}
		}
		at += n / pagemapEntry * migration.PageSize
	}
	return nil
}

var zeroPage [migration.PageSize]byte

// writePages writes pages, and leaves out those of zeros.
func writePages(to pages, b []byte, offset int64) error {
	zero := func(at int) bool { return bytes.Equal(b[at:at+migration.PageSize], zeroPage[:]) }
	for at := 0; at < len(b); {
		begin, isZero := at, zero(at)
		for at += migration.PageSize; at < len(b) && zero(at) == isZero; at += migration.PageSize {
		}
		var err error
		if isZero {
			err = to.Zero(offset+int64(begin), int64(at-begin))
		} else {
			_, err = to.WriteAt(b[begin:at], offset+int64(begin))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// copyData copies the data of a sparse file to an empty one.
func copyData(ctx context.Context, to *memoryFile, from *os.File) error {
	if unix.IoctlFileClone(int(to.Fd()), int(from.Fd())) == nil {
		return nil
	}
	buf := make([]byte, ramRead)
	for end := int64(0); ; {
		begin, err := unix.Seek(int(from.Fd()), end, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return nil // no more data
		}
		if err == nil {
			end, err = unix.Seek(int(from.Fd()), begin, unix.SEEK_HOLE)
		}
		if err != nil {
			return os.NewSyscallError("lseek", err)
		}
		for at := begin; at < end; {
			if ctx.Err() != nil {
				return notSaved(ctx)
			}
			n, err := from.ReadAt(buf[:min(ramRead, end-at)], at)
			if err != nil {
				return err
			}
			if _, err := to.WriteAt(buf[:n], at); err != nil {
				return err
			}
			at += int64(n)
		}
	}
}

// memoryFD returns an empty file in memory, and the same for writing only, which is how
// QEMU opens a file.
func memoryFD() (f, w *os.File, err error) {
	fd, err := unix.MemfdCreate("devices", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, nil, os.NewSyscallError("memfd_create", err)
	}
	f = os.NewFile(uintptr(fd), "devices")
	w, err = os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", fd), os.O_WRONLY, 0)
	if err != nil {
		_ = f.Close()
	}
	return f, w, err
}

// Zero implements pages.
func (f *memoryFile) Zero(at, size int64) error {
	if unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, at, size) == nil {
		return nil
	}
	_, err := f.WriteAt(make([]byte, size), at)
	return err
}

// written reports whether the process has its own copy of a page.
func written(entry []byte) bool {
	e := binary.NativeEndian.Uint64(entry)
	return e&pageSwapped != 0 || e&pagePresent != 0 && e&pageOfFile == 0
}

// read reads the memory at an offset.
func (r *guestRAM) read(b []byte, offset int64) error {
	local := []unix.Iovec{{Base: &b[0]}}
	local[0].SetLen(len(b))
	remote := []unix.RemoteIovec{{Base: uintptr(r.start) + uintptr(offset), Len: len(b)}}
	n, err := unix.ProcessVMReadv(r.pid, local, remote, 0)
	if err == nil && n != len(b) {
		err = errors.New("a part of it cannot be read")
	}
	return os.NewSyscallError("process_vm_readv", err)
}

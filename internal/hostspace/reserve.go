package hostspace

import (
	"crypto/rand"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/fsfault"
)

// ReserveBytes is the size of the reserve: many commits of the database, with
// its write-ahead log and the state files of VMs.
const ReserveBytes = 32 << 20

// PauseLeast is the least free space, in bytes, at which guests that write run.
// Half of it, where all are paused, is more than the reserve, so that a reserve
// that was just released does not let them continue.
const PauseLeast = 4 * ReserveBytes

// PauseBelow returns the free space, in bytes, below which VMs that write are
// paused on a host that keeps least bytes free, and Guard.Keep returns an
// error.
func PauseBelow(least int64) int64 { return max(least/reserve, PauseLeast) }

// Reserve is a file of allocated blocks on the disk of the database. On a full
// disk it is released, so that the commits that end jobs and sandboxes work. It
// is safe for concurrent use.
type Reserve struct {
	path string
	mu   sync.Mutex
}

// NewReserve returns the Reserve with its file at path. It accesses no file.
func NewReserve(path string) *Reserve { return &Reserve{path: path} }

// Held reports whether the reserve is complete.
func (r *Reserve) Held() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.held()
}

func (r *Reserve) held() bool {
	st, err := os.Lstat(r.path)
	return err == nil && st.Mode().IsRegular() && st.Size() == ReserveBytes
}

// leastPart is the size, in bytes, below which the rest of a reserve is
// released as a whole.
const leastPart = 512 << 10

// Release frees half of the rest of the reserve, and reports whether there was
// any. The process that fills the disk may also use the released space, so a
// part is kept for the next time.
func (r *Reserve) Release() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	_ = os.Remove(r.path + durable.Suffix) // incomplete file of a process that was killed
	st, err := os.Lstat(r.path)
	if err != nil || !st.Mode().IsRegular() {
		return false
	}
	if half := st.Size() / 2; half >= leastPart {
		return os.Truncate(r.path, half) == nil
	}
	return os.Remove(r.path) == nil
}

// Make restores the reserve if a part is missing and PauseLeast further bytes are
// free. It is not an error if the disk has less space.
func (r *Reserve) Make() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.held() {
		return nil
	}
	free, err := FreeBytes(filepath.Dir(r.path))
	if err != nil {
		return fsfault.At(r.path, err)
	}
	if free < ReserveBytes+PauseLeast {
		return nil
	}
	tmp := r.path + durable.Suffix
	if err = allocate(tmp); err == nil {
		err = os.Rename(tmp, r.path) // complete under its final name
	}
	if err != nil {
		_ = os.Remove(tmp)
		return fsfault.At(r.path, err)
	}
	return nil
}

// allocate creates a file of ReserveBytes bytes with allocated blocks.
func allocate(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	err = fallocate(f, ReserveBytes)
	if errors.Is(err, unix.EOPNOTSUPP) || err == nil && !allocated(f) {
		// The file system cannot allocate blocks, or does not despite its
		// success. The data must not be compressible.
		if _, err = f.Seek(0, io.SeekStart); err == nil {
			_, err = io.CopyN(f, rand.Reader, ReserveBytes)
		}
		if err == nil {
			err = f.Sync()
		}
	}
	return errors.Join(err, f.Close())
}

// allocated reports whether a file has as many blocks as its size needs.
func allocated(f *os.File) bool {
	st, err := f.Stat()
	if err != nil {
		return false
	}
	sys, ok := st.Sys().(*syscall.Stat_t)
	return ok && sys.Blocks*512 >= ReserveBytes
}

package secret

import (
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/fsfault"
)

// checkMode refuses a file or directory that has any of the mode bits, or
// that belongs to a user other than this one and root.
func checkMode(path string, st fs.FileInfo, refused fs.FileMode) *agentlab.Error {
	if bits := st.Mode().Perm() & refused; bits != 0 {
		what := "read"
		if bits&0o022 != 0 {
			what = "change"
		}
		return agentlab.Errorf(agentlab.CodeDenied, "other users can %s %s (mode %04o)", what, path, st.Mode().Perm()).
			WithHint("chmod %o %s", st.Mode().Perm()&^refused, path)
	}
	if sys, ok := st.Sys().(*syscall.Stat_t); ok && int(sys.Uid) != os.Geteuid() && sys.Uid != 0 {
		return agentlab.Errorf(agentlab.CodeDenied, "%s belongs to user %d", path, sys.Uid).WithHint("it must belong to the user that runs agentlabd, or to root")
	}
	return nil
}

// readPrivate reads a regular file of at most limit bytes that no other user
// may change, nor, by the bits of refused, read. A missing one is
// fs.ErrNotExist, a larger one invalid.
func readPrivate(path string, limit int64, refused fs.FileMode) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, fault(path, err)
	}
	defer func() { _ = f.Close() }()
	st, err := f.Stat()
	if err != nil {
		return nil, fault(path, err)
	}
	if !st.Mode().IsRegular() {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "%s is not a regular file", path)
	}
	if bad := checkMode(path, st, refused); bad != nil {
		return nil, bad
	}
	data, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err != nil {
		return nil, fault(path, err)
	}
	if int64(len(data)) > limit {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "%s has more than %d bytes", path, limit)
	}
	return data, nil
}

// replaceFile writes a private file atomically.
func replaceFile(path string, data []byte) error {
	tmp, err := durable.Temp(filepath.Dir(path), durable.TempPrefix+"*", data)
	if err != nil {
		return fault(path, err)
	}
	defer func() { _ = os.Remove(tmp) }()
	if err = os.Rename(tmp, path); err == nil {
		err = durable.SyncPath(filepath.Dir(path))
	}
	if err != nil {
		return fault(path, err)
	}
	return nil
}

func fault(path string, err error) error { return fsfault.At(path, err) }

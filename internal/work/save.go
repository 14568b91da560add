package work

import (
	"crypto/rand"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/agentlab-vm/agentlab"
)

// SaveTo copies r to a file, which appears under its name only when it is
// complete.
func SaveTo(name string, r io.Reader, force bool, mode fs.FileMode) (int64, error) {
	if _, err := os.Lstat(name); err == nil && !force {
		return 0, agentlab.Errorf(agentlab.CodeExists, "%s exists", name).WithHint("use --force to replace it, or --out to write elsewhere")
	}
	// Unlike os.CreateTemp, this applies the umask to the permissions.
	tmpName := filepath.Join(filepath.Dir(name), ".agentlab-"+rand.Text())
	tmp, err := os.OpenFile(tmpName, os.O_CREATE|os.O_EXCL|os.O_WRONLY, mode)
	if err != nil {
		if e, ok := errors.AsType[*fs.PathError](err); ok {
			err = e.Err // the path is not the user's
		}
		return 0, agentlab.Errorf(agentlab.CodeInvalid, "cannot write %s: %w", name, err).WithHint("choose a file in a directory that exists and that you may write")
	}
	defer func() { _ = os.Remove(tmp.Name()) }()
	n, err := io.Copy(tmp, r)
	if closeErr := tmp.Close(); err == nil {
		err = closeErr
	}
	if err == nil {
		err = os.Rename(tmp.Name(), name)
	}
	if err != nil {
		return 0, agentlab.Errorf(agentlab.CodeUnavailable, "download of %s failed: %w", name, err)
	}
	return n, nil
}

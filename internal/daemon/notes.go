package daemon

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/fsfault"
)

// endingNotes is the directory that keeps, as names of empty files, which
// sandboxes are to be destroyed although the database has no room to say so.
// An empty file needs no block of a full disk.
type endingNotes struct{ dir string }

func (n endingNotes) path(ref backend.Ref) string {
	return filepath.Join(n.dir, strconv.Itoa(ref.VMID)+"-"+ref.UID)
}

// Put implements sandbox.Notes.
func (n endingNotes) Put(ref backend.Ref) error {
	path := n.path(ref)
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o600) //nolint:gosec // a name of ours
	if err == nil {
		err = errors.Join(f.Close(), durable.SyncDir(n.dir))
	}
	if err != nil {
		return fsfault.At(path, err)
	}
	return nil
}

// List implements sandbox.Notes.
func (n endingNotes) List() ([]backend.Ref, error) {
	entries, err := os.ReadDir(n.dir)
	if err != nil {
		return nil, fsfault.At(n.dir, err)
	}
	var out []backend.Ref
	for _, e := range entries {
		number, uid, ok := strings.Cut(e.Name(), "-")
		if vmid, err := strconv.Atoi(number); ok && err == nil {
			out = append(out, backend.Ref{VMID: vmid, UID: uid})
		}
	}
	return out, nil
}

// Remove implements sandbox.Notes.
func (n endingNotes) Remove(ref backend.Ref) error {
	path := n.path(ref)
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fsfault.At(path, err)
	}
	return nil
}

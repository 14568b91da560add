package sandbox

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/fsfault"
)

// destroyIntents is the directory that stores, as names of empty files, the UIDs
// of sandboxes that must be destroyed although their rows do not say so, because
// the database had no disk space for the change. An empty file needs no block on
// a full disk.
// Without a directory nothing is stored.
type destroyIntents struct{ dir string }

// put stores a sandbox. Storing one again succeeds.
func (n destroyIntents) put(uid string) error {
	if n.dir == "" {
		return nil
	}
	path := filepath.Join(n.dir, uid)
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o600) //nolint:gosec // our own name
	if err == nil {
		err = errors.Join(f.Close(), durable.SyncPath(n.dir))
	}
	if err != nil {
		return fsfault.At(path, err)
	}
	return nil
}

// uidOf returns the UID in the name of a file. A file that is already on disk may
// have the name VMID-UID.
func uidOf(name string) string { return name[strings.LastIndexByte(name, '-')+1:] }

// list returns the stored UIDs.
func (n destroyIntents) list() ([]string, error) {
	if n.dir == "" {
		return nil, nil
	}
	entries, err := os.ReadDir(n.dir)
	if err != nil {
		return nil, fsfault.At(n.dir, err)
	}
	var uids []string
	for _, e := range entries {
		uids = append(uids, uidOf(e.Name()))
	}
	return uids, nil
}

// remove removes a sandbox; it need not be stored.
func (n destroyIntents) remove(uid string) error {
	if n.dir == "" {
		return nil
	}
	entries, err := os.ReadDir(n.dir)
	if err != nil {
		return fsfault.At(n.dir, err)
	}
	for _, e := range entries {
		path := filepath.Join(n.dir, e.Name())
		if uidOf(e.Name()) != uid {
			continue
		}
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fsfault.At(path, err)
		}
	}
	return nil
}

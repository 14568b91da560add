package daemon

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
// of sandboxes that must be destroyed, for when the database has no disk space
// for the change. An empty file needs no block on a full disk.
type destroyIntents struct{ dir string }

// Put implements sandbox.Notes.
func (n destroyIntents) Put(uid string) error {
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

// uidOf returns the UID in the name of a note. Older versions named a note
// VMID-UID.
func uidOf(name string) string { return name[strings.LastIndexByte(name, '-')+1:] }

// List implements sandbox.Notes.
func (n destroyIntents) List() ([]string, error) {
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

// Remove implements sandbox.Notes.
func (n destroyIntents) Remove(uid string) error {
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

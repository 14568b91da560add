// Package durable writes files so that neither a crash nor a power cut leaves
// half of one: a file is written under another name, and brought to the disk,
// before its own name means it.
package durable

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// Suffix ends the names of the files that Replace is still writing. One that a
// crash left behind is overwritten by the next Replace.
const Suffix = ".tmp"

// mode is that of all files made here: their owner's alone.
const mode fs.FileMode = 0o600

// Sync says what is on the disk when a file has been replaced.
type Sync int

// How far to wait for the disk.
const (
	// None does not wait: for what a power cut makes worthless anyway.
	None Sync = iota
	// Content waits for the content before the file gets its name. After a
	// power cut the name means the old content or the new one, whole.
	Content
	// Name waits for the folder as well: from now on the name means the new
	// content.
	Name
)

// Replace makes data the content of the file at path in one step. The file has
// mode 0600, whatever there was. It is written under path with Suffix, so of
// callers for one path there may be one at a time; a symbolic link there is
// refused.
func Replace(path string, data []byte, how Sync) error {
	tmp := path + Suffix
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|syscall.O_NOFOLLOW, mode)
	if err != nil {
		return err
	}
	err = fill(f, data, how != None)
	if err == nil {
		err = os.Rename(tmp, path)
	}
	if err == nil && how == Name {
		err = SyncPath(filepath.Dir(path))
	}
	if err != nil {
		_ = os.Remove(tmp)
	}
	return err
}

// ReplaceJSON is Replace with v as indented JSON.
func ReplaceJSON(path string, v any, how Sync) error {
	b, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	return Replace(path, append(b, '\n'), how)
}

// ReadJSON decodes the JSON value in the file at path into v. The error of a
// missing file is fs.ErrNotExist, and that of an unreadable one a *fs.PathError.
func ReadJSON(path string, v any) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(b, v); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

// TempPrefix begins the names of the files that Create is still writing. A crash
// may leave them behind.
const TempPrefix = ".tmp-"

// Create makes a file of mode 0600 with data as its content, and waits until
// both are on the disk. It replaces nothing: an existing file is fs.ErrExist.
// Callers for one path may run at the same time.
func Create(path string, data []byte) error {
	dir := filepath.Dir(path)
	tmp, err := Temp(dir, TempPrefix+"*", data)
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(tmp) }()
	if err := os.Link(tmp, path); err != nil { // unlike a rename, it replaces nothing
		return err
	}
	return SyncPath(dir)
}

// Temp makes a new file of mode 0600 in dir, whose name os.CreateTemp chooses by
// pattern, with data as its content and on the disk. The caller renames or
// removes it; after an error there is none.
func Temp(dir, pattern string, data []byte) (name string, err error) {
	f, err := os.CreateTemp(dir, pattern)
	if err != nil {
		return "", err
	}
	if err := fill(f, data, true); err != nil {
		_ = os.Remove(f.Name())
		return "", err
	}
	return f.Name(), nil
}

// SyncPath waits until the content of a file, or the names in a folder, are on
// the disk.
func SyncPath(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// fill writes a file and closes it.
func fill(f *os.File, data []byte, sync bool) error {
	_, err := f.Write(data)
	if err == nil && sync {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

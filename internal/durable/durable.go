// Package durable writes files atomically, also in case of a crash or a power
// cut: a file is written under a temporary name and synced to disk before it
// is renamed.
package durable

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// Suffix is the suffix of files that Replace is writing. The next Replace
// overwrites one that a crash left behind.
const Suffix = ".tmp"

// mode is the mode of all files of this package: only the owner has access.
const mode fs.FileMode = 0o600

// Sync is what has been synced to disk when a file has been replaced.
type Sync int

// The levels of Sync.
const (
	// None does not sync: for data that is useless after a power cut.
	None Sync = iota
	// Content syncs the content before the rename. After a power cut the
	// file has the old or the new content, complete.
	Content
	// Name also syncs the directory: after a power cut the file has the new
	// content.
	Name
)

// Replace atomically replaces the content of the file at path with data. The
// file has mode 0600, regardless of its old mode. It is written to path with
// Suffix, so there may be only one caller per path at a time; a symbolic link
// there is an error.
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

// ReadJSON decodes the JSON value in the file at path into v. The error is
// fs.ErrNotExist for a missing file, and a *fs.PathError for an unreadable
// one.
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

// TempPrefix is the prefix of files that Create is writing. A crash may leave
// them behind; RemoveTemps removes them.
const TempPrefix = ".tmp-"

// Create creates a file with mode 0600 and the content data, and syncs it to
// disk. The error for an existing file is fs.ErrExist. Concurrent calls for
// one path are allowed.
func Create(path string, data []byte) error {
	dir := filepath.Dir(path)
	tmp, err := Temp(dir, TempPrefix+"*", data)
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(tmp) }()
	if err := os.Link(tmp, path); err != nil { // unlike a rename, it does not replace a file
		return err
	}
	return SyncPath(dir)
}

// RemoveTemps removes the files from dir that killed calls of Create left
// behind, if they are older than age. A missing dir is empty.
func RemoveTemps(dir string, age time.Duration) error {
	files, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, f := range files {
		if !strings.HasPrefix(f.Name(), TempPrefix) {
			continue
		}
		fi, err := f.Info()
		if err == nil && time.Since(fi.ModTime()) > age {
			err = os.Remove(filepath.Join(dir, f.Name()))
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// Temp creates a file with mode 0600 in dir, with a name by os.CreateTemp and
// pattern, and the content data, and syncs it to disk. The caller renames or
// removes it; after an error there is no file.
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

// Copy copies the content of a file to the file at path to, in place, and creates that
// with the permissions perm if it does not exist.
func Copy(from, to string, perm fs.FileMode, how Sync) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer func() { _ = in.Close() }()
	out, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|syscall.O_NOFOLLOW, perm)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	if err == nil && how != None {
		err = out.Sync()
	}
	if err = errors.Join(err, out.Close()); err == nil && how == Name {
		err = SyncPath(filepath.Dir(to))
	}
	return err
}

// SyncPath syncs the content of a file, or the names in a directory, to disk.
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

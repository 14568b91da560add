//go:build !linux

package repocmd

import "os"

// syncFS writes a directory to its disk: guests run Linux, where it writes the file
// system.
func syncFS(dir *os.File) error { return dir.Sync() }

// SyncRefs does nothing: guests run Linux.
func SyncRefs(string) {}

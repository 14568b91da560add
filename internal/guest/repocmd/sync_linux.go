package repocmd

import (
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// syncFS writes the file system of a directory to its disk.
func syncFS(dir *os.File) error {
	return unix.Syncfs(int(dir.Fd()))
}

// fsDirSync is FS_DIRSYNC_FL of <linux/fs.h>: changes of the entries of a directory are on
// the disk when the system call returns. New directories in it inherit the flag.
const fsDirSync = 0x10000

// SyncRefs makes the file system write changes of refs and of HEAD to the disk at once. Git
// replaces these files: it writes the new one to the disk before, but not its name, which
// ext4 writes up to five seconds later. Objects need no flag: their names are written with
// those of refs. File systems without the flag, and directories of another user, stay.
func SyncRefs(gitDir string) {
	for _, below := range []string{"refs", "worktrees"} {
		_ = filepath.WalkDir(filepath.Join(gitDir, below), func(name string, d fs.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				setDirSync(name)
			}
			return nil
		})
	}
	setDirSync(gitDir)
}

func setDirSync(dir string) {
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return
	}
	defer unix.Close(fd) //nolint:errcheck // a directory that was only read
	if flags, err := unix.IoctlGetUint32(fd, unix.FS_IOC_GETFLAGS); err == nil && flags&fsDirSync == 0 {
		_ = unix.IoctlSetPointerInt(fd, unix.FS_IOC_SETFLAGS, int(flags|fsDirSync))
	}
}

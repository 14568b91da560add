package store

import (
	"context"
	"errors"
	"io/fs"
	"path/filepath"

	"golang.org/x/sys/unix"
	"modernc.org/sqlite"
	sqlite3 "modernc.org/sqlite/lib"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/fsfault"
)

// fault adds a code to an error of SQLite or the system. It returns an error
// with a code, and nil, unchanged.
func fault(err error) error {
	if err == nil {
		return nil
	}
	if _, ok := errors.AsType[*agentlab.Error](err); ok {
		return err
	}
	e := &agentlab.Error{Code: agentlab.CodeInternal, Message: "the database failed", Err: err}
	if s, ok := errors.AsType[*sqlite.Error](err); ok {
		e.Code, e.Message, e.Hint = classify(s.Code())
		return e
	}
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		e.Code, e.Message = agentlab.CodeTimeout, "timeout before the database could be used"
	case errors.Is(err, context.Canceled):
		e.Code, e.Message = agentlab.CodeUnavailable, "cancelled before the database was used"
	case fsfault.Full(err):
		e.Code, e.Message, e.Hint = classify(sqlite3.SQLITE_FULL)
	case errors.Is(err, fs.ErrPermission), errors.Is(err, unix.EROFS):
		e.Code, e.Message = agentlab.CodeDenied, "no permission to write the database"
	}
	return e
}

// classify maps a result code of SQLite. Its low byte is the primary code.
func classify(code int) (c agentlab.Code, message, hint string) {
	switch code {
	case sqlite3.SQLITE_CONSTRAINT_UNIQUE, sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY:
		return agentlab.CodeExists, "it exists already", ""
	case sqlite3.SQLITE_CONSTRAINT_FOREIGNKEY, sqlite3.SQLITE_CONSTRAINT_TRIGGER: // the latter for ON DELETE RESTRICT
		return agentlab.CodeConflict, "it references another object, or is referenced by one", ""
	}
	if code == sqlite3.SQLITE_IOERR_SHMSIZE { // it has no other cause
		code = sqlite3.SQLITE_FULL
	}
	switch code & 0xff {
	case sqlite3.SQLITE_FULL:
		return agentlab.CodeNoSpace, "no space left for the database", "free disk space and try again; nothing was changed"
	case sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED:
		return agentlab.CodeBusy, "another process uses the database", "try again"
	case sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB:
		return agentlab.CodeUnavailable, "the database is damaged",
			"restore a backup: agentlab db restore; or create a database from the files of the jobs: agentlab db rebuild"
	case sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH:
		return agentlab.CodeDenied, "no permission to write the database", "check the owner of the file and of its directory"
	case sqlite3.SQLITE_CANTOPEN:
		return agentlab.CodeUnavailable, "the database cannot be opened", "check that its directory exists and is yours"
	case sqlite3.SQLITE_IOERR:
		return agentlab.CodeUnavailable, "disk error in the database", "see the kernel log"
	}
	return agentlab.CodeInternal, "the database failed", ""
}

// minFreeSpace is the free space, in bytes, below which a disk error of the
// database counts as a full disk.
const minFreeSpace = 1 << 20

// fullDisk reports whether the store failed because the disk of the database
// at path is full. It checks only errors of SQLite and the system: a caller's
// own error may have code no_space for other reasons.
func fullDisk(path string, err error) bool {
	if fsfault.Full(err) {
		return true
	}
	s, ok := errors.AsType[*sqlite.Error](err)
	if !ok {
		return false
	}
	if code, _, _ := classify(s.Code()); code == agentlab.CodeNoSpace {
		return true
	}
	switch s.Code() {
	// SQLite does not report the cause of these errors, so check the disk. The
	// last ones are for a file that cannot be created.
	case sqlite3.SQLITE_IOERR, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_FSYNC, sqlite3.SQLITE_IOERR_DIR_FSYNC, sqlite3.SQLITE_IOERR_TRUNCATE,
		sqlite3.SQLITE_IOERR_SHMMAP, sqlite3.SQLITE_IOERR_SHMOPEN, sqlite3.SQLITE_IOERR_CLOSE, sqlite3.SQLITE_CANTOPEN:
		var st unix.Statfs_t
		serr := unix.Statfs(filepath.Dir(path), &st)
		return serr == nil && (st.Bavail*uint64(st.Bsize) < minFreeSpace || st.Files > 0 && st.Ffree == 0)
	}
	return false
}

// withSpace runs do, and runs it once more if the disk was full and full freed
// space. If there is still not enough space, the error has code no_space.
func withSpace(path string, full func() bool, do func() error) error {
	err := do()
	if err == nil || !fullDisk(path, err) {
		return err
	}
	if full != nil && full() {
		if err = do(); err == nil || !fullDisk(path, err) {
			return err
		}
	}
	if agentlab.CodeOf(err) == agentlab.CodeNoSpace {
		return err
	}
	e := &agentlab.Error{Err: err}
	e.Code, e.Message, e.Hint = classify(sqlite3.SQLITE_FULL)
	return e
}

// inFile adds the name of the database file to err.
func inFile(path string, err error) error {
	e, ok := errors.AsType[*agentlab.Error](err)
	if !ok {
		return err
	}
	c := *e
	c.Message = path + ": " + e.Message
	return &c
}

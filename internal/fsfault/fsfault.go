// Package fsfault maps errors of the file system to codes.
package fsfault

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"

	"github.com/agentlab-vm/agentlab"
)

// Code returns the code for an error of the file system: denied (permission, a
// read-only file system), no_space (full, or over quota), otherwise internal.
// The caller handles missing files and files of the wrong type.
func Code(err error) agentlab.Code {
	switch {
	case errors.Is(err, fs.ErrPermission), errors.Is(err, syscall.EROFS):
		return agentlab.CodeDenied
	case Full(err):
		return agentlab.CodeNoSpace
	}
	return agentlab.CodeInternal
}

// Full reports whether err is that of a disk that is full, or of a user over quota.
func Full(err error) bool { return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) }

// At returns err with its code and the given path, without the operation and
// the name of a temporary file in the system's error.
func At(path string, err error) *agentlab.Error {
	e := &agentlab.Error{Code: Code(err), Message: path, Err: err}
	if errno := syscall.Errno(0); errors.As(err, &errno) {
		e.Err = errno
	} else if pe, ok := errors.AsType[*fs.PathError](err); ok {
		e.Err = pe.Err
	}
	return e
}

// Own returns err, about a file of the program itself, with its code and a
// message; full is the hint if there is no space. A read-only file system has
// code internal here: the cause is the machine, not the caller's rights.
func Own(err error, full, format string, args ...any) *agentlab.Error {
	e := &agentlab.Error{Code: Code(err), Message: fmt.Sprintf(format, args...), Err: err}
	switch {
	case e.Code == agentlab.CodeNoSpace:
		e.Hint = full
	case errors.Is(err, syscall.EROFS):
		e.Code = agentlab.CodeInternal
	}
	return e
}

// ProbeWrite tries to write a file in dir. Its error has the cause where a
// program that failed to write there reports it only as text.
func ProbeWrite(dir string) error {
	f, err := os.CreateTemp(dir, "probe*.tmp")
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(f.Name()) }()
	_, err = f.Write(make([]byte, 256<<10))
	return errors.Join(err, f.Close())
}

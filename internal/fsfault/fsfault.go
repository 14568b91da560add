// Package fsfault gives errors of the file system their codes, in one place.
package fsfault

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"

	"github.com/agentlab-vm/agentlab"
)

// Code tells what an error of the file system means for who asked: denied
// (permission, a read-only file system), no_space (full, or over quota), else
// internal. What a missing file or one of the wrong kind means, the caller
// knows better.
func Code(err error) agentlab.Code {
	switch {
	case errors.Is(err, fs.ErrPermission), errors.Is(err, syscall.EROFS):
		return agentlab.CodeDenied
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return agentlab.CodeNoSpace
	}
	return agentlab.CodeInternal
}

// At makes err an error with its code and the path that was asked for, without
// the operation and the name of a temporary file that the system's error has.
func At(path string, err error) *agentlab.Error {
	e := &agentlab.Error{Code: Code(err), Message: path, Err: err}
	if errno := syscall.Errno(0); errors.As(err, &errno) {
		e.Err = errno
	} else if pe, ok := errors.AsType[*fs.PathError](err); ok {
		e.Err = pe.Err
	}
	return e
}

// Own makes err, about files that are the program's own, an error with its code
// and a message; full is the hint when there is no space. A read-only file
// system is internal here: whoever asked was not refused anything, the machine
// is at fault.
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

package fsfault_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/fsfault"
)

func TestCode(t *testing.T) {
	for err, want := range map[error]agentlab.Code{
		fs.ErrPermission: agentlab.CodeDenied,
		&os.PathError{Op: "open", Path: "x", Err: syscall.EACCES}: agentlab.CodeDenied,
		syscall.EROFS: agentlab.CodeDenied,
		&os.LinkError{Op: "rename", Old: "a", New: "b", Err: syscall.ENOSPC}: agentlab.CodeNoSpace,
		fmt.Errorf("write: %w", syscall.EDQUOT):                              agentlab.CodeNoSpace,
		syscall.EIO:                                                          agentlab.CodeInternal,
		errors.New("else"):                                                   agentlab.CodeInternal,
	} {
		if got := fsfault.Code(err); got != want {
			t.Errorf("%v: %s, want %s", err, got, want)
		}
	}
}

func TestAtNamesTheRequestedPath(t *testing.T) {
	_, err := os.Open(filepath.Join(t.TempDir(), ".tmp-123"))
	e := fsfault.At("/etc/wanted", err)
	if text := e.Error(); strings.Contains(text, ".tmp-123") || !strings.Contains(text, "/etc/wanted") {
		t.Errorf("%s", text)
	}
	if !errors.Is(e, fs.ErrNotExist) {
		t.Error("the cause is lost")
	}
	if e := fsfault.At("p", fs.ErrPermission); e.Code != agentlab.CodeDenied {
		t.Errorf("%v", e)
	}
}

func TestOwn(t *testing.T) {
	for err, want := range map[error]agentlab.Code{
		&os.PathError{Op: "open", Path: "x", Err: syscall.EACCES}: agentlab.CodeDenied,
		syscall.EROFS: agentlab.CodeInternal,
		&os.LinkError{Op: "rename", Old: "a", New: "b", Err: syscall.ENOSPC}: agentlab.CodeNoSpace,
		errors.New("else"): agentlab.CodeInternal,
	} {
		e := fsfault.Own(err, "make room", "cannot keep %d", 7)
		if e.Code != want || !errors.Is(e, err) || !strings.HasPrefix(e.Error(), "cannot keep 7") {
			t.Errorf("%v: %s %q, want %s", err, e.Code, e, want)
		}
		if (e.Hint == "make room") != (want == agentlab.CodeNoSpace) {
			t.Errorf("%v: hint %q", err, e.Hint)
		}
	}
}

//go:build linux

package guestd

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"testing"
)

const envInner = "AGENTLAB_TEST_INNER"

// The tests mount disks. They run in a mount namespace of their own: a namespace that
// another process makes meanwhile would have copies of the mounts, and its disks would
// stay in use after they are unmounted.
func TestMain(m *testing.M) {
	if os.Geteuid() != 0 || os.Getenv(envInner) != "" {
		os.Exit(m.Run())
	}
	self, err := os.Executable()
	if err != nil {
		panic(err)
	}
	cmd := exec.Command(self, os.Args[1:]...)
	cmd.Env = append(os.Environ(), envInner+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	runtime.LockOSThread() // Pdeathsig is about the thread that starts it
	if err := cmd.Run(); err != nil {
		if _, ok := errors.AsType[*exec.ExitError](err); !ok {
			fmt.Println("no mount namespace:", err)
			os.Exit(1)
		}
	}
	os.Exit(cmd.ProcessState.ExitCode())
}

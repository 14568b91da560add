package limactl

import (
	"os"
	"os/exec"
	"os/user"
	"strconv"
	"syscall"
)

// UserAttr returns the attributes of a process in a user namespace in which root is an
// ordinary user of this machine: limactl does not run as root, and its user must exist. The
// files of root are the user's own there. For an ordinary user it returns nil.
func UserAttr() (*syscall.SysProcAttr, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	account, err := user.Lookup("nobody")
	if err != nil {
		return nil, err
	}
	uid, err := strconv.Atoi(account.Uid)
	if err != nil {
		return nil, err
	}
	gid, err := strconv.Atoi(account.Gid)
	if err != nil {
		return nil, err
	}
	return &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: uid, HostID: 0, Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: gid, HostID: 0, Size: 1}},
	}, nil
}

// AsUser runs this program again with UserAttr, and returns its exit code. It reports false,
// and does nothing, if the process is not root.
func AsUser() (code int, ran bool) {
	attr, err := UserAttr()
	if err == nil && attr == nil {
		return 0, false
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Args[0] = os.Args[0]
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = attr
	if err == nil {
		attr.Pdeathsig = syscall.SIGKILL
		err = cmd.Run()
	}
	if cmd.ProcessState == nil {
		_, _ = os.Stderr.WriteString(err.Error() + "\n")
		return 1, true
	}
	return cmd.ProcessState.ExitCode(), true
}

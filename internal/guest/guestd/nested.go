//go:build linux

package guestd

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
)

// This file makes KVM usable in a guest whose CPUs have virtualization.

const (
	kvmDevice = "/dev/kvm"
	kvmGroup  = "kvm"
	// nestedFile has the result of the last test in this boot.
	nestedFile = runDir + "/nested"
	// modprobeWait limits the loading of modules.
	modprobeWait = 20 * time.Second
)

// setNested does what an identity wants (guestapi.Identity.Nested), and reports whether
// its job can run.
func (s *Server) setNested(wanted string) (bool, error) {
	if wanted == "" {
		return true, removeFile(s.path(nestedFile)) // of a template, or of another identity
	}
	state, err := s.ensureNested()
	return wanted != string(agentlab.NestedOn) || state == agentlab.NestedWorks, err
}

// ensureNested makes /dev/kvm usable for the agent's user, and returns whether it
// works.
func (s *Server) ensureNested() (agentlab.NestedState, error) {
	state := s.cfg.Kernel.LoadKVM()
	if state == agentlab.NestedWorks {
		if err := s.shareKVM(); err != nil {
			s.log.Warn("users cannot open "+kvmDevice, "err", err)
			state = agentlab.NestedNoAccess
		}
		s.slice.WatchVMs(kvmModule())
	}
	return state, s.overwriteFile(nestedFile, []byte(state+"\n"), 0o644)
}

// shareKVM gives the device to the group kvm if the agent's user is a member,
// otherwise to the group of this user. There is no udev that does it.
func (s *Server) shareKVM() error {
	a, err := s.account("")
	if err != nil {
		return err
	}
	gid := a.gid
	_ = eachLine(s.path("/etc/group"), func(f []string) { // no file: no such group
		if len(f) < 4 || f[0] != kvmGroup {
			return
		}
		if n, err := strconv.ParseUint(f[2], 10, 32); err == nil && slices.Contains(a.groups, uint32(n)) {
			gid = uint32(n)
		}
	})
	return s.cfg.Kernel.ShareKVM(int(gid))
}

// LoadKVM implements Kernel.
func (linuxKernel) LoadKVM() agentlab.NestedState {
	module := kvmModule()
	if module == "" {
		return agentlab.NestedNoCPU
	}
	if _, err := os.Stat(kvmDevice); errors.Is(err, fs.ErrNotExist) {
		ctx, cancel := context.WithTimeout(context.Background(), modprobeWait)
		defer cancel()
		if err := exec.CommandContext(ctx, "modprobe", module).Run(); err != nil {
			return agentlab.NestedNoModule
		}
	}
	return tryKVM(kvmDevice)
}

// ShareKVM implements Kernel.
func (linuxKernel) ShareKVM(gid int) error {
	return errors.Join(os.Lchown(kvmDevice, 0, gid), os.Chmod(kvmDevice, 0o660))
}

// kvmModule returns the module of KVM for the processor, "" if it has no
// virtualization.
func kvmModule() string {
	info, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(info)) {
		name, flags, _ := strings.Cut(line, ":")
		if strings.TrimSpace(name) != "flags" {
			continue
		}
		for _, flag := range strings.Fields(flags) {
			switch flag {
			case "vmx":
				return "kvm_intel"
			case "svm":
				return "kvm_amd"
			}
		}
		return ""
	}
	return ""
}

// tryKVM creates a virtual machine: a device file that exists proves nothing.
func tryKVM(device string) agentlab.NestedState {
	const getAPIVersion, createVM, version = 0xae00, 0xae01, 12
	f, err := os.OpenFile(device, os.O_RDWR, 0)
	if err != nil {
		return agentlab.NestedNoAccess
	}
	defer func() { _ = f.Close() }()
	if v, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), getAPIVersion, 0); errno != 0 || v != version {
		return agentlab.NestedNoVM
	}
	vm, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), createVM, 0)
	if errno != 0 {
		return agentlab.NestedNoVM
	}
	_ = unix.Close(int(vm))
	return agentlab.NestedWorks
}

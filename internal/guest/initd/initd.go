//go:build linux

package initd

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// rootSerial is the serial number that the backend gives to the root disk.
	rootSerial = "agentlab-root"
	rootWait   = 30 * time.Second
	newRoot    = "/sysroot"
	modulesDir = "/lib/agentlab/modules"
	binDir     = "/run/agentlab/bin"
	program    = binDir + "/agent-runner"
	realInit   = "/sbin/init"
)

// Main is PID 1. It does not return: it executes the distribution's init, or
// prints an error and stops the machine.
func Main() int {
	debug.SetGCPercent(-1) // this process runs for less than a second
	err := boot()
	openConsole()
	printConsole("this sandbox cannot boot: %v", err)
	unix.Sync()
	// QEMU runs with -no-reboot, so a restart ends it on every machine type,
	// unlike a power-off.
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART)
	return 1
}

func boot() error {
	var m bootMarks
	m.add("init")
	if err := mountKernel(); err != nil {
		return err
	}
	openConsole()
	guestd, err := startEarlyGuestd()
	if err != nil {
		return fmt.Errorf("control server: %w", err)
	}
	m.add("guestd")
	now, then := readModules()
	loadModules(now)
	openConsole() // its driver may be one of them
	m.add("modules")
	if err := switchToRoot(&m); err != nil {
		return err
	}
	if err := guestd.release(); err != nil {
		return fmt.Errorf("control server: %w", err)
	}
	guestd.wait(answerWait)
	m.add("answer")
	loadModules(then)
	m.add("more")
	guestd.wait(identityWait)
	m.add("identity")
	awaitIdle(idleWindow, settleLimit, cpuTimes)
	m.add("idle")
	if err := guestd.leaveSupervisor(); err != nil {
		return fmt.Errorf("supervisor: %w", err)
	}
	m.log()
	err = unix.Exec(realInit, []string{realInit}, []string{"HOME=/", "TERM=linux"})
	return fmt.Errorf("%s: %w", realInit, err)
}

// switchToRoot makes the root disk "/" and prepares it.
func switchToRoot(m *bootMarks) error {
	disk, err := waitRoot()
	if err != nil {
		return err
	}
	if err := mountRoot(disk); err != nil {
		return err
	}
	m.add("root")
	if err := setUpRun(); err != nil {
		return fmt.Errorf("/run: %w", err)
	}
	if err := loopbackUp(); err != nil {
		return fmt.Errorf("loopback: %w", err)
	}
	if err := switchRoot(); err != nil {
		return fmt.Errorf("switching to the root disk: %w", err)
	}
	if err := ensureMachineID(); err != nil {
		return fmt.Errorf("machine-id: %w", err)
	}
	m.add("switch")
	return nil
}

type mount struct {
	source, target, fstype string
	flags                  uintptr
	data                   string
}

// kernelMounts are the mounts that systemd would make; it leaves existing ones.
var kernelMounts = []mount{
	{"proc", "/proc", "proc", unix.MS_NOSUID | unix.MS_NOEXEC | unix.MS_NODEV, ""},
	{"sysfs", "/sys", "sysfs", unix.MS_NOSUID | unix.MS_NOEXEC | unix.MS_NODEV, ""},
	{"cgroup2", "/sys/fs/cgroup", "cgroup2", unix.MS_NOSUID | unix.MS_NOEXEC | unix.MS_NODEV, "nsdelegate,memory_recursiveprot"},
	{"devtmpfs", "/dev", "devtmpfs", unix.MS_NOSUID | unix.MS_STRICTATIME, "mode=0755"},
	{"devpts", "/dev/pts", "devpts", unix.MS_NOSUID | unix.MS_NOEXEC, "mode=0620,gid=5,ptmxmode=0666"},
	{"tmpfs", "/dev/shm", "tmpfs", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_STRICTATIME, "mode=1777"},
	{"tmpfs", "/run", "tmpfs", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_STRICTATIME, "mode=0755,size=20%,nr_inodes=800k"},
}

func mountKernel() error {
	for _, m := range kernelMounts {
		if err := os.MkdirAll(m.target, 0o755); err != nil {
			return err
		}
		err := unix.Mount(m.source, m.target, m.fstype, m.flags, m.data)
		if err != nil && !errors.Is(err, unix.EBUSY) {
			return fmt.Errorf("mounting %s: %w", m.target, err)
		}
	}
	for name, to := range map[string]string{
		"/dev/fd": "/proc/self/fd", "/dev/stdin": "/proc/self/fd/0",
		"/dev/stdout": "/proc/self/fd/1", "/dev/stderr": "/proc/self/fd/2",
	} {
		_ = os.Symlink(to, name)
	}
	return nil
}

// openConsole opens the console as standard streams: at the start there is
// none if its driver is a module.
func openConsole() {
	fd, err := unix.Open("/dev/console", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return
	}
	for i := range 3 {
		_ = unix.Dup3(fd, i, 0)
	}
	if fd > 2 {
		_ = unix.Close(fd)
	}
}

// waitRoot returns the name of the root disk, e.g. "vda".
func waitRoot() (string, error) {
	for deadline := time.Now().Add(rootWait); ; {
		names, _ := filepath.Glob("/sys/block/*/serial")
		var seen []string
		for _, name := range names {
			b, err := os.ReadFile(name)
			if err != nil {
				continue
			}
			disk := filepath.Base(filepath.Dir(name))
			serial := strings.TrimSpace(string(b))
			if serial == rootSerial {
				return disk, nil
			}
			seen = append(seen, disk+"="+serial)
		}
		if time.Now().After(deadline) {
			return "", fmt.Errorf("no disk has the serial %q after %s; seen: %q", rootSerial, rootWait, seen)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

func mountRoot(disk string) error {
	dev := "/dev/" + disk
	if err := os.MkdirAll(newRoot, 0o755); err != nil {
		return err
	}
	// noinit_itable: otherwise the kernel would zero inode tables in the
	// background, which are already zeros in a sparse image, and so fill
	// the overlay.
	if err := unix.Mount(dev, newRoot, "ext4", unix.MS_NOATIME, "noinit_itable"); err != nil {
		return fmt.Errorf("mounting %s: %w", dev, err)
	}
	if _, err := os.Stat(filepath.Join(newRoot, "etc")); err != nil {
		return fmt.Errorf("%s contains no operating system: %w", dev, err)
	}
	return nil
}

// setUpRun makes this program available after the initrd is freed.
func setUpRun() error {
	if err := os.MkdirAll(binDir, 0o755); err != nil {
		return err
	}
	if err := preserveProgram(program); err != nil {
		return err
	}
	if err := os.Symlink("agent-runner", filepath.Join(binDir, "agentlab-agent")); err != nil {
		return err
	}
	return preservePrograms()
}

// runFiles are units that prevent systemd from emptying /tmp or mounting over
// it, because the runner uses it before systemd would, and from unmounting
// agent-runner while it runs.
var runFiles = map[string]string{
	"tmpfiles.d/tmp.conf": "d /tmp 1777 root root -\nd /var/tmp 1777 root root -\n",
	`systemd/system/run-agentlab-bin-agent\x2drunner.mount.d/agentlab.conf`: "[Unit]\nDefaultDependencies=no\n",
}

func preservePrograms() error {
	for name, content := range runFiles {
		name = filepath.Join("/run", name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(name, []byte(content), 0o644); err != nil {
			return err
		}
	}
	return os.Symlink("/dev/null", "/run/systemd/system/tmp.mount")
}

// preserveProgram bind-mounts this program's file at name. A bind mount needs
// neither time nor memory; the file stays in the initrd's file system without
// a name.
func preserveProgram(name string) error {
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o755)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	if unix.Mount("/proc/self/exe", name, "", unix.MS_BIND, "") == nil {
		return nil
	}
	in, err := os.Open("/proc/self/exe")
	if err != nil {
		return err
	}
	defer func() { _ = in.Close() }()
	_, err = io.Copy(f, in)
	return err
}

//go:build linux

package guestd

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
)

// The disk of a workspace holds an ext4 file system, which only guests read and
// write. A guest can damage it as it likes; whatever it holds is opened in guests
// only.

const (
	// volumeWait is how long a guest may take to see a disk that was attached or
	// enlarged.
	volumeWait = 30 * time.Second
	// maxUsers bounds the processes that the error of an unmount names.
	maxUsers = 5
)

func (s *Server) handleMount(w http.ResponseWriter, r *http.Request) {
	var req guestapi.WorkspaceRequest
	if !decode(w, r, &req) {
		return
	}
	s.workMu.Lock()
	defer s.workMu.Unlock()
	s.thaw()
	a, err := s.account("")
	if err != nil {
		fail(w, err)
		return
	}
	v, err := findVolume(r.Context(), "/sys/block", req.Bytes, volumeWait)
	if err != nil {
		fail(w, err)
		return
	}
	// A client that has gone must not end e2fsck while it writes.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), guestapi.MountTimeout)
	defer cancel()
	ws, err := v.mount(ctx, s.path(guestapi.WorkspaceDir), req.Format, int(a.uid), int(a.gid))
	if err != nil {
		s.log.Error("the workspace was not mounted", "err", err)
		fail(w, err)
		return
	}
	reply(w, ws)
}

func (s *Server) handleUnmount(w http.ResponseWriter, _ *http.Request) {
	s.workMu.Lock()
	defer s.workMu.Unlock()
	s.thaw() // a file system that is unmounted while it is frozen cannot be thawed
	if err := unmount(s.path(guestapi.WorkspaceDir)); err != nil {
		fail(w, err)
		return
	}
	reply(w, struct{}{})
}

// handleSync writes all file systems. It does not wait for workMu: a client that limits
// the time of a sync does not have to wait for a mount.
func (s *Server) handleSync(w http.ResponseWriter, _ *http.Request) {
	s.keepNow()
	unix.Sync()
	reply(w, struct{}{})
}

// volume is the disk of a workspace.
type volume struct {
	dev   string // its file
	bytes int64
}

// findVolume returns the disk whose serial number is that of a workspace, once it has
// least bytes. blocks is the directory of all disks in sysfs.
func findVolume(ctx context.Context, blocks string, least int64, wait time.Duration) (volume, error) {
	t := time.NewTicker(10 * time.Millisecond)
	defer t.Stop()
	end := time.After(wait)
	for {
		v, err := lookVolume(blocks)
		if err != nil {
			return volume{}, agentlab.Errorf(agentlab.CodeInternal, "the disks: %w", err)
		}
		if v.bytes > 0 && v.bytes >= least {
			return v, nil
		}
		select {
		case <-t.C:
		case <-ctx.Done():
			return volume{}, ctx.Err()
		case <-end:
			if v.bytes > 0 {
				return volume{}, agentlab.Errorf(agentlab.CodeConflict, "the workspace has %d bytes, not %d", v.bytes, least)
			}
			return volume{}, agentlab.Errorf(agentlab.CodeNotFound, "the guest has no workspace")
		}
	}
}

// lookVolume returns the disk of a workspace as it is now; its size is 0 if there is
// none.
func lookVolume(blocks string) (v volume, err error) {
	disks, err := os.ReadDir(blocks)
	for _, d := range disks {
		dir := filepath.Join(blocks, d.Name())
		if serialOf(dir) != guestapi.VolumeSerial {
			continue
		}
		v.dev = "/dev/" + d.Name()
		v.bytes, err = diskBytes(dir, 0, 0)
	}
	return v, err
}

// serialOf returns the serial number of the disk with that directory in sysfs, "" if it
// has none. That of a virtio disk is text; that of a SCSI disk is the vital product
// data page 80h: type, page code, two bytes of length, and the number (SPC-4, 7.8.18).
func serialOf(dir string) string {
	if text, err := os.ReadFile(filepath.Join(dir, "serial")); err == nil {
		return strings.TrimSpace(string(text))
	}
	page, err := os.ReadFile(filepath.Join(dir, "device", "vpd_pg80"))
	if err != nil || len(page) < 4 || page[1] != 0x80 {
		return ""
	}
	return strings.TrimSpace(string(page[4:]))
}

// mount mounts the file system of the volume at dir, after it was checked, and
// enlarges it to the size of the volume.
func (v volume) mount(ctx context.Context, dir string, format bool, uid, gid int) (ws guestapi.Workspace, err error) {
	mounted, err := v.mountedAt(dir)
	if err != nil {
		return ws, err
	}
	if !mounted {
		if ws, err = v.prepare(ctx, format); err != nil {
			return ws, err
		}
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return ws, err
		}
		if err := protect(dir); err != nil {
			return ws, agentlab.Errorf(agentlab.CodeConflict, "%s cannot be protected: %w", dir, err)
		}
		if err := unix.Mount(v.dev, dir, "ext4", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_RELATIME, "errors=remount-ro"); err != nil {
			return ws, agentlab.Errorf(agentlab.CodeConflict, "the file system of the workspace cannot be mounted: %w", err)
		}
	}
	if err := growTo(dir, v.dev, uint64(v.bytes-endBytes)); err != nil {
		return ws, agentlab.Errorf(agentlab.CodeInternal, "the file system of the workspace cannot be enlarged: %w", err)
	}
	if err := own(dir, uid, gid); err != nil {
		return ws, err
	}
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return ws, err
	}
	ws.Bytes = int64(st.Blocks) * st.Bsize
	ws.Used = int64(st.Blocks-st.Bfree) * st.Bsize
	return ws, nil
}

// fsImmutable is FS_IMMUTABLE_FL of linux/fs.h.
const fsImmutable = 0x10

// protect makes the directory at which the volume is about to be mounted one that
// no process can write to, for the times when the volume is not mounted there: what was
// written to it then would be hidden by the next mount, and lost with the VM. The flag
// also stops root, on file systems that have it.
func protect(dir string) error {
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd) //nolint:errcheck // a directory that was only read
	flags, err := unix.IoctlGetUint32(fd, unix.FS_IOC_GETFLAGS)
	flagged := err == nil
	if flagged && flags&fsImmutable != 0 {
		return nil
	}
	if err := errors.Join(unix.Fchown(fd, 0, 0), unix.Fchmod(fd, 0o555)); err != nil {
		return err
	}
	if flagged {
		err = unix.IoctlSetPointerInt(fd, unix.FS_IOC_SETFLAGS, int(flags|fsImmutable))
	}
	if err != nil && !errors.Is(err, unix.ENOTTY) && !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.EPERM) {
		return err
	}
	return nil
}

// own gives the directory of a new file system to the agent's user.
func own(dir string, uid, gid int) error {
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil || st.Uid != 0 || os.Geteuid() != 0 {
		return err
	}
	return os.Chown(dir, uid, gid)
}

// mountedAt reports whether the volume is mounted at dir. Something else there is an
// error.
func (v volume) mountedAt(dir string) (bool, error) {
	var there, parent, dev unix.Stat_t
	if err := unix.Stat(v.dev, &dev); err != nil {
		return false, agentlab.Errorf(agentlab.CodeNotFound, "the workspace's disk: %w", err)
	}
	err := cmp.Or(unix.Lstat(dir, &there), unix.Stat(filepath.Dir(dir), &parent))
	switch {
	case errors.Is(err, unix.ENOENT):
		return false, nil
	case err != nil:
		return false, err
	case there.Mode&unix.S_IFMT != unix.S_IFDIR:
		return false, agentlab.Errorf(agentlab.CodeConflict, "%s is not a directory", dir)
	case there.Dev == parent.Dev:
		return false, nil
	case there.Dev != dev.Rdev:
		return false, agentlab.Errorf(agentlab.CodeConflict, "another file system is mounted at %s", dir)
	}
	return true, nil
}

// prepare checks the file system of a volume that is not mounted, and creates it if
// there is none and format allows it. Otherwise a disk with anything else is not
// changed.
func (v volume) prepare(ctx context.Context, format bool) (ws guestapi.Workspace, err error) {
	sb, err := superblock(v.dev)
	if err != nil {
		return ws, agentlab.Errorf(agentlab.CodeInternal, "the workspace's disk: %w", err)
	}
	_, _, err = ext4Size(sb)
	switch {
	case format && (err != nil || label(sb) != guestapi.VolumeSerial):
		return guestapi.Workspace{New: true}, v.format(ctx)
	case format: // its creation may have been interrupted after its last step
		if marked, err := v.marked(); err != nil || marked {
			if err := cmp.Or(err, v.mark(false)); err != nil {
				return ws, err
			}
		}
	}
	if err != nil {
		return ws, agentlab.Errorf(agentlab.CodeConflict, "the workspace has no ext4 file system: %w", err)
	}
	out, err := tool(ctx, "e2fsck", "-p", v.dev)
	code := 0
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		code = exit.ExitCode()
	} else if err != nil {
		return ws, agentlab.Errorf(agentlab.CodeInternal, "the file system of the workspace cannot be checked: %w", err)
	}
	// e2fsck(8): 1 and 2 mean that all errors were corrected.
	if code&^3 != 0 {
		return ws, agentlab.Errorf(agentlab.CodeConflict, "the file system of the workspace is damaged and was not repaired (e2fsck %d): %s", code, out)
	}
	return guestapi.Workspace{Repaired: code != 0}, nil
}

// label returns the label of the ext4 file system whose superblock is sb.
func label(sb []byte) string {
	text, _, _ := bytes.Cut(sb[sbLabel:sbLabel+16], []byte{0})
	return string(text)
}

// tool runs a program of e2fsprogs and returns the end of its output as one line.
func tool(ctx context.Context, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C"}
	if found, err := lookPath(name, "/", cmd.Env); err == nil {
		cmd.Path, cmd.Err = found, nil
	}
	out, err := cmd.CombinedOutput()
	text := strings.Join(strings.Fields(string(out)), " ")
	return text[max(0, len(text)-200):], err
}

// unmount writes what is in memory to the volume and removes it from dir.
func unmount(dir string) error {
	err := unix.Unmount(dir, unix.UMOUNT_NOFOLLOW)
	switch {
	case err == nil, errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOENT): // not mounted
		return nil
	case errors.Is(err, unix.EBUSY):
		return agentlab.Errorf(agentlab.CodeBusy, "%s is in use by %s", dir, strings.Join(users(dir), ", "))
	}
	return agentlab.Errorf(agentlab.CodeInternal, "%s cannot be unmounted: %w", dir, err)
}

// users returns processes that have files below dir open, or a directory of it as
// theirs.
func users(dir string) (names []string) {
	procs, _ := os.ReadDir("/proc")
	for _, p := range procs {
		pid, err := strconv.Atoi(p.Name())
		if err != nil || !uses(filepath.Join("/proc", p.Name()), dir) {
			continue
		}
		if len(names) == maxUsers {
			return append(names, "others")
		}
		comm, _ := os.ReadFile(filepath.Join("/proc", p.Name(), "comm"))
		names = append(names, fmt.Sprintf("%s (%d)", strings.TrimSpace(string(comm)), pid))
	}
	if len(names) == 0 {
		names = []string{"the kernel, or another mount below it"}
	}
	return names
}

// uses reports whether the process with the directory proc uses dir.
func uses(proc, dir string) bool {
	links := []string{"cwd", "root", "exe"}
	fds, _ := os.ReadDir(filepath.Join(proc, "fd"))
	for _, fd := range fds {
		links = append(links, filepath.Join("fd", fd.Name()))
	}
	for _, l := range links {
		if to, err := os.Readlink(filepath.Join(proc, l)); err == nil && (to == dir || strings.HasPrefix(to, dir+"/")) {
			return true
		}
	}
	return false
}

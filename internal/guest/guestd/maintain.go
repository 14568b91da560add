//go:build linux

package guestd

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"

	"github.com/agentlab-vm/agentlab/guestapi"
)

// Maintain runs 'agentlab-agent workspace export|import|check|repair' as root in a sandbox
// for the maintenance of a workspace, and returns its exit code. export writes an archive
// of the mounted workspace, and import extracts one; both exit with the code of tar. check
// and repair run e2fsck on the disk of the workspace, which is not mounted, and exit with
// its code.
func Maintain(args []string) int {
	if len(args) != 1 {
		fmt.Fprintln(os.Stderr, "usage: agentlab-agent workspace export|import|check|repair")
		return 2
	}
	code, err := 0, error(nil)
	switch args[0] {
	case "export":
		// What is read is on the disk: the host compares a copy with its source.
		if err = os.WriteFile("/proc/sys/vm/drop_caches", []byte("3"), 0); err == nil {
			err = exportFiles(guestapi.WorkspaceDir, os.Stdout, os.Stderr)
		}
	case "import":
		err = importFiles(guestapi.WorkspaceDir, os.Stdin, os.Stderr)
	case "check", "repair":
		code, err = checkVolume("/sys/block", args[0] == "repair", os.Stdout)
	default:
		return 2
	}
	exit, failed := errors.AsType[*exec.ExitError](err)
	switch {
	case failed: // the program has printed the reason
		return cmp.Or(max(exit.ExitCode(), 0), 128)
	case err != nil:
		fmt.Fprintf(os.Stderr, "agentlab-agent: %s\n", err)
		return guestapi.MaintainFailed
	}
	return code
}

// rootTool is a command that runs as root, whatever the environment of root has.
func rootTool(dir, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(context.Background(), name, args...)
	cmd.Dir = dir
	cmd.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C"}
	return cmd
}

// exportFiles writes an archive of the files in dir, without devices, sockets and what is
// on other file systems. Equal directories have their files in the same order.
func exportFiles(dir string, out, errOut io.Writer) error {
	names, w, err := os.Pipe()
	if err != nil {
		return err
	}
	tar := rootTool(dir, "tar", "--create", "--file", "-", "--format", "posix", "--pax-option", "delete=atime,delete=ctime", "--numeric-owner", "--sparse",
		"--xattrs", "--xattrs-include", "*", "--no-recursion", "--null", "--files-from", "-")
	tar.Stdin, tar.Stdout, tar.Stderr = names, out, errOut
	if err := errors.Join(tar.Start(), names.Close()); err != nil {
		return errors.Join(err, w.Close())
	}
	listErr := listFiles(dir, w)
	_ = w.Close()
	err = tar.Wait()
	if errors.Is(listErr, syscall.EPIPE) { // tar has ended, and has printed the reason
		listErr = nil
	}
	if listErr != nil {
		return listErr
	}
	return err
}

// listFiles writes the names of the files in dir, each with a NUL byte at its end.
func listFiles(dir string, to io.Writer) error {
	top, err := os.Stat(dir)
	if err != nil {
		return err
	}
	device := top.Sys().(*syscall.Stat_t).Dev
	return filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) && path != dir {
			return nil
		}
		if err != nil {
			return err
		}
		name, err := filepath.Rel(dir, path)
		switch {
		case err != nil:
			return err
		case name == "lost+found" && d.IsDir():
			return fs.SkipDir
		case d.Type()&(fs.ModeDevice|fs.ModeSocket) != 0:
			return nil
		}
		if _, err := io.WriteString(to, "./"+name+"\x00"); err != nil || !d.IsDir() {
			return err
		}
		if st, err := d.Info(); err != nil || st.Sys().(*syscall.Stat_t).Dev != device {
			return fs.SkipDir // or it has gone
		}
		return nil
	})
}

// importFiles extracts an archive to dir, and writes the file system to its disk.
func importFiles(dir string, in io.Reader, errOut io.Writer) error {
	tar := rootTool(dir, "tar", "--extract", "--file", "-", "--numeric-owner", "--same-permissions", "--same-owner", "--xattrs", "--xattrs-include", "*")
	tar.Stdin, tar.Stderr = in, errOut
	if err := tar.Run(); err != nil {
		return err
	}
	_, err := io.Copy(io.Discard, in) // the host waits until all was read
	syscall.Sync()
	return err
}

// superblocks are the copies of the superblock that e2fsck does not try by itself: in the
// groups 3, 5, 7 and so on of a file system with blocks of 4 KiB.
var superblocks = []int{98304, 163840, 229376, 294912, 819200, 884736, 1605632, 2654208, 4096000}

// checkVolume runs e2fsck on the disk of the workspace. blocks is as for findVolume.
func checkVolume(blocks string, repair bool, out io.Writer) (code int, err error) {
	v, err := lookVolume(blocks)
	if err != nil {
		return 0, err
	}
	if v.dev == "" {
		return 0, errors.New("the guest has no workspace")
	}
	return checkDisk(v.dev, repair, out)
}

// checkDisk runs e2fsck on a disk, and with the other copies of the superblock if it finds
// none. It returns the exit code of the last run.
func checkDisk(dev string, repair bool, out io.Writer) (code int, err error) {
	option := "-n"
	if repair {
		option = "-y"
	}
	run := func(args ...string) (text []byte, code int, err error) {
		text, err = rootTool("/", "e2fsck", append([]string{"-f", option}, args...)...).CombinedOutput()
		if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.ExitCode() >= 0 {
			return text, exit.ExitCode(), nil
		}
		return text, 0, err
	}
	text, code, err := run(dev)
	shown := bytes.Clone(text)
	for _, b := range superblocks {
		if err != nil || code != guestapi.MaintainNoFileSystem {
			break
		}
		text, code, err = run("-b", strconv.Itoa(b), "-B", "4096", dev)
		if code != guestapi.MaintainNoFileSystem {
			shown = append(shown, text...)
		}
	}
	_, werr := out.Write(shown)
	return code, cmp.Or(err, werr)
}

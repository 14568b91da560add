// Package cloudimage makes a small disk that boots as cloud images do: BIOS,
// boot loader, initramfs, systemd, cloud-init, guest agent; with AgentLab's
// template parts in it, so that clones of it are sandboxes. It is what tests
// of backends with template VMs start. It needs root and mmdebstrap.
package cloudimage

import (
	"context"
	"crypto/sha256"
	"embed"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentlab-vm/agentlab/images"
	"github.com/agentlab-vm/agentlab/internal/image"
)

//go:embed build.sh
var script embed.FS

// small is the recipe of the template: what tests need, so that it is made and
// starts soon.
//
//go:embed small.yaml
var small []byte

const (
	sector     = 512
	firstByte  = 1 << 20 // of the root partition
	sizeBytes  = 3 << 30 // of the disk; sandboxes grow theirs
	labelRoot  = "agentlab-root"
	suite      = "bookworm"
	keptImages = 2 // of each kind in the cache
)

// cloudPackages is what a cloud image has before it becomes a template.
var cloudPackages = []string{
	"linux-image-cloud-amd64", "initramfs-tools", "zstd", "grub-pc-bin", "grub-common",
	"systemd", "systemd-sysv", "systemd-resolved", "udev", "dbus", "libpam-systemd", "netplan.io",
	"cloud-init", "cloud-guest-utils", "fdisk", "openssh-server", "sudo", "ca-certificates", "iproute2", "kmod", "procps",
}

// Template returns the path of a qcow2 file that is the disk of a template:
// the system, and runner (a static agent-runner) in /usr/local/bin. It is kept
// in cache and made once for each runner; the first takes two minutes. The
// caller gives it a backing chain or a copy, and never writes to it.
func Template(ctx context.Context, cache, runner string, log io.Writer) (string, error) {
	dir, unlock, err := open(cache)
	if err != nil {
		return "", err
	}
	defer unlock()
	base, err := system(ctx, dir, true, log)
	if err != nil {
		return "", err
	}
	sum, err := fileHash(runner)
	if err != nil {
		return "", err
	}
	disk := filepath.Join(dir, "template-"+key(true)[:8]+"-"+sum+".qcow2")
	if _, err := os.Stat(disk); err == nil {
		now := time.Now()
		return disk, os.Chtimes(disk, now, now)
	}
	if err := withRunner(ctx, base, runner, disk, log); err != nil {
		return "", fmt.Errorf("putting agent-runner into the test disk: %w", err)
	}
	prune(dir, "template-*.qcow2", disk)
	return disk, nil
}

// Plain returns the path of a qcow2 file that is a cloud image without anything
// of AgentLab, as a publisher has it. It is kept in cache.
func Plain(ctx context.Context, cache string, log io.Writer) (string, error) {
	dir, unlock, err := open(cache)
	if err != nil {
		return "", err
	}
	defer unlock()
	disk := filepath.Join(dir, "plain-"+key(false)+".qcow2")
	if _, err := os.Stat(disk); err == nil {
		return disk, nil
	}
	raw, err := system(ctx, dir, false, log)
	if err != nil {
		return "", err
	}
	made := raw + ".tmp"
	if err := run(ctx, log, "qemu-img", "convert", "-O", "qcow2", raw, made); err != nil {
		return "", err
	}
	prune(dir, "plain-*.qcow2", disk)
	return disk, errors.Join(os.Rename(made, disk), os.Remove(raw))
}

// open makes the folder in cache ours until unlock is called.
func open(cache string) (dir string, unlock func(), err error) {
	dir = filepath.Join(cache, "cloudimage")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", nil, err
	}
	unlock, err = lock(filepath.Join(dir, "lock"))
	return dir, unlock, err
}

// system is the raw disk, with or without AgentLab's parts.
func system(ctx context.Context, dir string, template bool, log io.Writer) (string, error) {
	kind := map[bool]string{true: "base-", false: "plain-"}[template]
	disk := filepath.Join(dir, kind+key(template)+".raw")
	if _, err := os.Stat(disk); err == nil {
		return disk, nil
	}
	if err := build(ctx, dir, disk, template, log); err != nil {
		return "", fmt.Errorf("building the test disk: %w", err)
	}
	prune(dir, kind+"*.raw", disk)
	return disk, nil
}

// key names what the disk is made of, but for versions of packages.
func key(template bool) string {
	h := sha256.New()
	text, _ := script.ReadFile("build.sh") // it is embedded
	_, _ = fmt.Fprintln(h, "4", suite, cloudPackages, sizeBytes, string(text))
	if template {
		_, _ = fmt.Fprintln(h, recipe().StageKey(image.Cloud))
	}
	return hex.EncodeToString(h.Sum(nil))[:20]
}

// recipe returns the recipe of the template, which a test has checked.
func recipe() *image.Recipe {
	r, err := image.ParseRecipe(small)
	if err != nil {
		panic(err)
	}
	return r
}

func fileHash(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer func() { _ = f.Close() }()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil))[:16], nil
}

// lock serialises builders of all processes.
func lock(path string) (func(), error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		_ = f.Close()
		return nil, err
	}
	return func() { _ = f.Close() }, nil
}

// prune removes the oldest files of a kind; an open one can still be read.
func prune(dir, pattern, keep string) {
	files, _ := filepath.Glob(filepath.Join(dir, pattern)) // the pattern is valid
	age := func(f string) int64 {
		fi, err := os.Stat(f)
		if err != nil || f == keep {
			return 1 << 62
		}
		return fi.ModTime().UnixNano()
	}
	slices.SortFunc(files, func(a, b string) int {
		if age(a) > age(b) {
			return -1
		}
		return 1
	})
	for i, f := range files {
		if i >= keptImages {
			_ = os.Remove(f)
		}
	}
}

func build(ctx context.Context, dir, to string, template bool, log io.Writer) error {
	if os.Geteuid() != 0 {
		return errors.New("this needs root")
	}
	work, err := os.MkdirTemp(dir, "build-*")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(work) }()
	if err := os.CopyFS(filepath.Join(work, "script"), script); err != nil {
		return err
	}
	if err := recipe().Stage(ctx, image.StageOptions{Kind: image.Cloud}, work); err != nil {
		return err
	}
	tree, packages := filepath.Join(work, "tree"), cloudPackages
	if template {
		list, err := os.ReadFile(filepath.Join(work, "packages"))
		if err != nil {
			return err
		}
		packages = slices.Concat(packages, strings.Fields(string(list)))
	}
	steps := [][]string{
		{"mmdebstrap", "--mode=root", "--format=directory", "--variant=minbase", "--include=" + strings.Join(packages, ","),
			"--dpkgopt=" + filepath.Join(work, "slim"), suite, tree},
		{"sh", filepath.Join(work, "script/build.sh"), tree},
	}
	if template {
		steps = append(steps, []string{"unshare", "--net", "--ipc", "--uts", "sh", filepath.Join(work, "finish.sh"), work, tree})
	}
	slim, err := images.Files.ReadFile("files/etc/dpkg/dpkg.cfg.d/agentlab-slim")
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(work, "slim"), slim, 0o600); err != nil {
		return err
	}
	for _, argv := range steps {
		if err := isolated(ctx, log, argv...); err != nil {
			return err
		}
	}
	raw := filepath.Join(work, "disk.raw")
	if err := os.WriteFile(raw, nil, 0o600); err != nil {
		return err
	}
	if err := os.Truncate(raw, sizeBytes); err != nil {
		return err
	}
	err = run(ctx, log, "mke2fs", "-q", "-F", "-t", "ext4", "-m", "0", "-L", labelRoot,
		"-E", fmt.Sprintf("offset=%d,root_owner=0:0", firstByte), "-d", tree, raw, fmt.Sprintf("%dk", (sizeBytes-firstByte)>>10))
	if err != nil {
		return err
	}
	if err := bootable(raw, filepath.Join(tree, "boot/grub")); err != nil {
		return err
	}
	return os.Rename(raw, to)
}

// bootable writes the boot loader and a partition table with one partition.
func bootable(raw, grub string) error {
	boot, err := os.ReadFile(filepath.Join(grub, "boot.img"))
	if err != nil {
		return err
	}
	core, err := os.ReadFile(filepath.Join(grub, "core.img"))
	if err != nil {
		return err
	}
	if len(boot) != sector || len(core) > firstByte-sector {
		return fmt.Errorf("boot loader of %d and %d bytes", len(boot), len(core))
	}
	const code, diskID, table = 440, 440, 446
	mbr := make([]byte, sector)
	copy(mbr, boot[:code])
	copy(mbr[diskID:], "AGLB")
	entry := mbr[table:]
	entry[0], entry[4] = 0x80, 0x83 // active; Linux
	copy(entry[1:4], []byte{0xfe, 0xff, 0xff})
	copy(entry[5:8], []byte{0xfe, 0xff, 0xff})
	binary.LittleEndian.PutUint32(entry[8:], firstByte/sector)
	binary.LittleEndian.PutUint32(entry[12:], (sizeBytes-firstByte)/sector)
	mbr[510], mbr[511] = 0x55, 0xaa
	f, err := os.OpenFile(raw, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(append(mbr, core...), 0)
	return errors.Join(err, f.Close())
}

// withRunner copies the disk with agent-runner in it, without mounting it.
func withRunner(ctx context.Context, base, runner, to string, log io.Writer) error {
	work, err := os.MkdirTemp(filepath.Dir(to), "template-*.tmp")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(work) }()
	raw, made := filepath.Join(work, "disk.raw"), filepath.Join(work, "disk.qcow2")
	commands := filepath.Join(work, "commands")
	text := "cd /usr/local/bin\nrm agent-runner\nwrite " + runner + " agent-runner\nset_inode_field agent-runner mode 0100755\nset_inode_field agent-runner uid 0\nset_inode_field agent-runner gid 0\nstat agent-runner\n"
	if err := os.WriteFile(commands, []byte(text), 0o600); err != nil {
		return err
	}
	for _, argv := range [][]string{
		{"cp", "--sparse=always", "--reflink=auto", base, raw},
		{"debugfs", "-w", "-f", commands, fmt.Sprintf("%s?offset=%d", raw, firstByte)},
		{"qemu-img", "convert", "-O", "qcow2", raw, made},
	} {
		if err := run(ctx, log, argv...); err != nil {
			return err
		}
	}
	return os.Rename(made, to)
}

// isolated runs a command whose mounts and processes end with it.
func isolated(ctx context.Context, log io.Writer, argv ...string) error {
	return run(ctx, log, append([]string{"unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child=SIGKILL", "--"}, argv...)...)
}

func run(ctx context.Context, log io.Writer, argv ...string) error {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Env = append(os.Environ(), "LC_ALL=C.UTF-8", "DEBIAN_FRONTEND=noninteractive", "PATH="+os.Getenv("PATH")+":/usr/sbin:/sbin")
	cmd.Dir, cmd.Stdout, cmd.Stderr = "/", log, log
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s: %w", argv[0], err)
	}
	return nil
}

//go:build linux

package guestd

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"strconv"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
)

// A file system is created only on an empty disk, or where its creation was
// interrupted. While it is created, a mark is at the end of the disk, which is never part
// of the file system.

const (
	// endBytes is the size of the end of a disk that a file system leaves out.
	endBytes = 1 << 20
	// markBytes is the size of the mark, at the end of the disk.
	markBytes = 4 << 10
	markText  = "AgentLab creates a file system on this disk\n"
)

// format creates the file system. It gets its label when everything else is on the
// disk: without the label it may be incomplete.
func (v volume) format(ctx context.Context) error {
	if err := v.mayFormat(); err != nil {
		return err
	}
	if err := v.mark(true); err != nil {
		return err
	}
	for _, argv := range [][]string{
		{"mkfs.ext4", "-q", "-F", "-m", "0", "-E", "lazy_itable_init=1,lazy_journal_init=1", v.dev, strconv.FormatInt((v.bytes-endBytes)>>10, 10) + "k"},
		{"sync", v.dev},
		{"tune2fs", "-L", guestapi.VolumeSerial, v.dev},
		{"sync", v.dev},
	} {
		if out, err := tool(ctx, argv[0], argv[1:]...); err != nil {
			return agentlab.Errorf(agentlab.CodeInternal, "the file system of the workspace cannot be created: %s: %w: %s", argv[0], err, out)
		}
	}
	return v.mark(false)
}

// mark writes or deletes the mark of a disk on which a file system is being created.
func (v volume) mark(on bool) error {
	block := make([]byte, markBytes)
	if on {
		copy(block, markText)
	}
	f, err := os.OpenFile(v.dev, os.O_WRONLY, 0)
	if err == nil {
		_, err = f.WriteAt(block, v.bytes-markBytes)
		err = errors.Join(err, f.Sync(), f.Close())
	}
	if err != nil {
		return agentlab.Errorf(agentlab.CodeInternal, "the workspace's disk: %w", err)
	}
	return nil
}

// marked reports whether a disk has the mark.
func (v volume) marked() (bool, error) {
	block := make([]byte, markBytes)
	err := v.read(block, v.bytes-markBytes)
	return bytes.HasPrefix(block, []byte(markText)), err
}

// read reads a part of a disk. What is behind the end of the disk is zeros.
func (v volume) read(part []byte, at int64) error {
	f, err := os.Open(v.dev)
	if err == nil {
		defer f.Close()
		_, err = f.ReadAt(part, at)
	}
	if err != nil && !errors.Is(err, io.EOF) {
		return agentlab.Errorf(agentlab.CodeInternal, "the workspace's disk: %w", err)
	}
	return nil
}

// mayFormat returns an error unless a disk is empty, or has the mark. It reads the
// beginning and the end of the disk, and the places where ext4 has copies of its
// superblock: in the groups 1 and the powers of 3, 5 and 7. So damage of a part of the
// disk is found to be damage.
func (v volume) mayFormat() error {
	marked, err := v.marked()
	if err != nil || marked {
		return err
	}
	for _, at := range v.places() {
		part := make([]byte, markBytes)
		if at == 0 || at == v.bytes-endBytes {
			part = make([]byte, endBytes)
		}
		if err := v.read(part, at); err != nil {
			return err
		}
		if len(bytes.Trim(part, "\x00")) > 0 {
			return agentlab.Errorf(agentlab.CodeConflict, "the disk of the workspace has no complete file system but is not empty; it was not changed")
		}
	}
	return nil
}

// places returns the beginning and the end of a disk, and the offsets at which ext4
// keeps superblocks in groups of 8 MiB and of 128 MiB, which are those with blocks of
// 1 KiB and of 4 KiB.
func (v volume) places() (out []int64) {
	out = []int64{0, v.bytes - endBytes}
	for _, group := range []int64{8 << 20, 128 << 20} {
		out = append(out, group)
		for _, base := range []int64{3, 5, 7} {
			for g := base; g < v.bytes/group; g *= base {
				out = append(out, g*group)
			}
		}
	}
	return out
}

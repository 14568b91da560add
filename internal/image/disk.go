package image

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strconv"

	"golang.org/x/sys/unix"
)

// disk creates root.img from the tree: a sparse ext4 file system of the
// recipe's size, without a partition table and without a mount.
func (b *builder) disk(ctx context.Context, s *Stamp) error {
	img := b.path("image", fileRoot)
	f, err := os.OpenFile(img, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	if err := f.Truncate(s.SizeBytes); err != nil {
		return err
	}
	env := append(buildEnv(b.path("tmp")), fmt.Sprintf("E2FSPROGS_FAKE_TIME=%d", s.CreatedAt.Unix()))
	if err := run(ctx, b.out, env, isolated(mke2fsArgs(s, b.path("tree"), img, prezeroed(ctx))...)...); err != nil {
		return err
	}
	if err := unix.Fchmod(int(f.Fd()), 0o444); err != nil {
		return err
	}
	return f.Sync()
}

// reservedPercent is the part of the blocks that only root can use.
const reservedPercent = "1"

// mke2fsArgs returns the command that fills img from tree.
//
//   - Reserved blocks, so that programs of root still work when a user has filled the
//     disk.
//   - A small journal: only its blocks are written at every boot.
//   - Inode tables count as initialised, because the file reads as zeros;
//     otherwise each guest would zero 300 MB of its own overlay in the
//     background.
//   - UUID and hash seed are derived from the digest, so that the same content
//     results in the same file system.
func mke2fsArgs(s *Stamp, tree, img string, prezeroed bool) []string {
	extended := "lazy_itable_init=0,lazy_journal_init=0,packed_meta_blocks=1,root_owner=0:0,hash_seed=" + s.uuid()
	if prezeroed {
		extended += ",assume_storage_prezeroed=1"
	}
	return []string{
		"mke2fs", "-q", "-F", "-t", "ext4", "-m", reservedPercent, "-J", "size=64", "-L", "agentlab-root", "-U", s.uuid(),
		"-E", extended, "-d", tree, img,
	}
}

// uuid derives a UUID (version 8: custom) from the digest.
func (s *Stamp) uuid() string {
	raw := make([]byte, 16)
	if b, err := hex.DecodeString(s.Digest); err == nil {
		copy(raw, b)
	}
	raw[6] = raw[6]&0x0f | 0x80
	raw[8] = raw[8]&0x3f | 0x80
	h := hex.EncodeToString(raw)
	return h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:]
}

var mke2fsVersionRE = regexp.MustCompile(`mke2fs (\d+)\.(\d+)`)

// prezeroed reports whether mke2fs supports assume_storage_prezeroed (1.47 does).
func prezeroed(ctx context.Context) bool {
	out, _ := exec.CommandContext(ctx, lookPath("mke2fs"), "-V").CombinedOutput() // without an answer: no
	m := mke2fsVersionRE.FindSubmatch(out)
	if m == nil {
		return false
	}
	major, _ := strconv.Atoi(string(m[1])) // digits, by the pattern
	minor, _ := strconv.Atoi(string(m[2]))
	return major > 1 || major == 1 && minor >= 47
}

// packageManifest reads name and version from a package.json, "" when it has
// none.
func packageManifest(path string) (name, version string) {
	data, err := os.ReadFile(path)
	if err != nil {
		return "", ""
	}
	var m struct{ Name, Version string }
	if json.Unmarshal(data, &m) != nil || m.Version == "" {
		return "", ""
	}
	return m.Name, m.Version
}

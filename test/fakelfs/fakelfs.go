// Package fakelfs is a git-lfs for tests. It converts files as Git LFS does, and knows no
// server.
package fakelfs

import (
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/internal/lfs"
)

const script = `#!/bin/sh
case $1 in clean|smudge) ;; *) exit 1 ;; esac # filter-process would wait for an answer
objects=$(git rev-parse --git-common-dir)/lfs/objects
tmp=$(mktemp) && cat >"$tmp"
case $1 in
clean)
	if head -c 40 "$tmp" | grep -q '^version https://git-lfs'; then cat "$tmp"; rm "$tmp"; exit; fi
	oid=$(sha256sum "$tmp" | cut -d' ' -f1)
	dir=$objects/$(echo $oid | cut -c1-2)/$(echo $oid | cut -c3-4)
	printf 'version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize %d\n' $oid $(stat -c %s "$tmp")
	mkdir -p $dir && mv "$tmp" $dir/$oid ;;
smudge)
	oid=$(sed -n 's/^oid sha256://p' "$tmp") && rm "$tmp"
	cat $objects/$(echo $oid | cut -c1-2)/$(echo $oid | cut -c3-4)/$oid ;;
esac
`

// Install puts the program on the PATH of a test.
func Install(t *testing.T) {
	t.Helper()
	for _, v := range Environ(t) {
		name, value, _ := strings.Cut(v, "=")
		t.Setenv(name, value)
	}
}

// Environ returns variables with which processes of a test find the program.
func Environ(t *testing.T) []string {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "git-lfs"), []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	return []string{"PATH=" + dir + string(filepath.ListSeparator) + os.Getenv("PATH")}
}

// Pointer returns the pointer to a content, and its text.
func Pointer(content string) (p lfs.Pointer, text string) {
	p = lfs.Pointer{OID: fmt.Sprintf("%x", sha256.Sum256([]byte(content))), Size: int64(len(content))}
	return p, fmt.Sprintf("version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize %d\n", p.OID, p.Size)
}

package gitsafe

import (
	"bytes"
	"compress/zlib"
	"crypto/sha1"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/agentlab-vm/agentlab"

	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/worktest"
)

// packed appends an object to a pack: its header, what stands before its
// data, and the data.
func packed(pack *bytes.Buffer, kind byte, before, data []byte) {
	size := len(data)
	c := kind<<4 | byte(size&15)
	for size >>= 4; size > 0; size >>= 7 {
		pack.WriteByte(c | 0x80)
		c = byte(size & 0x7f)
	}
	pack.WriteByte(c)
	pack.Write(before)
	z, _ := zlib.NewWriterLevel(pack, zlib.BestCompression)
	_, _ = z.Write(data)
	_ = z.Close()
}

// bombBundle is a bundle of some kilobytes with a blob of 16 MiB of zeros and
// a delta that copies it n times into one object. Its only branch stands at
// the commit.
func bombBundle(t *testing.T, commit string, n int) string {
	t.Helper()
	const base = 0xffffff
	var body bytes.Buffer
	zeros := make([]byte, base)
	packed(&body, packBlob, nil, zeros)
	delta := binary.AppendUvarint(nil, base)
	delta = binary.AppendUvarint(delta, uint64(n)*base)
	for range n {
		delta = append(delta, 0x80|0x70, 0xff, 0xff, 0xff) // copy 0xffffff bytes from offset 0
	}
	back := body.Len()
	offset := []byte{byte(back & 0x7f)}
	for back >>= 7; back > 0; back >>= 7 {
		back--
		offset = append([]byte{byte(back&0x7f) | 0x80}, offset...)
	}
	packed(&body, packOfsDelta, offset, delta)
	pack := append([]byte("PACK\x00\x00\x00\x02\x00\x00\x00\x02"), body.Bytes()...)
	sum := sha1.Sum(pack)
	file := filepath.Join(t.TempDir(), "bomb")
	header := fmt.Sprintf("# v2 git bundle\n%s refs/heads/agentlab/j\n\n", commit)
	if err := os.WriteFile(file, append([]byte(header), append(pack, sum[:]...)...), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// childrenPeak is the largest memory that a child of this process had.
func childrenPeak(t *testing.T) int64 {
	t.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_CHILDREN, &u); err != nil {
		t.Fatal(err)
	}
	return u.Maxrss << 10
}

// A bundle of 16 KiB that unpacks to an object of 1.5 GiB is refused by its
// headers, before git sees it.
func TestBombIsRefusedBeforeGit(t *testing.T) {
	user := worktest.Repo(t)
	before := childrenPeak(t)
	bomb := bombBundle(t, worktest.Git(t, user, "rev-parse", "HEAD"), 96)
	if st, err := os.Stat(bomb); err != nil || st.Size() > 32<<10 {
		t.Fatalf("the bomb has %d bytes, %v", st.Size(), err)
	}
	_, err := take(t, bomb, user)
	if agentlab.CodeOf(err) != agentlab.CodeLimit || !strings.Contains(err.Error(), "1.5 GiB") {
		t.Errorf("got %v, want code limit", err)
	}
	if peak := childrenPeak(t); peak > max(before, 256<<20) {
		t.Errorf("a child had %s of memory", work.ByteSize(peak))
	}
	if refs := worktest.Git(t, user, "for-each-ref", "refs/agentlab"); refs != "" {
		t.Errorf("the bomb left %s", refs)
	}
}

// A git that reads a guest's objects cannot have more memory than its limit,
// whatever the objects are.
func TestGitOfGuestObjectsIsLimited(t *testing.T) {
	t.Parallel()
	user := worktest.Repo(t)
	open := func(n int) (*os.File, int64) {
		f, err := os.Open(bombBundle(t, worktest.Git(t, user, "rev-parse", "HEAD"), n))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = f.Close() })
		h, err := readBundleHeader(f)
		if err != nil {
			t.Fatal(err)
		}
		return f, h.size
	}
	small, at := open(4)
	if err := indexPack(t.Context(), small, at, user, "index-pack"); err != nil {
		t.Errorf("a pack within the limits: %v", err)
	}
	bomb, at := open(96)
	if err := indexPack(t.Context(), bomb, at, user, "index-pack"); err == nil {
		t.Error("git indexed an object of 1.5 GiB")
	}
	if peak := childrenPeak(t); peak > gitMemory+(64<<20) {
		t.Errorf("a child had %s of memory", work.ByteSize(peak))
	}
	for option, want := range map[string]string{"-d": fmt.Sprint(gitMemory / 1024), "-t": fmt.Sprint(gitSeconds), "-f": fmt.Sprint(gitFile / 512), "-c": "0"} {
		argv := underLimits("/bin/sh", []string{"-c", "ulimit " + option}, false)
		if got := output(t, argv); got != want {
			t.Errorf("ulimit %s is %s, want %s", option, got, want)
		}
	}
}

func TestScanPack(t *testing.T) {
	t.Parallel()
	repo := worktest.Repo(t)
	for i := range 20 { // similar files, so that git makes deltas of both kinds
		text := strings.Repeat(fmt.Sprintf("line %d\n", i), 2000)
		if err := os.WriteFile(filepath.Join(repo, "a.txt"), []byte(strings.Repeat("common\n", 5000)+text), 0o600); err != nil {
			t.Fatal(err)
		}
		worktest.Git(t, repo, "commit", "-q", "-a", "-m", "more")
	}
	pack := func(revs string, options ...string) string {
		cmd := exec.CommandContext(t.Context(), "git", append([]string{"-C", repo, "pack-objects", "--revs", "--stdout", "-q"}, options...)...)
		cmd.Stdin = strings.NewReader(revs)
		out, err := cmd.Output()
		if err != nil {
			t.Fatal(err)
		}
		return string(out)
	}
	for name, pack := range map[string]string{"all": pack("HEAD\n"), "thin": pack("HEAD\n^HEAD~3\n", "--thin", "--delta-base-offset")} {
		if err := scanPack(strings.NewReader(pack)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		for _, bad := range []string{pack + "x", pack[:len(pack)-1], pack[:len(pack)/2], "PACK", ""} {
			if scanPack(strings.NewReader(bad)) == nil {
				t.Errorf("%s: a damaged pack of %d bytes was taken", name, len(bad))
			}
		}
	}
	many := "PACK\x00\x00\x00\x02\xff\xff\xff\xff"
	if err := scanPack(strings.NewReader(many)); agentlab.CodeOf(err) != agentlab.CodeLimit {
		t.Errorf("4 billion objects: %v", err)
	}
	var liar bytes.Buffer
	liar.WriteString("PACK\x00\x00\x00\x02\x00\x00\x00\x01")
	packed(&liar, packBlob, nil, make([]byte, 100))
	lie := liar.Bytes()
	lie[12]++ // declares a byte more
	if err := scanPack(io.MultiReader(bytes.NewReader(lie), strings.NewReader(strings.Repeat("x", 20)))); err == nil {
		t.Error("an object that is smaller than it says was taken")
	}
}

// FuzzScanPack wants the scan to end on anything.
func FuzzScanPack(f *testing.F) {
	var one bytes.Buffer
	one.WriteString("PACK\x00\x00\x00\x02\x00\x00\x00\x01")
	packed(&one, packBlob, nil, []byte("text"))
	f.Add(append(one.Bytes(), make([]byte, 20)...))
	f.Fuzz(func(_ *testing.T, p []byte) { _ = scanPack(bytes.NewReader(p)) })
}

func output(t *testing.T, argv []string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), argv[0], argv[1:]...).Output()
	if err != nil {
		t.Fatalf("%v: %v", argv, err)
	}
	return strings.TrimSpace(string(out))
}

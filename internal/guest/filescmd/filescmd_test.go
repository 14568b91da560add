package filescmd

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/agentlab-vm/agentlab/guestapi"
)

func TestMain(m *testing.M) {
	if args := os.Getenv("FILES_TEST_MAIN"); args != "" {
		os.Exit(Main(strings.Split(args, "\n")))
	}
	os.Exit(m.Run())
}

// archive returns an archive of entries, which have the text "text" if they are files.
func archive(t *testing.T, entries ...tar.Header) *bytes.Buffer {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, h := range entries {
		if h.Typeflag == 0 {
			h.Typeflag, h.Size = tar.TypeReg, 4
		}
		if h.Mode == 0 {
			h.Mode = 0o644
		}
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if h.Size > 0 {
			if _, err := io.WriteString(w, "text"); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return &buf
}

var end = tar.Header{Name: guestapi.FilesEnd, Typeflag: tar.TypeReg}

// An archive writes nothing outside of its stage, and leaves nothing behind when it fails.
func TestPushStaysInItsStage(t *testing.T) {
	for name, entries := range map[string][]tar.Header{
		"parent":       {{Name: "../out"}, end},
		"through link": {{Name: "new/a", Typeflag: tar.TypeSymlink, Linkname: "../../.."}, {Name: "new/a/out"}, end},
		"device":       {{Name: "new/a", Typeflag: tar.TypeChar}, end},
		"hard link":    {{Name: "new/a", Typeflag: tar.TypeLink, Linkname: "/etc/passwd"}, end},
		"after end":    {{Name: "new/b"}, end, {Name: "new/a"}},
		"no end":       {{Name: "new/b"}},
	} {
		top := t.TempDir()
		dir := filepath.Join(top, "home")
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		c := Command{Dir: dir, In: archive(t, entries...)}
		if err := c.Run([]string{"push", "--name", "x", "tree", "to"}); err == nil {
			t.Errorf("%s: was extracted", name)
		}
		for _, d := range []string{dir, top} {
			if left, err := os.ReadDir(d); err != nil || len(left) > 1 || d == dir && len(left) > 0 {
				t.Errorf("%s: %v, %v in %s", name, err, left, d)
			}
		}
	}
}

// Directories that may not be written are copied, too, and a copy that fails removes them.
func TestPushReadOnlyDirectory(t *testing.T) {
	for last, want := range map[string]bool{guestapi.FilesEnd: true, "new/sub/more": false, "./end": true} {
		home := t.TempDir()
		if last == "./end" { // into a directory that exists
			if err := os.Mkdir(filepath.Join(home, "to"), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		c := Command{Home: home, In: archive(t, tar.Header{Name: "new/", Typeflag: tar.TypeDir, Mode: 0o755},
			tar.Header{Name: "new/sub/", Typeflag: tar.TypeDir, Mode: 0o555}, tar.Header{Name: "new/sub/file", Mode: 0o400, ModTime: time.Unix(1e9, 0)}, tar.Header{Name: last, Typeflag: tar.TypeReg})}
		err := c.Run([]string{"push", "content", "~/to"})
		st, serr := os.Stat(filepath.Join(home, "to/sub"))
		if want != (err == nil) || want != (serr == nil) || want && st.Mode().Perm() != 0o555 {
			t.Errorf("%s: %v, %v", last, err, serr)
		}
		if left, _ := filepath.Glob(filepath.Join(home, ".agentlab*")); len(left) > 0 {
			t.Errorf("%s: left %q", last, left)
		}
		if f, err := os.Stat(filepath.Join(home, "to/sub/file")); want && (err != nil || f.Mode().Perm() != 0o400 || f.ModTime().Unix() != 1e9) {
			t.Errorf("the file is %v, %v", f, err)
		}
	}
}

// ".." after a link means the directory above what the link leads to.
func TestPathsThroughLinks(t *testing.T) {
	dir := t.TempDir()
	if err := errors.Join(os.MkdirAll(filepath.Join(dir, "a/b"), 0o755), os.Symlink("a/b", filepath.Join(dir, "link"))); err != nil {
		t.Fatal(err)
	}
	for _, to := range []string{"link/../x", "link/.."} {
		c := Command{Dir: dir, In: archive(t, tar.Header{Name: "new/f"}, end)}
		if err := c.Run([]string{"push", "--name", "y", "tree", to}); err != nil {
			t.Error(err)
		}
	}
	for _, name := range []string{"a/x/f", "a/y/f"} {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			t.Error(err)
		}
	}
	var out bytes.Buffer
	c := Command{Dir: dir, Out: &out}
	if err := c.Run([]string{"pull", "tree", "link/.."}); err != nil || !bytes.Contains(out.Bytes(), []byte("./x/f")) {
		t.Errorf("%v, %d bytes", err, out.Len())
	}
}

// Files that vanish or are no longer files are left out of an archive and reported. A pipe
// does not block it.
func TestPullNames(t *testing.T) {
	dir := t.TempDir()
	if err := errors.Join(os.WriteFile(filepath.Join(dir, "a"), []byte("text"), 0o600), syscall.Mkfifo(filepath.Join(dir, "pipe"), 0o600)); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	c := Command{Dir: dir, In: strings.NewReader(".\x00a\x00pipe\x00gone\x00"), Out: &out}
	if err := c.Run([]string{"pull", "--names", "tree", "."}); ExitCode(err) != guestapi.FilesChanged {
		t.Error(err)
	}
	var names []string
	for r := tar.NewReader(&out); ; {
		h, err := r.Next()
		if err != nil {
			break
		}
		names = append(names, h.Name)
	}
	if got := strings.Join(names, " "); got != "./ ./a ./pipe" {
		t.Errorf("has %q", got)
	}
	c = Command{Dir: dir, In: strings.NewReader("a\x00b"), Out: io.Discard}
	if err := c.Run([]string{"pull", "--names", "tree", "."}); err == nil {
		t.Error("a name that is cut off was taken")
	}
}

// A file that becomes shorter while it is read does not damage the archive.
func TestPullOfAChangingFile(t *testing.T) {
	dir := t.TempDir()
	name := filepath.Join(dir, "log")
	if err := os.WriteFile(name, bytes.Repeat([]byte("x"), 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	r, w := io.Pipe()
	done := make(chan error, 1)
	go func() {
		c := Command{Dir: dir, Out: w}
		err := c.Run([]string{"pull", "file", "log"})
		_ = w.Close()
		done <- err
	}()
	in := tar.NewReader(r)
	h, err := in.Next()
	if err != nil || h.Size != 1<<20 {
		t.Fatalf("%v, %v", h, err)
	}
	if err := os.Truncate(name, 10); err != nil {
		t.Fatal(err)
	}
	if n, err := io.Copy(io.Discard, in); err != nil || n != 1<<20 {
		t.Errorf("%d bytes, %v", n, err)
	}
	if _, err := io.Copy(io.Discard, r); err != nil {
		t.Error(err)
	}
	if err := <-done; ExitCode(err) != guestapi.FilesChanged {
		t.Error(err)
	}
}

// A copy whose host has gone leaves nothing behind.
func TestSignalRemovesTheStage(t *testing.T) {
	home := t.TempDir()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Dir, cmd.Env = home, append(os.Environ(), "FILES_TEST_MAIN=push\ntree\nto")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := in.Write(archive(t, tar.Header{Name: "new/f"}).Bytes()[:1024]); err != nil {
		t.Fatal(err)
	}
	for {
		if found, _ := filepath.Glob(filepath.Join(home, ".agentlab-cp-*/new/f")); len(found) > 0 {
			break
		}
		time.Sleep(time.Millisecond)
	}
	if err := cmd.Process.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	exit, ok := errors.AsType[*exec.ExitError](cmd.Wait())
	if !ok || exit.ExitCode() != 129 {
		t.Errorf("%v", exit)
	}
	if left, err := os.ReadDir(home); err != nil || len(left) > 0 {
		t.Errorf("left %v, %v", left, err)
	}
}

// Each kind of failure has the exit code that the host knows.
func TestExitCodes(t *testing.T) {
	home := t.TempDir()
	for want, args := range map[int][]string{
		2:                      {"push", "device", "x"},
		guestapi.FilesNoTarget: {"push", "file", "no/x"},
		guestapi.FilesMissing:  {"pull", "tree", "no"},
		guestapi.FilesIsDir:    {"pull", "file", "."},
		1:                      {"list", ".", "*"},
	} {
		c := Command{Dir: home, In: strings.NewReader(""), Out: io.Discard}
		if err := c.Run(args); ExitCode(err) != want {
			t.Errorf("%q: %v, exit code %d, not %d", args, err, ExitCode(err), want)
		}
	}
	for err, want := range map[error]int{os.ErrPermission: guestapi.FilesDenied, syscall.ENOSPC: guestapi.FilesNoSpace, syscall.EDQUOT: guestapi.FilesNoSpace} {
		if got := ExitCode(err); got != want {
			t.Errorf("%v: %d", err, got)
		}
	}
}

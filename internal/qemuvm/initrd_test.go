package qemuvm

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/u-root/u-root/pkg/cpio"

	"github.com/agentlab-vm/agentlab"
)

func TestInitrd(t *testing.T) {
	dir := t.TempDir()
	modules, runner := filepath.Join(dir, "modules.cpio"), filepath.Join(dir, "runner")
	write := func(path, text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	write(modules, "0123456789") // of a length that needs padding
	r := &Initrds{dir: filepath.Join(dir, "cache"), runner: runner, boot: "1"}
	if _, err := r.File(t.Context(), modules); agentlab.CodeOf(err) != agentlab.CodeUnavailable || agentlab.HintOf(err) == "" {
		t.Errorf("without agent-runner: %v, want unavailable and a hint", err)
	}
	write(runner, "first")
	if _, err := r.File(t.Context(), modules+"x"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without modules: %v", err)
	}
	a, err := r.File(t.Context(), modules)
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(a)
	if err != nil || !bytes.HasPrefix(b, []byte("0123456789\x00\x00070701")) {
		t.Fatalf("the initrd begins %q, %v", b[:min(20, len(b))], err)
	}
	records, err := cpio.ReadAllRecords(cpio.Newc.Reader(bytes.NewReader(b[12:])))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, rec := range records {
		names = append(names, fmt.Sprintf("%s %o", rec.Name, rec.Mode))
	}
	if got, want := strings.Join(names, ", "), "dev 40755, dev/console 20600, dev/null 20666, init 100755"; got != want {
		t.Errorf("the initrd holds %s, want %s", got, want)
	}
	if again, err := r.File(t.Context(), modules); again != a || err != nil {
		t.Errorf("again: %s, %v", again, err)
	}
	made, err := StampOf(a)
	if err != nil {
		t.Fatal(err)
	}
	fresh := &Initrds{dir: r.dir, runner: runner, boot: r.boot}
	if again, err := fresh.File(t.Context(), modules); again != a || err != nil {
		t.Errorf("another process: %s, %v, want %s", again, err, a)
	}
	if now, err := StampOf(a); now.ino != made.ino || err != nil {
		t.Errorf("another process has made the initrd again: %v", err)
	}
	write(a, "incomplete")                       // a power cut
	for _, boot := range []string{"2", "", ""} { // "": not known
		next := &Initrds{dir: r.dir, runner: runner, boot: boot}
		if again, err := next.File(t.Context(), modules); again != a || err != nil {
			t.Errorf("after a restart of the host: %s, %v, want %s", again, err, a)
		}
		if now, err := os.ReadFile(a); !bytes.Equal(now, b) {
			t.Errorf("after a restart of the host the initrd begins %q, %v", now[:min(20, len(now))], err)
		}
		write(a, "incomplete")
	}
	for i := range 10 { // the cache does not grow with each build of agent-runner
		write(runner, strings.Repeat("x", i+1))
		if a, err = r.File(t.Context(), modules); err != nil {
			t.Fatal(err)
		}
	}
	initrds, _ := filepath.Glob(filepath.Join(r.dir, "*.cpio"))
	links, _ := filepath.Glob(filepath.Join(r.dir, "*"+linkSuffix))
	if _, err := os.Stat(a); err != nil || len(initrds) != keepInitrds || len(links) != keepInitrds {
		t.Errorf("%d initrds and %d links are cached, and the last: %v", len(initrds), len(links), err)
	}
	if err := os.RemoveAll(r.dir); err != nil { // a cache may be emptied at any time
		t.Fatal(err)
	}
	if again, err := r.File(t.Context(), modules); again != a || err != nil || !fileExists(a) {
		t.Errorf("after the cache was emptied: %s, %v", again, err)
	}
}

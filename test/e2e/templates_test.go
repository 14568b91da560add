package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/agentlab-vm/agentlab/test/guard"
	"github.com/agentlab-vm/agentlab/test/sample"
)

// prepare builds the programs, and makes the template that most tests need, whose directory
// it returns: a daemon that has to boot a guest for it would do so beside the test's own. A
// test that continues in another process calls it before.
func prepare(t testing.TB) (templates string) {
	t.Helper()
	sample.Long(t, "it boots virtual machines")
	if _, err := programs(); err != nil {
		t.Fatal(err)
	}
	made, err := guard.Once("templates", func(beside string) error {
		dir := sharedTemplates(t, beside)
		l := newLabIn(t, newHome(t))
		l.useTemplates(dir)
		l.ok("image", "warm", "base")
		l.ok("daemon", "stop")
		return os.Symlink(dir, filepath.Join(beside, "dir"))
	})
	if err == nil {
		templates, err = os.Readlink(filepath.Join(made, "dir"))
	}
	if err != nil {
		t.Fatal(err)
	}
	return templates
}

// useTemplates makes the daemon of a new home use the templates in dir:
// sandboxes start as copies of them instead of booting.
func (l *lab) useTemplates(dir string) {
	l.Helper()
	state := filepath.Join(l.home, "state")
	err := os.MkdirAll(state, 0o700)
	if err == nil {
		err = os.Symlink(dir, filepath.Join(state, "templates"))
	}
	if err != nil {
		l.Fatal(err)
	}
}

// sharedTemplates returns the directory of templates: in the cache between runs,
// or, as sandboxes have hard links to their template, beside the homes if these
// are on another file system.
func sharedTemplates(t testing.TB, beside string) string {
	t.Helper()
	dir := filepath.Join(cacheDir(t), "templates")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	var cache, homes syscall.Stat_t
	if syscall.Stat(dir, &cache) == nil && syscall.Stat(os.TempDir(), &homes) == nil && cache.Dev == homes.Dev {
		return dir
	}
	return beside
}

// templatesIn returns the names of the complete templates in dir.
func templatesIn(t testing.TB, dir string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), ".") {
			names = append(names, e.Name())
		}
	}
	return names
}

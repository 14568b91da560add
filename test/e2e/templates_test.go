package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
)

// envTemplates is the directory of the shared templates in processes that a test
// starts with this program.
const envTemplates = "AGENTLAB_TEST_TEMPLATES"

var (
	templatesTemp string // the directory of templates that is removed at the end, if any
	templatesOnce sync.Once
	templatesDir  string
)

// prepare builds the programs, and makes the template that most tests need: a
// daemon that has to boot a guest for it would do so beside the test's own. A
// test that continues in another process calls it before.
func prepare(t testing.TB) {
	t.Helper()
	if testing.Short() {
		t.Skip("real VMs run without -short: make test")
	}
	if _, err := programs(); err != nil {
		t.Fatal(err)
	}
	templatesOnce.Do(func() {
		if templatesDir = os.Getenv(envTemplates); templatesDir != "" {
			return
		}
		dir := sharedTemplates(t)
		l := newLabIn(t, newHome(t))
		l.useTemplates(dir)
		l.ok("image", "warm", "base")
		l.ok("daemon", "stop")
		if err := os.Setenv(envTemplates, dir); err != nil { //nolint:usetesting // for all tests
			t.Fatal(err)
		}
		templatesDir = dir
	})
	if templatesDir == "" {
		t.Fatal("an earlier test could not make the shared template")
	}
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
func sharedTemplates(t testing.TB) string {
	t.Helper()
	dir := filepath.Join(cacheDir(t), "templates")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	var cache, homes syscall.Stat_t
	if syscall.Stat(dir, &cache) == nil && syscall.Stat(os.TempDir(), &homes) == nil && cache.Dev == homes.Dev {
		return dir
	}
	dir, err := os.MkdirTemp("", "agentlab-templates-*")
	if err != nil {
		t.Fatal(err)
	}
	templatesTemp = dir
	return dir
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

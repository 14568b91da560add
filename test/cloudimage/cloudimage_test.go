package cloudimage

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/agentlab-vm/agentlab/test/guard"
)

func cacheDir(t testing.TB) string {
	t.Helper()
	dir := os.Getenv("AGENTLAB_TEST_CACHE")
	if dir == "" {
		dir = "../../.cache/test"
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// programs builds programs of this module and returns their directory.
func programs(t testing.TB, names ...string) string {
	t.Helper()
	packages := make([]string, len(names))
	for i, name := range names {
		packages[i] = "./cmd/" + name
	}
	dir, err := guard.Programs("../..", packages...)
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

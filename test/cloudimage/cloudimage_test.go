package cloudimage

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
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
	dir := t.TempDir()
	argv := []string{"build", "-trimpath", "-ldflags", "-s -w", "-o", dir + "/"}
	for _, name := range names {
		argv = append(argv, "../../cmd/"+name)
	}
	cmd := exec.Command("go", argv...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	return dir
}

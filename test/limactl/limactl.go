// Package limactl gives tests a real limactl, and the user that it needs.
package limactl

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/agentlab-vm/agentlab/test/guard"
	"github.com/agentlab-vm/agentlab/test/sample"
)

// Version is the version of limactl that Build builds, as test/limactl/module pins it.
const Version = "1.2.2"

// Build returns the path of limactl. It is built once, and kept in the cache of the tests
// by the content of the module that pins it; root is the directory of this module. A test
// is skipped if it cannot be built, except in a full run.
func Build(t testing.TB, root string) string {
	t.Helper()
	path, err := build(root)
	if err == nil {
		return path
	}
	if sample.Full() {
		t.Fatal(err)
	}
	t.Skipf("skipped: %v", err)
	return ""
}

func build(root string) (string, error) {
	module := filepath.Join(root, "test", "limactl", "module")
	sum, err := os.ReadFile(filepath.Join(module, "go.sum"))
	if err != nil {
		return "", err
	}
	cache := os.Getenv("AGENTLAB_TEST_CACHE")
	if cache == "" {
		cache = filepath.Join(root, ".cache", "test")
	}
	if cache, err = filepath.Abs(cache); err != nil {
		return "", err
	}
	key := sha256.Sum256(append(sum, Version...))
	path := filepath.Join(cache, "limactl-"+hex.EncodeToString(key[:8]))
	_, err = guard.Once("limactl", func(string) error {
		if _, err := os.Stat(path); err == nil {
			return nil
		}
		if err := os.MkdirAll(cache, 0o755); err != nil {
			return err
		}
		cmd := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w -X github.com/lima-vm/lima/pkg/version.Version="+Version,
			"-o", path+".tmp", "github.com/lima-vm/lima/cmd/limactl")
		var out bytes.Buffer
		cmd.Dir, cmd.Stdout, cmd.Stderr = module, &out, &out
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=-mod=mod", "GOWORK=off")
		if err := cmd.Run(); err != nil {
			return fmt.Errorf("limactl cannot be built: %w\n%s", err, out.Bytes())
		}
		return os.Rename(path+".tmp", path)
	})
	if err == nil {
		_, err = os.Stat(path)
	}
	return path, err
}

package cloudimage

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// createTemplate runs create_template.sh and returns what it prints.
func createTemplate(t testing.TB, runnerDir string, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	cmd := exec.Command("../../scripts/create_template.sh", args...)
	cmd.Env = append(os.Environ(), "AGENTLAB_BIN="+runnerDir)
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	err = cmd.Run()
	return out.String(), errOut.String(), err
}

func fileSum(t testing.TB, path string) string {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		t.Fatal(err)
	}
	return hex.EncodeToString(h.Sum(nil))
}

// What create_template.sh makes of a cloud image is a sandbox when it is
// cloned and started.
func TestDiskOfScript(t *testing.T) {
	bootsVMs(t)
	plain, err := Plain(t.Context(), cacheDir(t), os.Stderr)
	if err != nil {
		t.Fatal(err)
	}
	dir, bin := t.TempDir(), filepath.Dir(runner(t))
	disk := filepath.Join(dir, "disk.raw")
	args := []string{"--image", "base", "--size", "4", "--cache", filepath.Join(dir, "cache"), "--disk-only", disk, "--from", plain, "--sha256"}

	if _, msg, err := createTemplate(t, bin, append(args, strings.Repeat("0", 64), "--apply")...); err == nil || !strings.Contains(msg, "does not have the SHA-256 sum") {
		t.Fatalf("an image with another sum: %v\n%s", err, msg)
	}
	args = append(args, fileSum(t, plain))
	planned, msg, err := createTemplate(t, bin, args...)
	if err != nil {
		t.Fatalf("%v\n%s", err, msg)
	}
	if _, err := os.Stat(filepath.Join(dir, "cache")); err == nil {
		t.Error("without --apply something was made")
	}
	did, msg, err := createTemplate(t, bin, append(args, "--apply")...)
	if err != nil {
		t.Fatalf("%v\n%s", err, msg)
	}
	if a, b := strings.Count(planned, "\n+ "), strings.Count(did, "\n+ "); a != b {
		t.Errorf("planned:\n%s\ndone:\n%s", planned, did)
	}
	if left, _ := os.ReadDir(filepath.Join(dir, "cache")); len(left) != 0 {
		t.Errorf("left: %v", left)
	}

	v := newVM(t, testUID, disk, "raw")
	v.seedThroughAgent("box-2")
	c, _, took := v.up()
	t.Logf("guest control %s after the guest agent wrote the seed", took)
	v.refusesOthers()
	v.isSandbox(c, "box-2")
	v.identity(c, "box-2")
	v.sshKey(c)
	v.expect(c, "agent", "jq --version >/dev/null && git --version >/dev/null && bwrap --version >/dev/null && echo yes", "yes")
	v.noFailedUnits(c)
}

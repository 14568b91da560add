// Package disk gives tests directories on a disk. TMPDIR may be in memory.
package disk

import (
	"os"
	"testing"
)

// Dir returns an empty directory below /var/tmp, which the end of the test removes.
func Dir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/var/tmp", "agentlab-test-*")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

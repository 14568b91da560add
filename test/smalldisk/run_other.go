//go:build !linux

package smalldisk

import "testing"

const why = "small file systems are mounted on Linux only"

// Run skips the test.
func Run(t *testing.T, _ string, _ func(t *testing.T, dir string)) {
	t.Helper()
	t.Skip(why)
}

// Tmpfs skips the test.
func Tmpfs(t testing.TB, _, _ string) func(string) {
	t.Helper()
	t.Skip(why)
	return nil
}

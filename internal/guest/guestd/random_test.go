//go:build linux

package guestd

import (
	"os/exec"
	"strings"
	"testing"
)

// The state of math/rand and hash/maphash is in the memory of a process: copies of
// a guest share it. So guestd, the runner and what they consist of do not use them.
func TestNoCopiedRandomValues(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", "-f", `{{.ImportPath}} {{.Standard}} {{join .Imports " "}}`, ".", "../initd", "../runner").CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	found := false
	for line := range strings.Lines(string(out)) {
		f := strings.Fields(line)
		if len(f) < 2 || f[1] == "true" {
			continue
		}
		for _, name := range f[2:] {
			found = found || name == "crypto/rand"
			if strings.HasPrefix(name, "math/rand") || name == "hash/maphash" {
				t.Errorf("%s imports %s", f[0], name)
			}
		}
	}
	if !found {
		t.Errorf("no package imports crypto/rand: %s", out)
	}
}

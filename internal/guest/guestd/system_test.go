//go:build linux

package guestd

import (
	"os"
	"path/filepath"
	"testing"
)

// A systemd that does not answer, as on a busy host, has not shown that it has
// booted. What it has answered before stays valid.
func TestSystemdWithoutAnswer(t *testing.T) {
	bin := t.TempDir()
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	s := &Server{ctx: t.Context()}
	for _, step := range []struct{ answer, want string }{
		{"", "starting"}, {"unknown", "starting"}, {"offline", "starting"}, {"initializing", "starting"},
		{"degraded", "degraded"}, {"", "degraded"}, {"running", "running"}, {"unknown", "running"}, {"maintenance", "unknown"},
	} {
		script := "#!/bin/sh\necho " + step.answer + "\n"
		if err := os.WriteFile(filepath.Join(bin, "systemctl"), []byte(script), 0o700); err != nil {
			t.Fatal(err)
		}
		s.askSystemd()
		if s.system.status != step.want {
			t.Errorf("after the answer %q: %q, want %q", step.answer, s.system.status, step.want)
		}
	}
}

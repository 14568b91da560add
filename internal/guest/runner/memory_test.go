package runner

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/guestapi"
)

// The reason for the end of a program is in the log, the reports and the message. What
// was killed before the job began is not of the job: the sandbox may be a copy.
func TestMemoryKills(t *testing.T) {
	cgroups := t.TempDir()
	events := filepath.Join(cgroups, guestapi.Slice, "memory.events")
	if err := os.MkdirAll(filepath.Dir(events), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(events, []byte("oom_kill 7\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	s := newShellSandbox(t, "echo 'oom_kill 8' >"+events+".new; mv "+events+".new "+events+"; kill -KILL $$")
	s.cfg.Cgroups = cgroups
	if err := s.run(); err != nil {
		t.Fatal(err)
	}
	const reason = "the kernel of the sandbox has killed 1 process: the memory was used up"
	rep := s.Final()
	if rep.Status != "FAILED" || !strings.HasSuffix(rep.Message, "(killed); "+reason) || rep.Kills == nil || *rep.Kills != (guestapi.MemoryKills{Other: 1}) {
		t.Errorf("%+v", rep)
	}
	if log := s.Log(); strings.Count(log, "[agentlab] "+reason) != 1 {
		t.Errorf("log:\n%s", log)
	}
}

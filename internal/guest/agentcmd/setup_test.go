package agentcmd

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/guestapi"
)

func TestSetUpOnce(t *testing.T) {
	home, dir := t.TempDir(), t.TempDir()
	t.Setenv("API_KEY", "secret")
	req := guestapi.SetupRun{Commands: []string{`echo "key ${API_KEY-none} in $PWD"`, "echo x >> runs"}, Dir: dir, Seconds: 600}
	var out bytes.Buffer
	runs := func(want int) {
		t.Helper()
		p, _ := os.ReadFile(filepath.Join(dir, "runs"))
		if got := strings.Count(string(p), "x"); got != want {
			t.Errorf("%d runs, want %d; output %q", got, want, out.String())
		}
	}
	for range 2 {
		if err := setUpOnce(req, home, &out); err != nil {
			t.Fatal(err)
		}
		runs(1)
	}
	if !strings.Contains(out.String(), "key none in "+dir+"\n") || strings.Count(out.String(), "setup[1]") != 1 {
		t.Errorf("output %q", out.String())
	}
	if log, err := os.ReadFile(filepath.Join(home, setupLog)); err != nil || string(log) != out.String() {
		t.Errorf("log %q %v", log, err)
	}
	req.Commands = append(req.Commands, "exit 3", "echo x >> runs")
	for i := range 2 { // a failure is not remembered
		if err := setUpOnce(req, home, &out); err == nil || err.Error() != `setup[2] "exit 3" exited with code 3` {
			t.Error(err)
		}
		runs(2 + i)
	}
	req.Commands = []string{"sleep 600 & echo x >> runs"}
	if err := setUpOnce(req, home, &out); err != nil {
		t.Error(err)
	}
	runs(4)
}

func TestSetupIsBounded(t *testing.T) {
	req := guestapi.SetupRun{Commands: []string{"trap '' TERM; sleep 600"}, Dir: t.TempDir(), Seconds: 1}
	err := setUpOnce(req, t.TempDir(), &bytes.Buffer{})
	if err == nil || !strings.Contains(err.Error(), "was stopped: setup may take 1s") {
		t.Error(err)
	}
}

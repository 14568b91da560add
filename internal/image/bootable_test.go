package image

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
)

// On a machine that cannot build images the error, with the remedy, comes
// before anything is started.
func TestImagesThatCannotBeBuilt(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	s := Bootable{NewStore(t.TempDir(), Options{})}
	err := s.Check("base")
	if agentlab.CodeOf(err) != agentlab.CodeUnavailable || !strings.Contains(agentlab.HintOf(err), "apt-get install mmdebstrap") {
		t.Errorf("Check: %v, hint %q", err, agentlab.HintOf(err))
	}
	if err := s.Check("mine"); agentlab.CodeOf(err) != agentlab.CodeNotFound {
		t.Errorf("Check of an unknown image: %v", err)
	}
}

// For an image that exists, nothing of this machine is checked: the checks start
// programs, and a sandbox waits for them.
func TestBuiltImageIsNotChecked(t *testing.T) {
	s, bin := Bootable{newStore(t, "1")}, t.TempDir()
	mustEnsure(t, s.Store, "base")
	r, err := Shipped("base")
	if err != nil {
		t.Fatal(err)
	}
	for _, tool := range r.tools() {
		if err := os.WriteFile(filepath.Join(bin, tool.name), []byte("#!/bin/sh\n: >"+bin+"/ran\n"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", bin)
	ran := func() bool { _, err := os.Stat(filepath.Join(bin, "ran")); return err == nil }
	if err := s.Check("base"); err != nil || ran() {
		t.Errorf("%v, a program ran: %t", err, ran())
	}
	if _, err := s.Readiness(t.Context(), "base"); err != nil || !ran() {
		t.Errorf("%v, a program ran: %t", err, ran())
	}
}

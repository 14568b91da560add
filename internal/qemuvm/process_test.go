package qemuvm

import (
	"bytes"
	"os/exec"
	"strings"
	"testing"
)

// QEMU has no capability even when root runs it, and cannot get one.
func TestQEMUHasNoPrivileges(t *testing.T) {
	var status bytes.Buffer
	cmd := exec.Command("cat", "/proc/self/status")
	cmd.Stdout = &status
	ended, err := StartUnprivileged(cmd, nil, false)
	if err != nil {
		t.Fatal(err)
	}
	<-ended
	for _, want := range []string{"CapPrm:\t0000000000000000", "CapEff:\t0000000000000000", "CapBnd:\t0000000000000000", "NoNewPrivs:\t1"} {
		if !strings.Contains(status.String(), want) {
			t.Errorf("no %q in\n%s", want, status.String())
		}
	}
}

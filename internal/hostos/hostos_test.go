package hostos_test

import (
	"testing"

	"github.com/agentlab-vm/agentlab/internal/hostos"
)

func TestBoot(t *testing.T) {
	if a, b := hostos.BootID(), hostos.BootID(); a == "" || a != b {
		t.Errorf("the boot is %q and %q", a, b)
	}
	if a, b := hostos.SinceBoot(), hostos.SinceBoot(); a <= 0 || b < a {
		t.Errorf("%v since the boot, then %v", a, b)
	}
}

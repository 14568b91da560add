package hostvirt

import (
	"testing"
	"time"
)

// The figure is that of a page fault and not of an access: it is far above a nanosecond.
func TestFaultCost(t *testing.T) {
	cost, err := FaultCost()
	if err != nil {
		t.Fatal(err)
	}
	if cost < 20*time.Nanosecond {
		t.Errorf("%v", cost)
	}
	t.Logf("the first access to a page takes %v", cost)
}

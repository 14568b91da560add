package qemu

import (
	"testing"

	"github.com/agentlab-vm/agentlab/test/sample"
)

// longTests take long and are about what seldom changes. A run that is not full has one of
// them.
var longTests = []string{
	"TestNestedKVM",
	"TestFullDiskPausesGuest",
	"TestClonesHaveOwnRandomValues",
	"TestEmulatedGuestSurvivesKernelPatching",
	"TestKilledWhileSaving",
	"TestSaveOnFullDisk",
	"TestSaveOfWarmGuestOnFullDisk",
	"TestGuestWithStoppedTimer",
	"TestMergerDies",
	"TestSaveOfRunningGuest",
	"TestVolumeIsSavedWhileItIsWritten",
	"TestTemplateVMIsKilled",
}

// sampled skips a test of longTests that this run does not select.
func sampled(t *testing.T) {
	t.Helper()
	sample.Choose(t, 1, longTests, t.Name())
}

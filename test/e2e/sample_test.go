package e2e

import (
	"testing"

	"github.com/agentlab-vm/agentlab/test/sample"
)

// Tests that take minutes. A run that is not full has some of each group.
var (
	// agentTests run real programs of npm in a guest: an agent that works for a scripted
	// model, or a server for development.
	agentTests = []string{
		"TestRealAgents/claude", "TestRealAgents/codex", "TestInnerSandbox/claude", "TestAgentByHand",
		"TestDeniedModel", "TestNarrowingKeepsModel", "TestPrivateModelGateway", "TestInteractiveAgents", "TestInteractiveSubscription", "TestWorkflow",
		"TestHotReloadInABrowser", "TestRandomValuesOfNode",
	}
	// stateTests have state that outlives its sandbox. On the fake backend much is
	// tested in every run (internal/workspace, internal/sandbox, internal/job).
	stateTests = []string{
		"TestRandomOperationsOnRealWorkspaces", "TestWorkspaceMaintenance", "TestSessionContinues", "TestJobsShareAWorkspace",
		"TestWorkSurvivesALostVM", "TestGoldenProfiles", "TestFullDiskSandboxEnds", "TestSessionizer", "TestSessionTerminals",
		"TestRegistryCache", "TestSecondJobSkipsSetup", "TestKillDuringSetupSnapshot",
	}
	// nestedTests have sandboxes with hardware virtualization. Where this host has no KVM,
	// it is that of the emulator.
	nestedTests = []string{"TestNestedMemoryOfAJob", "TestNestedSwitchedOff"}
)

// sampled skips a test that this run does not select among those of its group.
func sampled(t *testing.T, n int, group []string) {
	t.Helper()
	sample.Choose(t, n, group, t.Name())
}

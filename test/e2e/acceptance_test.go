package e2e

import (
	"path/filepath"
	"strings"
	"testing"
)

// The acceptance criteria of seed 001, in its order. A script is one of
// testdata/acceptance and begins with the text of its criterion. Those marked with (*) do
// not depend on the backend and run on the fake one only.
//
//	§1    one command runs a job on a workspace    one-command; TestJobsShareAWorkspace
//	§1    no race for the sandbox of a job         right-sandbox
//	§1    clear errors                             clear-errors
//	§2.1  concurrent use of a workspace            one-writer; TestRaceForAWorkspace (internal/sandbox)
//	§2.1  waiting survives a restart               wait-survives-restart; TestJobsShareAWorkspace
//	§2.2  named snapshots, list, restore           snapshot-and-restore
//	§2.2  a workspace in use is saved with a flag  snapshot-in-use
//	§2.2  events of snapshots                      snapshots-are-events
//	§2.3  a fork is independent                    fork-is-independent
//	§2.3  a fork does not change its source        fork-keeps-source
//	§2.4  failures name the next action            failures-name-a-remedy; TestWorkspaceMaintenance
//	§3    processes coordinate                     messages-coordinate (*); TestAgentsCoordinate
//	§3    tail follows by ID                       messages-tail (*)
//	§3    messages are durable and auditable       messages-are-kept (*)
//	§4    one deterministic bundle                 doctor-is-deterministic
//	§4    no secrets in bundles                    doctor-has-no-secrets; doctor.txtar (internal/cli)
//	§5    a new host runs its first job            TestInit (test/hostscripts), then TestProxmoxShell and TestProxmoxREST
//	§5    --apply is explicit                      TestInit (test/hostscripts)
//	§5    golden profiles                          golden.txtar (internal/cli), TestGoldenProfiles, TestInstall (test/hostscripts)
//
// TestAcceptanceQEMU runs the scripts with real VMs, TestAcceptance of internal/cli on the
// fake backend, TestProxmoxShell and TestProxmoxREST with real VMs of a fake node.
func TestAcceptanceQEMU(t *testing.T) {
	t.Parallel()
	for _, path := range acceptance(t) {
		t.Run(strings.TrimSuffix(filepath.Base(path), ".txtar"), func(t *testing.T) {
			t.Parallel()
			runScripts(newLab(t), t, "qemu", path)
		})
	}
}

func acceptance(t testing.TB) []string {
	t.Helper()
	return txtar(t, "acceptance")
}

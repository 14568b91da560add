package e2e

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/test/sample"
)

// The acceptance criteria of seed 001, in its order. A script is one of
// testdata/acceptance and begins with the text of its criterion. Those marked with (*) do
// not depend on the backend and run on the fake one only.
//
//	§1    one command runs a job on a workspace    one-command; TestJobsShareAWorkspace
//	§1    no race for the sandbox of a job         right-sandbox
//	§1    clear errors                             clear-errors
//	§2.1  concurrent use of a workspace            one-writer; TestRaceForAWorkspace (internal/workspace)
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
// The acceptance criteria of seed 004, in its order: user stories with the numbers of their
// scenarios, edge cases, requirements and success criteria. "open" is not built, or has no
// test of the whole, with the reason.
//
//	US1.1   start                                work-comes-back; TestSessionRepository; with an agent TestInteractiveAgents
//	US1.2   changes come back                    work-comes-back; TestSessionRepository; automatically TestSessionTerminals
//	US1.3   no questions                         TestInteractiveAgents; TestClaudeSettings, TestOtherSettings (internal/guest/agentcmd)
//	US2.1   attach                               TestSessionTerminals; TestOpen (internal/guest/agentcmd)
//	US2.2   work trees                           work-comes-back; TestSessionTerminals; TestWorktrees (internal/guest/repocmd)
//	US2.3   a terminal and agent for each        TestSessionTerminals; two agents TestInteractiveAgents
//	US3.1   commits                              work-comes-back; TestSessionRepository; TestSync (internal/cli)
//	US3.2   artifacts                            work-comes-back; TestSyncArtifacts (internal/cli)
//	US3.3   the host starts all transfers        TestNoCredentialsInASession; TestProbeTable
//	US4.1   ports by name                        TestDevServers, TestHotReloadInABrowser; TestNamesBelowLocal (internal/devproxy)
//	US4.2   ports of work trees                  TestDevServers; TestWorktreesHaveNames (internal/devproxy)
//	US4.3   a stopped sandbox                    TestDevServers; TestStoppedSandbox (internal/devproxy)
//	US5.1   dev containers                       TestEnvironment; the configuration TestReadConfig, TestResult (internal/guest/devenv)
//	US5.2   ports of a dev container             TestEnvironment; the list TestForwardPorts (internal/guest/devenv)
//	US5.3   VS Code                              TestSessionRepository; sshconfig.txtar with TestScripts (internal/cli)
//	US6.1   a VM in a sandbox                    TestNestedKVM (internal/backend/qemu)
//	US6.2   a test suite with VMs                open: none was run in a sandbox
//	US6.3   sync beside a nested VM              TestNestedVM
//	US7.1   a pod                                open: the backend kubernetes does not exist
//	US7.2   terminals of a pod                   open: see US7.1
//	US7.3   sync of a pod                        open: see US7.1
//	EDGE.1  the VM crashes                       TestSessionTerminals; with agents TestInteractiveAgents
//	EDGE.2  conflicts                            work-comes-back; TestSync (internal/cli)
//	EDGE.3  uncommitted changes on the host      work-comes-back; TestSessionRepository
//	EDGE.4  a full disk                          TestSyncThatFails (internal/cli)
//	EDGE.5  keys of the host                     TestNoCredentialsInASession
//	EDGE.6  no nested virtualization             TestNestedSwitchedOff
//	EDGE.7  a nested VM takes all resources      TestNestedVM; the report of a job TestNestedMemoryOfAJob
//	FR-001  isolation                            TestProbeTable, TestVerify
//	FR-002  /workspace                           work-comes-back; TestSessionRepository; TestReceive (internal/guest/repocmd)
//	FR-003  agents without questions             TestInteractiveAgents, TestRealAgents
//	FR-004  work trees                           see US2.2
//	FR-005  no credentials                       TestNoCredentialsInASession
//	FR-006  host-initiated sync                  see US3.1, US3.3
//	FR-007  other files                          see US3.2, FR-023
//	FR-008  host-initiated transfers             see US3.3
//	FR-009  terminals                            TestSessionTerminals; TestInteractiveAgents; the sessionizer TestSessionizer
//	FR-010  Zellij                               TestOpenInZellij, TestZellijWeb (internal/guest/agentcmd)
//	FR-011  terminals of host and guest          TestSessionizer; TestOpen (internal/guest/agentcmd)
//	FR-012  ports by name                        see US4.1
//	FR-013  backends                             TestConformance (internal/backend/qemu and others)
//	FR-014  the backend by default               TestConformance (internal/backend/qemu)
//	FR-015  ready for Kubernetes                 TestToyBackend (internal/daemon)
//	FR-016  devcontainer.json                    see US5.1
//	FR-017  features of dev containers           TestEnvironment
//	FR-018  one level of nested virtualization   see US6.1
//	FR-019  KVM in the sandbox                   see US6.1
//	FR-020  the report of the capability         see EDGE.6
//	FR-021  limits of nested VMs                 see EDGE.7
//	FR-022  modes of sync                        TestSessionTerminals
//	FR-023  environment files                    work-comes-back; TestFindEnvFiles, TestPackNamedFiles (internal/cli)
//	FR-024  direnv                               TestSessionTerminals
//	FR-025  resources                            TestInteractiveProfile (internal/profile)
//	FR-026  state persists, --fresh              work-comes-back; TestSessionRepository; TestSessionContinues
//	SC-001  start to a working agent             BenchmarkInteractive
//	SC-002  no questions                         see US1.3
//	SC-003  sync of a commit                     BenchmarkInteractive
//	SC-004  attach                               BenchmarkInteractive
//	SC-005  credentials of the host              TestNoCredentialsInASession
//	SC-006  the proxy of ports                   BenchmarkDevServer; BenchmarkAdded (internal/devproxy)
//	SC-007  the same commands on all backends    work-comes-back
//	SC-008  a nested VM boots                    see US6.1
//	SC-009  the test suite of another project    open: see US6.2
//
// The requirements of seed 003, in its order. It asks for Lima on macOS; what does not depend
// on that is tested with QEMU on Linux. "open" has no test, with the reason.
//
//	VM.1    no host mounts, no agent socket      TestHostMountsAreRefused (internal/backend/qemu), TestNoCredentialsInASession
//	VM.2    cpus, memory and disk for each VM    TestSessionizerResources, TestSessionizerProfile (internal/cli)
//	VM.3    Lima instance on macOS               open: the backend lima does not exist
//	NET.1   allowed domains only, NXDOMAIN       TestProbeTable, TestEgressFromGuest; the list of the seed TestPresets (internal/egress)
//	NET.2   ports 80, 443 and 22 only            TestNATWithDenyAndPorts (internal/egress), TestProbeTable; for the sessionizer TestSessionizerProfile (internal/cli)
//	NET.3   no inbound connections               TestProbeTable
//	NET.4   all DNS through AgentLab             TestProbeTable; TestAddressIsAllowedOnlyByOurDNSAnswer (internal/egress/gate), TestOnlyAgentLabAnswersDNS (internal/egress/nft)
//	SZ.1    fzf over repositories and VMs        TestSessionizer; TestSessionizerPlan (internal/cli)
//	SZ.2    owner/repo without a choice          TestSessionizer
//	SZ.3    --list                               TestSessionizer; sessionizer.txtar, TestSessionizerOtherSessions (internal/cli)
//	SZ.4    --stop, --destroy                    TestSessionizer; sessionizer.txtar with TestScripts (internal/cli)
//	SZ.5    windows vim to scratch               TestSessionizer; TestSessionizerPlan (internal/cli)
//	IMG.1   coding agents and their settings     TestAgentsImage (internal/image); TestClaudeSettings (internal/guest/agentcmd)
//	IMG.2   Docker, Node through nvm, lazygit    TestDevImage, with n in place of nvm
//	IMG.3   Playwright dependencies              TestContainers
//	IMG.4   dotfiles for the VM                  TestSessionRepository; the configuration of tmux TestOpen (internal/guest/agentcmd)
//	CFG.1   repos.txt                            TestSessionizerRepos (internal/cli)
//	CFG.2   resources.yaml with overrides        TestSessionizerResources (internal/cli)
//	CFG.3   network-allowlist.txt                TestSessionizerProfile (internal/cli)
//	SEC.1   secrets from 1Password at the start  TestReferences, TestReferenceForm (internal/secret)
//	SEC.2   never in the image                   TestCanary
//	SEC.3   a fresh login of a subscription      TestInteractiveSubscription
//	WF.1    a new session                        TestSessionizer
//	WF.2    switching, running ones first        TestSessionizer; TestSessionizerPlan (internal/cli)
//	WF.3    destroying                           TestSessionizer
//	CAN.1   read and write code                  TestRealAgents, TestInteractiveAgents
//	CAN.2   push branches                        TestJobByURL; TestPushRefused (internal/guest/runner)
//	CAN.3   pull requests                        open: no test uses the internet; gh TestDevImage; the network TestPresets (internal/egress)
//	CAN.4   install packages                     TestPresets (internal/egress); real registries open: no test uses the internet
//	CAN.5   containers                           TestDevImage, TestContainers
//	CAN.6   development servers                  TestDevServers, TestHotReloadInABrowser
//	CAN.7   run tests                            TestRealAgents
//	CAN.8   Playwright                           TestContainers
//	CAN.9   allowed domains by HTTP              TestProbeTable
//	CAN.10  full Claude Code                     TestInteractiveAgents, TestInteractiveSubscription
//	NOT.1   files of the host                    TestHostMountsAreRefused (internal/backend/qemu), TestHostileGuest
//	NOT.2   network services of the host         TestProbeTable, TestVerify
//	NOT.3   push to main                         open: protection of the branch at GitHub; the agent's token TestCredentialStaysAtItsHost (internal/guest/runner)
//	NOT.4   other domains                        TestProbeTable, TestEgressFromGuest
//	NOT.5   other ports                          TestProbeTable; TestNATWithDenyAndPorts (internal/egress)
//	NOT.6   other VMs                            TestProbeTable; TestSandboxesCannotShareAnAddress (internal/egress/nft)
//	NOT.7   state after the end of a VM          TestSecretsVanish (internal/job), TestCanary
//	NOT.8   real credentials                     TestNoCredentialsInASession
//	BLAST   the worst case is a bad branch       TestHostileGuest, TestHostileSession (internal/cli)
//	RES.1   defaults and overrides               see CFG.2
//	RES.2   at most 10 VMs, with a question      TestSessionizerConcurrent (internal/cli)
//	RES.3   no GPU                               TestArgs (internal/backend/qemu)
//	PH.1    the MVP                              see VM.1, SZ.1 to SZ.5, NET.2, CFG.1
//	PH.2    domains, dotfiles, tmux, resources   see NET.1, IMG.4, SZ.5, CFG.2
//	PH.3    1Password, several VMs, monitoring   see SEC.1, RES.2; TestGauges (internal/metrics)
//
// A hostile guest against these criteria: TestHostileGuest, and the tables TestHostileSession,
// TestHostileArchivesAreRefused, TestHostileArtifacts (internal/cli), TestAttacks
// (internal/termfilter), TestHostileListeners, TestResponseHeaders (internal/devproxy) and
// TestHostileAnswers (internal/control).
//
// TestAcceptanceQEMU runs the scripts with real VMs, TestAcceptance of internal/cli on the
// fake backend, TestProxmoxShellAcceptance and TestProxmoxRESTAcceptance with real VMs of a fake node. A run
// that is not full has half of them with real VMs, and all on the fake backend.
func TestAcceptanceQEMU(t *testing.T) {
	t.Parallel()
	all := acceptance(t)
	for _, path := range sample.Of(t, len(all)/2, all) {
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

package metrics

import (
	"encoding/json"
	"slices"

	"github.com/agentlab-vm/agentlab"
)

// eventMetric is a metric made of events. It counts the events of one kind, adds
// a number from their data, or (with buckets) observes it.
type eventMetric struct {
	metric
	kind  string            // of the events
	key   string            // key of the data with the value of the label
	as    map[string]string // values of the data that have another name in the label
	value string            // key of the data with the number; "" counts events
}

// Bounds of histograms, in seconds.
var (
	startBuckets = []float64{.05, .1, .25, .5, 1, 2, 4, 8, 15, 30, 60, 120, 300}
	saveBuckets  = []float64{.1, .5, 1, 2, 5, 10, 30, 60, 120, 300, 600}
	runBuckets   = []float64{5, 15, 30, 60, 120, 300, 600, 1800, 3600, 3 * 3600, 12 * 3600}
	writeBuckets = []float64{.0005, .001, .002, .005, .01, .025, .05, .1, .25, .5, 1, 5}
)

// eventMetrics are the metrics made of events. An event without the key, or with a
// value that the label does not have, is not counted.
var eventMetrics = []eventMetric{
	{metric{name: "agentlab_sandboxes_created_total", help: "Sandboxes that were requested."}, agentlab.EventSandboxCreated, "", nil, ""},
	{metric{name: "agentlab_sandbox_transitions_total", help: "Changes of the state of sandboxes, by the new state.", label: "state", values: texts(agentlab.SandboxStates)}, agentlab.EventSandboxState, "to", nil, ""},
	{metric{name: "agentlab_sandbox_start_seconds", help: "Time from the request of a sandbox, or from the lease of its workspace if it waited for that, to the first answer of its guest: cold means a boot, clone a copy of a template, pool a sandbox of the warm pool, snapshot a fork or a copy of a snapshot.", label: "path", values: []string{"cold", "clone", "pool", "snapshot"}, buckets: startBuckets},
		agentlab.EventSandboxState, "start", map[string]string{string(agentlab.StartBoot): "cold", string(agentlab.StartTemplate): "clone"}, "start_seconds"},
	{metric{name: "agentlab_sandbox_forks_total", help: "Forks of sandboxes."}, agentlab.EventSandboxForked, "", nil, ""},
	{metric{name: "agentlab_snapshot_operations_total", help: "Steps of snapshots of sandboxes, by the new state. A snapshot that was not saved goes from SAVING to DELETING or DELETED.", label: "state", values: snapshotSteps}, agentlab.EventSandboxSnapshot, "state", nil, ""},
	{metric{name: "agentlab_snapshot_failures_total", help: "Snapshots of sandboxes that were not saved, by the code of the error.", label: "code", values: codes}, agentlab.EventSandboxSnapshot, "code", nil, ""},
	{metric{name: "agentlab_snapshot_save_seconds", help: "Time from the request of a snapshot until it was saved.", buckets: saveBuckets}, agentlab.EventSandboxSnapshot, "", nil, "seconds"},
	{metric{name: "agentlab_snapshot_saved_bytes_total", help: "Size of the snapshots that were saved."}, agentlab.EventSandboxSnapshot, "", nil, "bytes"},
	{metric{name: "agentlab_workspace_operations_total", help: "Changes of workspaces, by the state after them.", label: "state", values: workspaceSteps}, agentlab.EventWorkspaceState, "state", nil, ""},
	{metric{name: "agentlab_workspace_failures_total", help: "Changes of workspaces that failed, by the code of the error.", label: "code", values: codes}, agentlab.EventWorkspaceState, "code", nil, ""},
	{metric{name: "agentlab_workspace_operation_seconds", help: "Time from the request of an operation of a workspace until it succeeded. A resize or restore that a restart of the daemon interrupted counts from the restart.", label: "operation", values: workspaceOperations, buckets: saveBuckets}, agentlab.EventWorkspaceState, "operation", nil, "seconds"},
	{metric{name: "agentlab_workspace_operation_failures_total", help: "Operations of workspaces that were given up.", label: "operation", values: workspaceOperations}, agentlab.EventWorkspaceState, "failed_operation", nil, ""},
	{metric{name: "agentlab_workspace_snapshot_save_seconds", help: "Time from the request of a snapshot of a workspace until it was saved.", buckets: saveBuckets}, agentlab.EventWorkspaceSnapshot, "", nil, "seconds"},
	{metric{name: "agentlab_workspace_snapshot_operations_total", help: "Steps of snapshots of workspaces, by the new state.", label: "state", values: workspaceSnapshotSteps}, agentlab.EventWorkspaceSnapshot, "state", nil, ""},
	{metric{name: "agentlab_workspace_snapshot_failures_total", help: "Snapshots of workspaces that were not saved, by the code of the error.", label: "code", values: codes}, agentlab.EventWorkspaceSnapshot, "code", nil, ""},
	{metric{name: "agentlab_workspace_lease_steps_total", help: "Steps of leases of workspaces: queued ones wait for another sandbox.", label: "step", values: leaseSteps}, agentlab.EventWorkspaceLease, "step", nil, ""},
	{metric{name: "agentlab_workspace_lease_wait_seconds", help: "Time from the request of a lease of a workspace until it was acquired.", buckets: runBuckets}, agentlab.EventWorkspaceLease, "", nil, "wait_seconds"},
	{metric{name: "agentlab_workspace_lease_failures_total", help: "Requests to attach, mount or detach a workspace that were given up, by the code of the error.", label: "code", values: codes}, agentlab.EventWorkspaceLease, "code", nil, ""},
	{metric{name: "agentlab_session_operations_total", help: "Changes of sessions. A fork is counted as created; resumed means a sandbox was created, started or resumed.", label: "action", values: texts(agentlab.SessionActions)}, agentlab.EventSession, "action", nil, ""},
	{metric{name: "agentlab_jobs_created_total", help: "Jobs that were created, each attempt included."}, agentlab.EventJobCreated, "", nil, ""},
	{metric{name: "agentlab_jobs_ended_total", help: "Jobs that ended, by their final status.", label: "status", values: finalStatuses()}, agentlab.EventJobStatus, "status", nil, ""},
	{metric{name: "agentlab_job_run_seconds", help: "Time from the start of the runner of a job to its end, by the final status.", label: "status", values: finalStatuses(), buckets: runBuckets}, agentlab.EventJobStatus, "status", nil, "run_seconds"},
	{metric{name: "agentlab_artifacts_stored_total", help: "Artifacts of jobs that were stored."}, agentlab.EventArtifactStored, "", nil, ""},
	{metric{name: "agentlab_artifact_stored_bytes_total", help: "Size of the artifacts of jobs that were stored."}, agentlab.EventArtifactStored, "", nil, "size"},
	{metric{name: "agentlab_drift_total", help: "Differences that were found between the database and the backend."}, agentlab.EventDrift, "", nil, ""},
}

// The metrics made of other parts of a commit, and of calls.
var (
	egressDecisions = metric{name: "agentlab_egress_decisions_total", help: "Network decisions about guests: allow and deny; unrecorded means decisions that were not recorded because there were too many.", label: "verdict", values: []string{"allow", "deny", "unrecorded"}}
	messagesPosted  = metric{name: "agentlab_messages_posted_total", help: "Messages that were posted, by what they are for.", label: "scope", values: texts(agentlab.MessageScopeKinds)}
	storeWrite      = metric{name: "agentlab_store_write_seconds", help: "Time of a write to the database, without the wait for its turn.", buckets: writeBuckets}
	storeWait       = metric{name: "agentlab_store_write_wait_seconds", help: "Time that a write to the database waited for its turn.", buckets: writeBuckets}
	storeRead       = metric{name: "agentlab_store_read_seconds", help: "Time of a read of the database, with the wait for a connection.", buckets: writeBuckets}
	storeFailures   = metric{name: "agentlab_store_write_failures_total", help: "Writes to the database that failed, by the code of the error. Codes such as conflict and exists are refused requests.", label: "code", values: codes}
	readFailures    = metric{name: "agentlab_metrics_read_failures_total", help: "Metrics that were left out of an answer because they could not be read."}
	bundleTime      = metric{name: "agentlab_doctor_bundle_seconds", help: "Time to make a doctor bundle, with the wait for its turn, also of one that failed.", buckets: saveBuckets}
	bundleBytes     = metric{name: "agentlab_doctor_bundle_bytes_total", help: "Size of the doctor bundles that were made."}
	bundleFailures  = metric{name: "agentlab_doctor_bundle_failures_total", help: "Doctor bundles that were not made, by the code of the error.", label: "code", values: codes}
	workspaceCheck  = metric{name: "agentlab_workspace_check_seconds", help: "Time of a comparison of workspaces with the backend ('agentlab workspace check'), also of one that failed.", buckets: saveBuckets}
	cacheRequests   = metric{name: "agentlab_cache_requests_total", help: "Requests of sandboxes to the registry cache: hit and miss were answered from the cache and from the upstream, denied by the network policy, bad ones are not for the cache, and error means that the upstream failed or has no such object.", label: "result", values: []string{"hit", "miss", "denied", "bad", "error"}}
	cacheBytes      = metric{name: "agentlab_cache_bytes_total", help: "Bytes that the registry cache has sent to sandboxes and received from upstreams.", label: "direction", values: []string{"sent", "received"}}
	buildInfo       = metric{name: "agentlab_build_info", help: "Always 1; the labels are the version of the daemon and the name of its backend.", label: "version, backend"}

	// The values of their label are the names of the daemon's backends (Set.Backends).
	backendCall     = metric{name: "agentlab_backend_call_seconds", help: "Time of the calls of a backend, failed calls included.", label: backendLabel, buckets: saveBuckets}
	backendFailures = metric{name: "agentlab_backend_call_failures_total", help: "Calls of a backend that it did not answer or did not finish: errors with the codes unavailable, unknown_outcome, timeout and internal.", label: backendLabel}

	workspaceCheckFailures = metric{name: "agentlab_workspace_check_failures_total", help: "Comparisons of workspaces with the backend that failed, by the code of the error.", label: "code", values: codes}

	directMetrics = []metric{
		egressDecisions, messagesPosted, storeWrite, storeWait, storeRead, storeFailures, readFailures,
		bundleTime, bundleBytes, bundleFailures, workspaceCheck, workspaceCheckFailures, cacheRequests, cacheBytes,
	}
)

var snapshotSteps = []string{
	string(agentlab.SnapshotSaving), string(agentlab.SnapshotReady), string(agentlab.SnapshotDeleting), string(agentlab.SnapshotDeleted), "RESTORING", "RESTORED",
}

var (
	workspaceSteps         = texts(append(slices.Clone(agentlab.WorkspaceStates), agentlab.WorkspaceDeleted))
	workspaceSnapshotSteps = texts([]agentlab.WorkspaceSnapshotState{
		agentlab.WorkspaceSnapshotSaving, agentlab.WorkspaceSnapshotReady, agentlab.WorkspaceSnapshotDeleting, agentlab.WorkspaceSnapshotDeleted,
	})
	workspaceOperations = texts(agentlab.WorkspaceOperations)

	leaseSteps = texts([]agentlab.LeaseStep{agentlab.LeaseStepQueued, agentlab.LeaseStepAcquired, agentlab.LeaseStepEnded})
)

// codes are the codes of errors.
var codes = texts([]agentlab.Code{
	agentlab.CodeInvalid, agentlab.CodeNotFound, agentlab.CodeExists, agentlab.CodeConflict, agentlab.CodeBusy, agentlab.CodeUnsupported,
	agentlab.CodeDenied, agentlab.CodeNoSpace, agentlab.CodeUnavailable, agentlab.CodeUnknownOutcome, agentlab.CodeTimeout,
	agentlab.CodePreflight, agentlab.CodeLimit, agentlab.CodeSchema, agentlab.CodeInternal,
})

// finalStatuses are the statuses of ended jobs.
func finalStatuses() []string {
	return texts(slices.DeleteFunc(slices.Clone(agentlab.JobStatuses), func(s agentlab.JobStatus) bool { return !s.Final() }))
}

func texts[S ~string](list []S) (out []string) {
	for _, v := range list {
		out = append(out, string(v))
	}
	return out
}

func (s *Set) countEvents(events []agentlab.Event) {
	for _, e := range events {
		var data map[string]any
		for i, m := range eventMetrics {
			if m.kind != e.Kind {
				continue
			}
			if data == nil && e.Data != "" && json.Unmarshal([]byte(e.Data), &data) != nil {
				break // the store checks that it is JSON
			}
			n := 1.0
			if m.value != "" {
				number, ok := data[m.value].(float64)
				if !ok {
					continue
				}
				n = number
			}
			value, _ := data[m.key].(string)
			if other, ok := m.as[value]; ok {
				value = other
			}
			s.events[i].add(value, n)
		}
	}
}

package recovery

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/artifact"
	"github.com/agentlab-vm/agentlab/internal/backend"
	"github.com/agentlab-vm/agentlab/internal/durable"
	"github.com/agentlab-vm/agentlab/internal/fleet"
	"github.com/agentlab-vm/agentlab/internal/sandbox"
	"github.com/agentlab-vm/agentlab/internal/store"
)

// report is the result of a repair, as 'agentlabd db' prints it.
type report struct {
	Database  string    `json:"database"`
	Backup    string    `json:"backup,omitempty"`   // the backup that was restored
	MovedTo   []string  `json:"moved_to,omitempty"` // where the files of the old database are
	Jobs      int       `json:"jobs"`               // rows that were added
	Artifacts int       `json:"artifacts"`
	Sandboxes int       `json:"sandboxes"`
	Orphans   []string  `json:"orphans"` // on the backend, with AgentLab's mark and without a row
	Refused   []refusal `json:"refused"` // what the store rejected
	Warnings  []string  `json:"warnings"`

	restored bool  // the rows are from a backup, except added ones
	vmids    []int // numbers of sandboxes in records and on the backend
}

// refusal is a job or a sandbox that the store rejected completely or in part.
type refusal struct {
	Job     string `json:"job,omitempty"`
	Sandbox int    `json:"sandbox,omitempty"`
	Reason  string `json:"reason"`
}

func (f refusal) String() string {
	if f.Job != "" {
		return f.Job + ": " + f.Reason
	}
	return fmt.Sprintf("sandbox %d: %s", f.Sandbox, f.Reason)
}

// refuse records why one job or sandbox was not added completely. It returns
// err if the cause affects the others too, such as a full disk.
func (r *report) refuse(of refusal, err error) error {
	switch agentlab.CodeOf(err) {
	case "":
		return nil
	case agentlab.CodeNoSpace, agentlab.CodeUnavailable, agentlab.CodeBusy, agentlab.CodeDenied, agentlab.CodeTimeout:
		return err
	}
	of.Reason = agentlab.Reason(err.Error())
	r.Refused = append(r.Refused, of)
	return nil
}

func (r *report) warn(format string, args ...any) {
	r.Warnings = append(r.Warnings, fmt.Sprintf(format, args...))
}

// warnBackendSkipped warns that the backend did not list its sandboxes.
func (r *report) warnBackendSkipped(driver string, err error) {
	r.warn("the sandboxes of the backend %s were not recovered: %v", driver, err)
	if r.restored {
		r.warn("the network policies of sandboxes are those of the backup, and layers that were added later are missing in them; compare them ('agentlab policy show') before you change any")
	}
}

// reasonRecovered is the end of the reason of a recovered row.
const reasonRecovered = "recovered: its record in the database was lost"

// recoverJobs adds the missing rows for the files and the records of jobs. A
// job that failed early has only a record.
func recoverJobs(ctx context.Context, st *store.Store, files *artifact.Service, recordsDir string, out *report) error {
	found, err := files.Recover()
	if err != nil {
		out.warn("not all files were read: %v", err)
	}
	onRecord, err := recorded(recordsDir)
	if err != nil {
		return err
	}
	for _, r := range onRecord {
		for _, suffix := range []string{"", refusedSuffix} {
			if j, ok := parseRecord(recordFile(recordsDir, r.JobID)+suffix, r.JobID); ok {
				out.vmids = append(out.vmids, j.SandboxVMID)
			}
		}
		if !slices.ContainsFunc(found, func(f artifact.RecoveredJob) bool { return f.JobID == r.JobID }) {
			found = append(found, r)
		}
	}
	for _, f := range found {
		if err := addJob(ctx, st, f, recordsDir, out); err != nil {
			return err
		}
		n, err := files.Describe(ctx, f.JobID)
		out.Artifacts += n
		if err := out.refuse(refusal{Job: f.JobID}, err); err != nil {
			return err
		}
	}
	return nil
}

// addJob adds or completes the row of a job. A record that the store rejects is
// renamed, and its job gets the row of a job without a record if it has none,
// so that its files can be accessed.
func addJob(ctx context.Context, st *store.Store, f artifact.RecoveredJob, recordsDir string, out *report) error {
	row, err := st.Job(ctx, f.JobID)
	switch agentlab.CodeOf(err) {
	case "":
		return completeJob(ctx, st, row, f, recordsDir, out)
	case agentlab.CodeNotFound:
	default:
		return err
	}
	j, onRecord := readRecord(recordsDir, f.JobID)
	if onRecord {
		if err = st.CreateJob(ctx, recoverJob(j, f), nil); err == nil {
			out.Jobs++
			return nil
		}
		if err := out.putAside(recordsDir, f.JobID, err); err != nil {
			return err
		}
	} else {
		out.wasPutAside(recordsDir, f.JobID)
	}
	if err = st.CreateJob(ctx, recoverJob(unknownJob(f), f), nil); err == nil {
		out.Jobs++
	}
	return out.refuse(refusal{Job: f.JobID}, err)
}

// putAside renames a record that was rejected with the error why, so that the
// daemon does not overwrite it.
func (r *report) putAside(recordsDir, jobID string, why error) error {
	if err := r.refuse(refusal{Job: jobID}, why); err != nil {
		return err
	}
	path := recordFile(recordsDir, jobID)
	err := os.Rename(path, path+refusedSuffix)
	if err == nil {
		err = durable.SyncPath(recordsDir) // a power cut must not undo it after the row was written
	}
	return at(path, err)
}

// wasPutAside reports and records that an earlier repair rejected the record of
// a job. That repair may have been killed before it created the row.
func (r *report) wasPutAside(recordsDir, jobID string) bool {
	path := recordFile(recordsDir, jobID) + refusedSuffix
	if !exists(path) {
		return false
	}
	r.Refused = append(r.Refused, refusal{Job: jobID, Reason: "an earlier repair rejected its record and stored it as " + path})
	return true
}

// completeJob updates the row of a job from a backup with the end of the job
// after the backup. If the store rejects the record of that end, the job
// becomes FAILED: as QUEUED it would run a second time.
func completeJob(ctx context.Context, st *store.Store, row agentlab.Job, f artifact.RecoveredJob, recordsDir string, out *report) error {
	if row.Status.Final() {
		return nil
	}
	lost := func() error { return becomes(ctx, st, recoverJob(row, f), agentlab.JobFailed) }
	j, ok := readRecord(recordsDir, row.ID)
	if !ok && out.wasPutAside(recordsDir, row.ID) {
		return lost()
	}
	if !ok || !j.Status.Final() || !j.CreatedAt.Equal(row.CreatedAt) {
		return nil
	}
	steps := []agentlab.JobStatus{j.Status}
	if row.Status == agentlab.JobQueued { // not every final status can follow QUEUED
		steps = []agentlab.JobStatus{agentlab.JobRunning, j.Status}
	}
	err := becomes(ctx, st, j, steps...)
	if err == nil {
		return nil
	}
	if err := out.putAside(recordsDir, row.ID, err); err != nil {
		return err
	}
	return lost()
}

// becomes updates the row of a job to j, with one status after the other.
func becomes(ctx context.Context, st *store.Store, j agentlab.Job, statuses ...agentlab.JobStatus) error {
	for _, status := range statuses {
		_, err := st.UpdateJob(ctx, j.ID, func(now *agentlab.Job) ([]agentlab.Event, error) {
			*now = j
			now.Status = status
			return nil, nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// unknownJob returns a job with the data that its files provide.
func unknownJob(f artifact.RecoveredJob) agentlab.Job {
	return agentlab.Job{
		ID: f.JobID, Task: "unknown (" + reasonRecovered + ")", Agent: "unknown", Profile: "unknown", Mode: "dangerous",
		Status: agentlab.JobRunning, CreatedAt: f.Oldest,
	}
}

// recoverJob returns the row of a job from its record. A job that had not ended
// is FAILED: the outcome of its agent is unknown.
func recoverJob(j agentlab.Job, f artifact.RecoveredJob) agentlab.Job {
	if !j.Status.Final() {
		j.Status, j.Phase, j.StopRequested = agentlab.JobFailed, "", ""
		j.Reason = reasonRecovered
		j.FinishedAt = f.Newest
	}
	j.UpdatedAt = f.Newest
	return j
}

// recoveredLease is the lease of a recovered sandbox, so that users have time
// to examine it.
const recoveredLease = 7 * 24 * time.Hour

// recoverSandboxes adds rows for VMs on the backend that have AgentLab's mark
// and no row. The row is FAILED, so that the VM is powered off and its disk
// kept: the guest's configuration and tokens are not known. On a shared
// backend the mark may be that of another installation, so there the sandbox
// is only reported.
func recoverSandboxes(ctx context.Context, st *store.Store, d *fleet.Backend, now time.Time, out *report) error {
	all, err := d.List(ctx)
	if err != nil {
		out.warnBackendSkipped(d.Name(), err)
		return nil
	}
	for _, in := range all {
		out.vmids = append(out.vmids, in.VMID)
	}
	slices.SortFunc(all, func(a, b backend.Instance) int { return cmp.Compare(a.VMID, b.VMID) })
	shared := d.Can().SharedNumbers
	for _, in := range all {
		row, err := st.SandboxByUID(ctx, in.Ref.UID)
		if err == nil {
			if out.restored {
				if err := restoreNetworkPolicy(ctx, st, row, in, out); err != nil {
					return err
				}
			}
			continue
		}
		if agentlab.CodeOf(err) == agentlab.CodeNotFound { // another sandbox may have its number
			_, err = st.Sandbox(ctx, in.VMID)
		}
		if err != nil && agentlab.CodeOf(err) != agentlab.CodeNotFound {
			return err
		}
		if err == nil || in.Spec == nil || shared {
			out.Orphans = append(out.Orphans, fmt.Sprintf("%d (%s, %s)", in.Number(), cmp.Or(in.Name, "without a name"), in.Power))
			continue
		}
		sb := recoverSandbox(*in.Spec, d.Name(), now)
		sb.Handle = in.Ref.Handle
		if sb.JobID, err = linkJob(ctx, st, *in.Spec); err == nil {
			err = st.RecoverSandbox(ctx, sb, recoveredEvent(sb))
		}
		if agentlab.CodeOf(err) == agentlab.CodeExists { // another sandbox has the name
			sb.Name = fmt.Sprintf("recovered-%d", sb.VMID)
			err = st.RecoverSandbox(ctx, sb, recoveredEvent(sb))
		}
		if err == nil {
			out.Sandboxes++
		}
		if err := out.refuse(refusal{Sandbox: sb.VMID}, err); err != nil {
			return err
		}
	}
	return nil
}

// losePooled makes the sandboxes that waited in the warm pool when the backup was
// made ones without a profile: they may have been handed out since, and may have a
// user's work on their disks. The daemon would destroy them with the pool.
func losePooled(ctx context.Context, st *store.Store, now time.Time, out *report) error {
	rows, err := st.Sandboxes(ctx, agentlab.SandboxFilter{})
	if err != nil {
		return err
	}
	for _, row := range rows {
		if !row.Pooled() {
			continue
		}
		if _, err := st.UpdateSandbox(ctx, row.VMID, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
			sb.Profile, sb.State, sb.Desired, sb.Reason = agentlab.ProfileLost, agentlab.SandboxFailed, agentlab.DesiredRunning, reasonRecovered
			sb.Keepalive, sb.LeaseExpiresAt = true, now.Add(recoveredLease)
			return nil, nil
		}); err != nil {
			return err
		}
		out.warn("sandbox %s (%d) was in the warm pool when the backup was made, and may have been used since; it is kept: 'agentlab sandbox destroy %[2]d' if you do not need it", row.Name, row.VMID)
	}
	return nil
}

// restoreNetworkPolicy updates the row of a sandbox from a backup to the network policy
// that the backend has for it now, with the layers of both. The policy is marked as
// pending, so the daemon applies it, and nothing less strict.
func restoreNetworkPolicy(ctx context.Context, st *store.Store, row agentlab.Sandbox, in backend.Instance, out *report) error {
	switch {
	case row.State == agentlab.SandboxDestroyed:
		return nil
	case in.Spec == nil:
		out.warn("the network policy of sandbox %s (%d) is that of the backup, because the backend does not report the current one; see 'agentlab policy show'", row.Name, row.VMID)
		return nil
	}
	n := in.Spec.Network
	n.Layers = slices.Clone(n.Layers)
	for _, layer := range row.Network.Layers {
		if !sandbox.HasLayer(n, layer) {
			n.Layers = append(n.Layers, layer)
		}
	}
	if sandbox.SameNetwork(n, row.Network) && sandbox.SameNetwork(n, in.Spec.Network) {
		return nil
	}
	out.warn("the network policy of sandbox %s (%d) was changed after the backup: the current policy stays in effect; see 'agentlab policy show'", row.Name, row.VMID)
	_, err := st.UpdateSandbox(ctx, row.VMID, func(sb *agentlab.Sandbox) ([]agentlab.Event, error) {
		sb.Network, sb.NetworkPending = n, true
		return nil, nil
	})
	return err
}

// skipNumbers makes new sandboxes get numbers above all numbers in rows,
// records and on the backend: with a reused number, the data of two sandboxes
// would be mixed up. Numbers above last, the end of the range, do not count:
// after them the range would start again at its first number.
func skipNumbers(ctx context.Context, st *store.Store, last int, out *report) error {
	vmids := slices.Clone(out.vmids)
	rows, err := st.Sandboxes(ctx, agentlab.SandboxFilter{Destroyed: true})
	if err != nil {
		return err
	}
	for _, sb := range rows {
		vmids = append(vmids, sb.VMID)
	}
	jobs, err := st.Jobs(ctx, agentlab.JobFilter{})
	if err != nil {
		return err
	}
	for _, j := range jobs {
		vmids = append(vmids, j.SandboxVMID)
	}
	vmids = slices.DeleteFunc(vmids, func(n int) bool { return n > last })
	if len(vmids) == 0 {
		return nil
	}
	return st.SkipVMIDs(ctx, slices.Max(vmids))
}

// linkJob returns the ID of the job that a sandbox without a row was created
// for, "" for a sandbox that a user created, and stores the number of the
// sandbox in the job. The name of most sandboxes is the ID of their job. A
// sandbox with another name is found by the number in the row of its job.
func linkJob(ctx context.Context, st *store.Store, sp backend.Spec) (string, error) {
	id := sp.Name
	if agentlab.ValidateJobID(id) != nil {
		newest, err := st.Jobs(ctx, agentlab.JobFilter{SandboxVMID: sp.VMID, Limit: 1})
		if err != nil || len(newest) == 0 {
			return "", err
		}
		return newest[0].ID, nil
	}
	_, err := st.UpdateJob(ctx, id, func(j *agentlab.Job) ([]agentlab.Event, error) {
		j.SandboxVMID = sp.VMID
		return nil, nil
	})
	if agentlab.CodeOf(err) == agentlab.CodeNotFound {
		return "", nil
	}
	return id, err
}

// recoveredEvent is where the events of a recovered sandbox begin: those before it may
// be about an earlier sandbox with the same number.
func recoveredEvent(sb agentlab.Sandbox) agentlab.Event {
	return agentlab.NewEvent(agentlab.EventSandboxCreated, map[string]any{"name": sb.Name, "image": sb.Image, "recovered": true},
		"sandbox %s was found on the backend", sb.Name).About(sb.VMID, sb.JobID)
}

func recoverSandbox(sp backend.Spec, driver string, now time.Time) agentlab.Sandbox {
	return agentlab.Sandbox{
		VMID: sp.VMID, UID: sp.UID, Name: sp.Name, Backend: driver, Profile: agentlab.ProfileLost, Image: sp.Image,
		State: agentlab.SandboxFailed, Desired: agentlab.DesiredRunning, Reason: reasonRecovered,
		Resources: sp.Resources, Options: sp.Options, Network: sp.Network, IPv4: sp.IPv4, IPv6: sp.IPv6,
		Keepalive: true, LeaseExpiresAt: now.Add(recoveredLease), CreatedAt: now, UpdatedAt: now,
	}
}

package agentlab

import (
	"slices"
	"strings"
	"time"
)

// JobStatus is the status of a job in its life cycle.
type JobStatus string

// The statuses of a job. All but QUEUED and RUNNING are final.
const (
	JobQueued    JobStatus = "QUEUED"
	JobRunning   JobStatus = "RUNNING"
	JobCompleted JobStatus = "COMPLETED"
	JobFailed    JobStatus = "FAILED"
	JobTimeout   JobStatus = "TIMEOUT"
	JobCancelled JobStatus = "CANCELLED"
)

var jobNext = map[JobStatus][]JobStatus{
	JobQueued:    {JobRunning, JobFailed, JobTimeout, JobCancelled},
	JobRunning:   {JobCompleted, JobFailed, JobTimeout, JobCancelled},
	JobCompleted: {},
	JobFailed:    {},
	JobTimeout:   {},
	JobCancelled: {},
}

// JobStatuses lists all statuses of a job, in the order of its life cycle.
var JobStatuses = []JobStatus{JobQueued, JobRunning, JobCompleted, JobFailed, JobTimeout, JobCancelled}

// CanBecome reports whether the transition from s to next is in the table.
func (s JobStatus) CanBecome(next JobStatus) bool { return slices.Contains(jobNext[s], next) }

// Valid reports whether s is one of the statuses above.
func (s JobStatus) Valid() bool { _, ok := jobNext[s]; return ok }

// Final reports whether the job has ended.
func (s JobStatus) Final() bool { return s.Valid() && len(jobNext[s]) == 0 }

// Agents lists the coding agents that a job may name. "shell" runs the task
// as a shell script.
var Agents = []string{"claude", "codex", "opencode", "gemini", "shell"}

// AgentNone is the agent of a job without a task. The job only clones a
// repository into its sandbox; then the user works in the sandbox.
const AgentNone = "none"

// Job is a run of an agent on a repo and a ref, with a task, under a profile.
type Job struct {
	ID        string // NewJobID
	RepoURL   string // the URL that the guest clones; "" if there is no repo or it is Bundled
	Bundled   bool   // the repo was uploaded as a git bundle, stored by the artifact service
	Ref       string // branch, tag or commit, when Bundled any revision (ValidateRevision); "" means the repo's default
	Depth     int    // shallow clone depth; 0 means full history
	Task      string // the agent's prompt; for agent "shell", the script
	Agent     string // one of Agents, or AgentNone
	Profile   string
	Backend   string // requested for its sandboxes; see JobRequest
	Image     string // requested image name; "" means the profile's or the default
	Mode      string // "dangerous" (every permission granted) is the only mode today
	TTL       time.Duration
	Keepalive bool   // keep the sandbox after the job ended
	NoSetup   bool   // do not run the setup commands of the repository, and start no services
	Branch    string // of the work; "" means agentlab/ID

	Devcontainer string // one of DevcontainerModes; "" means the profile's

	// A job with several attempts has no sandbox: each attempt is a job of
	// its own.
	Attempts int    // number of attempts; 0 means that the job runs its agent itself
	Winner   int    // number of the attempt whose result is that of the job; 0 until it is known
	ParentID string // of an attempt, and of the job that prepares a sandbox for others: the ID of their job
	Attempt  int    // number of an attempt, from 1
	// Fork is how the attempts get their sandboxes: "" means from their image;
	// ForkPreparing while the job with Prepares prepares one for all of them;
	// then the UID of the snapshot of that sandbox, which they continue.
	Fork string
	// Setup is how a job without attempts uses the snapshots after setup. If it does, Fork
	// is the same for its own sandbox: ForkPreparing, or the UID of the snapshot.
	Setup JobSetup
	// Salvages is the ID of the job whose work this job extracts from the disk of its
	// kept sandbox; "" for other jobs. It runs no agent. Fork is the UID of the snapshot
	// of that disk, "" until it is requested.
	Salvages string
	Pick     string // shell command that judges the attempts; "" means none

	Status        JobStatus
	Phase         string // the phase that the runner reported: "clone", "agent", "upload", …
	Reason        string // why it ended with this status; one redacted line
	Waiting       string // why it is currently waiting; one redacted line, "" if it is not
	ExitCode      *int   // the agent's exit code; nil if there is none
	SandboxVMID   int    // 0 until one is allocated
	StopRequested string // "" or the requested final status: CANCELLED, TIMEOUT or FAILED; Reason is set with FAILED, and with CANCELLED if AgentLab cancels an attempt
	// MemoryKills is how many processes the kernel of its guest has ended because memory
	// was used up, as the guest has reported.
	MemoryKills int
	ModelHosts  []string // "host:port" of the model endpoints that the agent needs; nil before the start or if not known
	Result      JobResult

	CreatedAt  time.Time
	UpdatedAt  time.Time
	StartedAt  time.Time // when the runner fetched its bootstrap; zero before
	FinishedAt time.Time // zero until final
	DeadlineAt time.Time // when the guest must stop its agent; zero until started
}

// Begin changes a QUEUED job to RUNNING, and its sandbox if it is READY; a
// sandbox that is still BOOTING becomes RUNNING later. A RUNNING job, whose
// runner asks again, keeps its deadline. The lease of the sandbox lasts for
// window after the deadline. Code unavailable when the job is final.
func (j *Job) Begin(sb *Sandbox, now time.Time, window time.Duration) (evs []Event, err error) {
	switch j.Status {
	case JobQueued:
		j.Status, j.StartedAt, j.DeadlineAt = JobRunning, now, now.Add(j.TTL)
		j.SandboxVMID, j.Waiting = sb.VMID, ""
		evs = append(evs, j.statusEvent())
	case JobRunning:
	default:
		return nil, Errorf(CodeUnavailable, "%s has ended in the meantime", j.ID)
	}
	if end := j.DeadlineAt.Add(window); end.After(sb.LeaseExpiresAt) {
		sb.LeaseExpiresAt = end
	}
	if sb.State == SandboxReady {
		sb.State = SandboxRunning
		evs = append(evs, NewEvent(EventSandboxState, map[string]any{"from": SandboxReady, "to": sb.State}, "sandbox %s is %s", sb.Name, sb.State).About(sb.VMID, j.ID))
	}
	return evs, nil
}

// End gives a job a final status. The reason of a COMPLETED job is empty.
func (j *Job) End(status JobStatus, reason string, now time.Time) Event {
	j.Status, j.Reason, j.Waiting, j.FinishedAt = status, Reason(reason), "", now.UTC()
	return j.statusEvent()
}

func (j *Job) statusEvent() Event {
	data := map[string]any{"status": j.Status}
	text := ""
	if j.Reason != "" {
		data["reason"] = j.Reason
		text = ": " + j.Reason
	}
	if j.ExitCode != nil {
		data["exit_code"] = *j.ExitCode
	}
	if !j.StartedAt.IsZero() && !j.FinishedAt.IsZero() {
		data["run_seconds"] = j.FinishedAt.Sub(j.StartedAt).Seconds()
	}
	return NewEvent(EventJobStatus, data, "job %s is %s%s", j.ID, j.Status, text).About(j.SandboxVMID, j.ID)
}

// JobResult is the result of the work as the runner reported it.
type JobResult struct {
	BaseCommit string // commit that was checked out; "" when there is no repo
	HeadCommit string // commit at the end
	Branch     string // branch that holds the work
	Commits    int    // commits made on top of BaseCommit
	Pushed     bool   // the branch was pushed to the remote
	Dirty      bool   // there are uncommitted changes (they are in the diff artifact)

	Uncommitted int // files that differ from HeadCommit

	JudgeExit *int     // exit code of the command that judged the attempt; nil if it did not run
	Score     *float64 // the number on its last line of output; nil if there is none
}

// Known reports whether the runner reported the result of a repository.
func (r JobResult) Known() bool { return r.HeadCommit != "" }

// HasWork reports whether there are commits or uncommitted changes. Commits can
// be 0 because they could not be counted.
func (r JobResult) HasWork() bool {
	return r.Commits > 0 || r.HeadCommit != r.BaseCommit || r.Uncommitted > 0 || r.Dirty
}

// Limits on the fields of a job request.
const (
	MaxTaskBytes = 256 << 10
	MaxRefBytes  = 255
	MaxURLBytes  = 2048
)

// Validate checks a job request, before defaults from its profile are applied.
// A zero TTL means the profile's default and is valid here.
func (j *Job) Validate() error {
	switch {
	case j.Agent == AgentNone && j.Task != "":
		return Errorf(CodeInvalid, "a job without an agent has no task").WithField("task").WithHint("choose an agent: %s", strings.Join(Agents, ", "))
	case j.Agent != AgentNone && strings.TrimSpace(j.Task) == "":
		return Errorf(CodeInvalid, "the task is empty").WithField("task").WithHint("set the agent's task: --task \"…\" or --task-file FILE")
	case len(j.Task) > MaxTaskBytes:
		return Errorf(CodeInvalid, "%d bytes exceed the limit of %d", len(j.Task), MaxTaskBytes).WithField("task").WithHint("write long instructions to a file in the repository and refer to it in the task")
	case strings.ContainsRune(j.Task, 0):
		return Errorf(CodeInvalid, "the task contains a NUL byte").WithField("task")
	case j.Agent != AgentNone && !slices.Contains(Agents, j.Agent):
		return Errorf(CodeInvalid, "unknown agent %q", j.Agent).WithField("agent").WithHint("choose one of %s", strings.Join(Agents, ", "))
	case j.Mode != "dangerous":
		return Errorf(CodeInvalid, "unknown mode %q", j.Mode).WithField("mode").WithHint(`the only mode is "dangerous": the agent may do everything inside its sandbox`)
	case j.Devcontainer != "" && !slices.Contains(DevcontainerModes, j.Devcontainer):
		return Errorf(CodeInvalid, "unknown mode %q of the dev container", j.Devcontainer).WithField("devcontainer").WithHint("choose one of %s", strings.Join(DevcontainerModes, ", "))
	case j.Depth < 0:
		return Errorf(CodeInvalid, "%d is negative", j.Depth).WithField("depth")
	}
	if j.TTL != 0 {
		if err := ValidateTTL(j.TTL); err != nil {
			return err
		}
	}
	validRef := ValidateRef
	if j.Bundled {
		validRef = ValidateRevision
	}
	if err := ValidateRef(j.Branch); j.Branch != "" && err != nil {
		return err
	}
	if err := validRef(j.Ref); err != nil {
		return err
	}
	if j.RepoURL != "" && j.Bundled {
		return Errorf(CodeInvalid, "a job has a repo URL or a bundle, not both").WithField("repo_url")
	}
	return ValidateRepoURL(j.RepoURL)
}

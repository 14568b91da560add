package agentlab

import (
	"cmp"
	"slices"
	"strings"
)

// MaxAttempts is the maximum number of attempts of a job.
const MaxAttempts = 16

// MaxPickBytes is the maximum length of the command that judges attempts.
const MaxPickBytes = 4 << 10

// PrepareLog is the artifact of a job with the log of the sandbox that its attempts
// continue.
const PrepareLog = "attempts/prepare.log"

// JobAttempts is the part of a job request that asks for several attempts. Each
// attempt is a job of its own; one of them gives the job its result.
type JobAttempts struct {
	Count  int      // 2 to MaxAttempts
	Pick   string   // shell command that judges an attempt in its checkout; "" means that the first that completes wins
	Agents []string // agents of the attempts, in turn; empty means the job's agent
	Tasks  []string // tasks of the attempts, in turn; empty means the job's task
}

// Validate checks the request, without its agents and tasks, which are checked
// with the job of each attempt.
func (a *JobAttempts) Validate() error {
	switch {
	case a.Count < 2 || a.Count > MaxAttempts:
		return Errorf(CodeInvalid, "%d is not a number of attempts from 2 to %d", a.Count, MaxAttempts).WithField("attempts.count")
	case len(a.Agents) > a.Count:
		return Errorf(CodeInvalid, "%d agents for %d attempts", len(a.Agents), a.Count).WithField("attempts.agents").WithHint("set at most one agent for each attempt")
	case len(a.Tasks) > a.Count:
		return Errorf(CodeInvalid, "%d tasks for %d attempts", len(a.Tasks), a.Count).WithField("attempts.tasks").WithHint("set at most one task for each attempt")
	case a.Pick != "" && strings.TrimSpace(a.Pick) == "", len(a.Pick) > MaxPickBytes, strings.ContainsRune(a.Pick, 0):
		return Errorf(CodeInvalid, "it is not a shell command of 1 to %d bytes", MaxPickBytes).WithField("attempts.pick")
	}
	return nil
}

// Split returns the jobs of the attempts at j, without their IDs.
func (a *JobAttempts) Split(j Job) []Job {
	var out []Job
	for i := range a.Count {
		c := j
		c.ParentID, c.Attempt, c.Attempts = j.ID, i+1, 0
		if len(a.Agents) > 0 {
			c.Agent = a.Agents[i%len(a.Agents)]
		}
		if len(a.Tasks) > 0 {
			c.Task = a.Tasks[i%len(a.Tasks)]
		}
		out = append(out, c)
	}
	return out
}

// ForkPreparing is the Job.Fork of a job whose attempts wait for a prepared
// sandbox.
const ForkPreparing = "preparing"

// Preparation returns the job that prepares the sandbox of the attempts at j, or of j
// itself, without its ID. All attempts have that image.
func (j *Job) Preparation(image string) Job {
	c := *j
	c.ParentID, c.Attempts, c.Pick, c.Fork, c.Agent, c.Task, c.Image = j.ID, 0, "", "", AgentNone, "", image
	c.Keepalive, c.Setup = false, JobSetup{}
	return c
}

// Prepares reports whether a job only prepares the sandbox that the attempts at
// its parent continue.
func (j *Job) Prepares() bool { return j.ParentID != "" && j.Attempt == 0 }

// Snapshot returns the UID of the snapshot that the attempts of a job continue, ""
// if there is none.
func (j *Job) Snapshot() string {
	if j.Fork == ForkPreparing {
		return ""
	}
	return j.Fork
}

// OwnerID returns the ID of the job whose repository and branch a job uses: of
// an attempt, that of its job.
func (j *Job) OwnerID() string { return cmp.Or(j.ParentID, j.ID) }

// Passed reports whether an attempt can win: it has completed, and the command
// that judges it, if there is one, exited with code 0.
func (j *Job) Passed() bool {
	return j.Status == JobCompleted && (j.Pick == "" || j.Result.JudgeExit != nil && *j.Result.JudgeExit == 0)
}

// Best returns the attempt that won, or nil. With a command that judges, it is
// the one with the highest number among those that passed, one without a number
// being the lowest; otherwise the first that completed. Of equal ones the first
// in order wins.
func Best(attempts []Job) *Job {
	var best *Job
	for i := range attempts {
		if a := &attempts[i]; a.Passed() && (best == nil || better(a, best)) {
			best = a
		}
	}
	return best
}

func better(a, b *Job) bool {
	switch {
	case a.Pick == "":
		return a.FinishedAt.Before(b.FinishedAt)
	case a.Result.Score == nil || b.Result.Score == nil:
		return a.Result.Score != nil
	}
	return *a.Result.Score > *b.Result.Score
}

// FindAttempt returns the attempt with a number, or nil.
func FindAttempt(attempts []Job, number int) *Job {
	i := slices.IndexFunc(attempts, func(j Job) bool { return j.Attempt == number })
	if i < 0 {
		return nil
	}
	return &attempts[i]
}

// SortAttempts sorts the attempts of a job by their numbers.
func SortAttempts(attempts []Job) {
	slices.SortFunc(attempts, func(a, b Job) int { return cmp.Compare(a.Attempt, b.Attempt) })
}

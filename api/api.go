// Package api defines the v1 wire types of the control plane, as JSON. Times
// are RFC 3339 in UTC with nanoseconds.
package api

import "time"

// VersionHeader is the header of responses with the version of the daemon.
const VersionHeader = "Agentlab-Version"

// Sandbox is a sandbox.
type Sandbox struct {
	VMID           int        `json:"vmid" doc:"Number of the sandbox"`
	UID            string     `json:"uid" doc:"Random ownership mark"`
	Name           string     `json:"name"`
	Backend        string     `json:"backend"`
	Profile        string     `json:"profile"`
	Image          string     `json:"image" doc:"Image as resolved at creation, name@digest"`
	State          string     `json:"state" enum:"REQUESTED,PROVISIONING,BOOTING,POOLED,READY,RUNNING,COMPLETED,FAILED,TIMEOUT,SUSPENDED,STOPPED,DESTROYED"`
	Desired        string     `json:"desired" enum:"running,suspended,suspended_to_disk,stopped,destroyed"`
	Reason         string     `json:"reason,omitempty" doc:"Why it is FAILED, TIMEOUT or STOPPED, or could not be resumed"`
	Waiting        string     `json:"waiting,omitempty" doc:"Why it is waiting; it is retried"`
	OnDisk         bool       `json:"on_disk,omitempty" doc:"It is SUSPENDED to disk: its memory is a file, and no virtual machine of it exists"`
	Cores          int        `json:"cores"`
	MemoryMB       int        `json:"memory_mb"`
	RootSizeGB     int        `json:"root_size_gb" doc:"0 means the size of the image"`
	Nested         string     `json:"nested" enum:"off,auto,on" doc:"Whether its CPUs have virtualization (resources.nested of profiles)"`
	NestedState    string     `json:"nested_state,omitempty" enum:"works,no-cpu,no-module,no-access,no-vm,unknown" doc:"Whether virtual machines run in its guest, which the guest reported at its last start; absent if nested is off, and before the guest answers"`
	NestedReason   string     `json:"nested_reason,omitempty" doc:"Why virtual machines do not run in its guest"`
	NetworkMode    string     `json:"network_mode"`
	Keepalive      bool       `json:"keepalive"`
	JobID          string     `json:"job_id,omitempty"`
	Unbootable     bool       `json:"unbootable,omitempty" doc:"It is FAILED because its disk was started again, and its guest did not answer"`
	Salvage        bool       `json:"salvage,omitempty" doc:"Its job ended with work that is not stored: it is off, and kept until the end of its lease for POST /v1/jobs/{job}/salvage"`
	WorkspaceID    string     `json:"workspace_id,omitempty" doc:"The workspace that it has or waits for"`
	IP             string     `json:"ip,omitempty"`
	FromSnapshot   string     `json:"from_snapshot,omitempty" doc:"What it was created from: SANDBOX/NAME of a snapshot, or SANDBOX for a fork"`
	Restoring      bool       `json:"restoring,omitempty" doc:"It is being restored to a snapshot"`
	Start          string     `json:"start,omitempty" enum:"boot,template,snapshot,pool" doc:"How its first guest was started, once it is READY: it booted, is a copy of a template, continues a snapshot or a fork, or waited in the warm pool"`
	Handle         string     `json:"handle,omitempty" doc:"Where the backend has it: on Proxmox VE the VMID; absent when number and mark are enough to find it"`
	LeaseExpiresAt time.Time  `json:"lease_expires_at"`
	CreatedAt      time.Time  `json:"created_at"`
	UpdatedAt      time.Time  `json:"updated_at"`
	BootedAt       *time.Time `json:"booted_at,omitempty"`
	Memory         *Memory    `json:"memory,omitempty" doc:"Memory of the host; only of a sandbox that runs, if the call wants it"`
}

// SandboxCreate is the request for a sandbox.
type SandboxCreate struct {
	Name       string     `json:"name,omitempty" doc:"DNS label; generated if empty"`
	Profile    string     `json:"profile,omitempty" doc:"Default: the configured default profile"`
	Backend    string     `json:"backend,omitempty" doc:"Name of a backend of the configuration; default: the one of the workspace or snapshot, else the profile's, else the configured default"`
	Image      string     `json:"image,omitempty"`
	Keepalive  *bool      `json:"keepalive,omitempty" doc:"Default: the profile's"`
	TTLMinutes int        `json:"ttl_minutes,omitempty" doc:"Lease; default: the profile's"`
	Cores      int        `json:"cores,omitempty" doc:"Overrides the profile"`
	MemoryMB   int        `json:"memory_mb,omitempty" doc:"Overrides the profile"`
	Nested     string     `json:"nested,omitempty" enum:"off,auto,on" doc:"Overrides the profile, unless the profile has off"`
	Job        *JobCreate `json:"job,omitempty" doc:"Run this job in the sandbox"`

	WorkspaceSelection

	Maintenance string `json:"maintenance,omitempty" enum:"files,disk" doc:"Create a maintenance sandbox, without a network, a runner and secrets: its guest mounts the workspace (files), or only has its disk (disk)"`

	FromSnapshot string `json:"from_snapshot,omitempty" doc:"SANDBOX/NAME of a snapshot to start from; its profile, image, cores and memory are then the default"`
}

// LeaseRenew is a request to let the lease end ttl_minutes from now.
type LeaseRenew struct {
	TTLMinutes int `json:"ttl_minutes" minimum:"1"`
}

// SandboxStop is a request to stop a sandbox.
type SandboxStop struct {
	GraceSeconds *int `json:"grace_seconds,omitempty" minimum:"0" maximum:"600" doc:"Seconds that the guest may take to shut down before it is powered off; default 30"`
}

// SandboxSuspend is a request to suspend a sandbox.
type SandboxSuspend struct {
	ToDisk bool `json:"to_disk,omitempty" doc:"Write its memory to disk and end its virtual machine; it then survives a restart of the host"`
}

// Job is a job.
type Job struct {
	ID           string     `json:"job_id"`
	RepoURL      string     `json:"repo_url,omitempty"`
	Bundled      bool       `json:"bundled" doc:"The repository was uploaded as a git bundle"`
	Ref          string     `json:"ref,omitempty"`
	Branch       string     `json:"branch,omitempty" doc:"Branch of the work; default agentlab/JOB_ID"`
	Depth        int        `json:"depth,omitempty"`
	Task         string     `json:"task"`
	Agent        string     `json:"agent"`
	Profile      string     `json:"profile"`
	Backend      string     `json:"backend,omitempty" doc:"The requested backend; absent if the request named none"`
	Image        string     `json:"image,omitempty"`
	Mode         string     `json:"mode"`
	TTLMinutes   int        `json:"ttl_minutes"`
	Keepalive    bool       `json:"keepalive"`
	Status       string     `json:"status" enum:"QUEUED,RUNNING,COMPLETED,FAILED,TIMEOUT,CANCELLED"`
	Phase        string     `json:"phase,omitempty"`
	Reason       string     `json:"reason,omitempty" doc:"Why it ended with this status"`
	Waiting      string     `json:"waiting,omitempty" doc:"Why it is waiting; it is retried"`
	ExitCode     *int       `json:"exit_code,omitempty"`
	SandboxVMID  int        `json:"sandbox_vmid,omitempty"`
	Result       JobResult  `json:"result"`
	CreatedAt    time.Time  `json:"created_at"`
	UpdatedAt    time.Time  `json:"updated_at"`
	StartedAt    *time.Time `json:"started_at,omitempty"`
	FinishedAt   *time.Time `json:"finished_at,omitempty"`
	DeadlineAt   *time.Time `json:"deadline_at,omitempty"`
	Pick         string     `json:"pick,omitempty" doc:"Shell command that judges the attempts"`
	Winner       int        `json:"winner,omitempty" doc:"Number of the attempt whose result is that of the job"`
	ParentID     string     `json:"parent_id,omitempty" doc:"Of an attempt, and of the job that prepares the sandbox of attempts: the ID of their job"`
	Salvages     string     `json:"salvages,omitempty" doc:"ID of the ended job whose work this job extracts from the kept disk of its sandbox"`
	Attempt      int        `json:"attempt,omitempty" doc:"Number of the attempt, from 1; absent with a parent_id: the job only clones the repository and runs its setup commands, once for all attempts"`
	AttemptCount int        `json:"attempt_count,omitempty" doc:"Number of attempts of a job that has several; each is a job of its own"`
	Attempts     []Job      `json:"attempts,omitempty" doc:"In their order; only in the response for one job"`
	Setup        *JobSetup  `json:"setup,omitempty" doc:"How it uses the snapshots after setup; absent if it does not"`
	Events       []Event    `json:"events,omitempty" doc:"The last events; only in the response for one job"`
	Artifacts    []Artifact `json:"artifacts,omitempty" doc:"Only in the response for one job"`

	Egress *EgressSummary `json:"egress,omitempty" doc:"Summary of its egress decisions; only in the response for one job"`
}

// JobSetup is how a job uses the snapshots after setup.
type JobSetup struct {
	Reused        bool   `json:"reused" doc:"It continues a snapshot that an earlier job made, so the commands do not run"`
	PreparationID string `json:"preparation_id,omitempty" doc:"The job that runs the commands for it and makes the snapshot; only in the response for one job"`
	Note          string `json:"note,omitempty" doc:"Why it neither uses nor makes a snapshot, and runs the commands itself"`
}

// SetupSource identifies what the commands under setup of a sent repository depend on.
type SetupSource struct {
	Repo    string `json:"repo" doc:"Identifies the copy of the repository. Jobs with another one use other snapshots"`
	Ref     string `json:"ref" doc:"Branch, or commit if there is none, whose jobs may use the snapshot"`
	Default bool   `json:"default,omitempty" doc:"The commit is part of the default branch: jobs of all branches may use its snapshot"`
	Sum     string `json:"sum" doc:"SHA-256 in hex of the commands and of the files that they read"`
}

// Setup is a snapshot after the commands under setup of a repository.
type Setup struct {
	ID        string    `json:"id"`
	Repo      string    `json:"repo"`
	Ref       string    `json:"ref,omitempty" doc:"Branch whose jobs use it; absent if it is of the default branch, and jobs of all branches use it"`
	Profile   string    `json:"profile"`
	Image     string    `json:"image" doc:"name@digest"`
	State     string    `json:"state" doc:"SAVING, SAVED or DELETING"`
	Bytes     int64     `json:"bytes" doc:"On the disk of the backend; 0 if that is not known"`
	CreatedAt time.Time `json:"created_at"`
	UsedAt    time.Time `json:"used_at"`
}

// JobResult is the result of a job.
type JobResult struct {
	BaseCommit string `json:"base_commit,omitempty"`
	HeadCommit string `json:"head_commit,omitempty"`
	Branch     string `json:"branch,omitempty"`
	Commits    int    `json:"commits"`
	Pushed     bool   `json:"pushed"`
	Dirty      bool   `json:"dirty"`

	Uncommitted int `json:"uncommitted,omitempty" doc:"Files that differ from head_commit; see 'agentlab job diff'"`

	JudgeExit *int     `json:"judge_exit,omitempty" doc:"Exit code of the command that judged the attempt"`
	Score     *float64 `json:"score,omitempty" doc:"The number on the last line of output of that command"`
}

// JobAttempts asks for several attempts at a job.
type JobAttempts struct {
	Count  int      `json:"count" minimum:"2" maximum:"16"`
	Pick   string   `json:"pick,omitempty" doc:"Shell command that judges an attempt in its checkout. The attempt with exit code 0 and the highest number on the last line of output wins; default: the first attempt that completes"`
	Agents []string `json:"agents,omitempty" doc:"Agents of the attempts, in turn, instead of agent"`
	Tasks  []string `json:"tasks,omitempty" doc:"Tasks of the attempts, in turn, instead of task"`
}

// JobCreate is the request for a job.
type JobCreate struct {
	RepoURL    string `json:"repo_url,omitempty" doc:"URL that the guest clones; empty with bundle_id or for no repository"`
	BundleID   string `json:"bundle_id,omitempty" doc:"ID of an uploaded repository, from POST /v1/bundles"`
	Ref        string `json:"ref,omitempty" doc:"Branch, tag or commit. With bundle_id any revision; if it is neither a ref nor a commit ID in the bundle, it means the HEAD of the bundle"`
	Depth      int    `json:"depth,omitempty"`
	Profile    string `json:"profile,omitempty" doc:"Default: the configured default profile"`
	Backend    string `json:"backend,omitempty" doc:"Name of a backend of the configuration; default: the one of the workspace, else the profile's, else the configured default"`
	Image      string `json:"image,omitempty"`
	Task       string `json:"task"`
	Agent      string `json:"agent,omitempty" doc:"claude, codex, opencode, gemini or shell; default: the configured default agent. With a new sandbox also none: the repository is cloned and no task runs"`
	Mode       string `json:"mode,omitempty" doc:"dangerous, the default and only mode"`
	TTLMinutes int    `json:"ttl_minutes,omitempty"`
	Keepalive  *bool  `json:"keepalive,omitempty"`

	WorkspaceSelection
	Session string `json:"session,omitempty" doc:"ID or name of a session: the job runs on its workspace, with its profile, on its branch. Not for a job of a new sandbox"`

	NoPreflight bool         `json:"no_preflight,omitempty" doc:"Skip the check that the agent has an API key and can reach its model"`
	Attempts    *JobAttempts `json:"attempts,omitempty" doc:"Run several attempts, each in a sandbox of its own, and keep the result of one. If the backend can fork, the sandboxes are copies of one that another job has prepared"`

	NoSetup bool `json:"no_setup,omitempty" doc:"Do not run the commands under setup and start no services of the repository's .agentlab.yaml"`

	Devcontainer string       `json:"devcontainer,omitempty" doc:"Whether the dev container of the repository is used: auto, on or off; default: behavior.devcontainer of the profile, or auto"`
	Setup        *SetupSource `json:"setup,omitempty" doc:"With bundle_id: use or make a snapshot after the commands under setup. Not with attempts or a workspace. Default: the commands run in each job"`
}

// Bundle is an uploaded git bundle. It is deleted after an hour unless a job uses
// it.
type Bundle struct {
	ID     string `json:"bundle_id"`
	Size   int64  `json:"size"`
	SHA256 string `json:"sha256"`
}

// Artifact is an output file of a job.
type Artifact struct {
	JobID     string    `json:"job_id"`
	Path      string    `json:"path"`
	Size      int64     `json:"size"`
	SHA256    string    `json:"sha256"`
	MIME      string    `json:"mime"`
	CreatedAt time.Time `json:"created_at"`
}

// Event is an event of a sandbox, a job or the daemon.
type Event struct {
	ID          int64          `json:"id"`
	Time        time.Time      `json:"ts"`
	Kind        string         `json:"kind"`
	SandboxVMID int            `json:"sandbox_vmid,omitempty"`
	JobID       string         `json:"job_id,omitempty"`
	Message     string         `json:"msg"`
	Data        map[string]any `json:"data,omitempty"`
}

// Profile is a profile.
type Profile struct {
	Name       string `json:"name"`
	Image      string `json:"image,omitempty"`
	Cores      int    `json:"cores"`
	MemoryMB   int    `json:"memory_mb"`
	RootSizeGB int    `json:"root_size_gb"`
	Nested     string `json:"nested" enum:"off,auto,on"`
	Network    string `json:"network_mode"`
	Backend    string `json:"backend,omitempty" doc:"Where its sandboxes and new workspaces are; default: the configured default"`
	Workspace  string `json:"workspace"`
	Keepalive  bool   `json:"keepalive"`
	TTLMinutes int    `json:"ttl_minutes"`
	Terminal   string `json:"terminal,omitempty" doc:"What keeps the terminals of its sessions running: tmux, the default, or zellij"`

	Devcontainer string `json:"devcontainer,omitempty" doc:"Whether dev containers of repositories are used: auto, the default, on or off"`
	Secrets      string `json:"secrets_bundle,omitempty" doc:"The bundle of secrets that its sandboxes receive"`
	Source       string `json:"source" doc:"Its file, or \"built-in\""`
	YAML         string `json:"yaml,omitempty" doc:"Only in the response for one profile"`
	Default      bool   `json:"default,omitempty" doc:"Jobs and sandboxes that name no profile have this one (default_profile in config.yaml)"`
	Usable       bool   `json:"usable"`

	SessionDefault bool `json:"session_default,omitempty" doc:"Sessions that 'agentlab start' creates without a profile have this one (session_profile in config.yaml)"`

	Problem string `json:"problem,omitempty" doc:"Why it is not usable on the configured backend"`
}

// Image is a built image.
type Image struct {
	Name      string            `json:"name"`
	Digest    string            `json:"digest"`
	Arch      string            `json:"arch"`
	Suite     string            `json:"suite"`
	Size      int64             `json:"size" doc:"Virtual size of the root disk in bytes"`
	DiskUsage int64             `json:"disk_usage" doc:"Bytes on the disk of the host"`
	CreatedAt time.Time         `json:"created_at"`
	Versions  map[string]string `json:"versions" doc:"Versions of the software in the image"`
	InUse     bool              `json:"in_use" doc:"A sandbox uses it"`
	Current   bool              `json:"current" doc:"The name refers to this digest"`
}

// ImageBuild is the request to build an image.
type ImageBuild struct {
	Name   string `json:"name" doc:"Name of a shipped recipe (base, agents, dev) or, with recipe, of the new image"`
	Recipe string `json:"recipe,omitempty" doc:"YAML recipe; default: the shipped one"`
	Force  bool   `json:"force,omitempty" doc:"Build even if the image exists"`

	Sandbox string `json:"sandbox,omitempty" doc:"Number or name of a stopped sandbox without secrets, whose disk becomes the new image"`
}

// Status is the state of the daemon.
type Status struct {
	Version   string         `json:"version"`
	Commit    string         `json:"commit"`
	PID       int            `json:"pid"`
	StartedAt time.Time      `json:"started_at"`
	Backend   string         `json:"backend"`
	Accel     string         `json:"accel,omitempty" doc:"kvm or tcg, for the qemu backend, once probed"`
	Home      string         `json:"home,omitempty" doc:"AGENTLAB_HOME of the daemon, if it is set"`
	StateDir  string         `json:"state_dir" doc:"Directory of the database and the disks of sandboxes, on the machine of the daemon"`
	Listen    string         `json:"listen,omitempty" doc:"Address for calls over TCP, which need a token"`
	Sandboxes map[string]int `json:"sandboxes" doc:"Number of sandboxes by state, without DESTROYED"`
	Jobs      map[string]int `json:"jobs" doc:"Number of jobs by status"`
	Findings  []Finding      `json:"findings" doc:"Failed checks of the host"`

	WarmPool []PoolStatus `json:"warm_pool,omitempty" doc:"Sandboxes that wait for their users (warm_pool in config.yaml)"`

	Memory      []SandboxMemory `json:"memory" doc:"Memory of the host that running sandboxes occupy: the 20 that occupy the most, of as many as can be read in a second"`
	MemoryTotal MemoryTotal     `json:"memory_total" doc:"Memory of all sandboxes that could be read"`
}

// PoolStatus is the state of one entry of the warm pool.
type PoolStatus struct {
	Image   string `json:"image"`
	Profile string `json:"profile" doc:"The profile that its cores, memory, disk and options are those of"`
	Count   int    `json:"count" doc:"Number of sandboxes that are configured"`
	Ready   int    `json:"ready" doc:"Number of sandboxes that can be handed out now"`
	Problem string `json:"problem,omitempty" doc:"Why there are fewer, if that is not temporary"`
}

// Clock is the state of the clock of the daemon's host.
type Clock struct {
	Now       time.Time `json:"now"`
	Suspended bool      `json:"suspended" doc:"Retention was suspended because the clock had jumped"`
}

// Backup is a copy of the database.
type Backup struct {
	Path      string    `json:"path" doc:"Path on the machine of the daemon"`
	Size      int64     `json:"size" doc:"Bytes"`
	CreatedAt time.Time `json:"created_at"`
}

// Finding is the result of a check.
type Finding struct {
	Name   string `json:"name"`
	Level  string `json:"level" enum:"ok,warn,error"`
	Detail string `json:"detail"`
	Remedy string `json:"remedy,omitempty"`
}

// Orphan is a virtual machine that has the mark of this AgentLab but belongs to no
// sandbox in the database.
type Orphan struct {
	VMID   int    `json:"vmid"`
	UID    string `json:"uid" doc:"Ownership mark; unique, while several orphans can have the same VMID"`
	Name   string `json:"name,omitempty"`
	Power  string `json:"power" enum:"partial,stopped,running,suspended,crashed"`
	Reason string `json:"reason,omitempty"`
}

// List is a page of a list.
type List[T any] struct {
	Items []T    `json:"items"`
	Next  string `json:"next,omitempty" doc:"Cursor of the next page; empty on the last page"`

	Missing []string `json:"missing,omitempty" doc:"For each backend that did not answer, and so has nothing in items, the reason"`
}

// SSHKey is the request to authorize an ephemeral public key in the guest.
type SSHKey struct {
	User      string `json:"user,omitempty" doc:"Default: agent"`
	PublicKey string `json:"public_key"`
	Seconds   int64  `json:"seconds" minimum:"1" maximum:"86400"`
}

// SSHTarget is the user, port and host keys for an SSH client.
type SSHTarget struct {
	User     string   `json:"user"`
	Port     int      `json:"port"`
	HostKeys []string `json:"host_keys"`
}

// Error is the response to a failed call: problem details (RFC 9457) with a stable
// code and a hint.
type Error struct {
	Status int    `json:"status"`
	Title  string `json:"title"`
	Detail string `json:"detail"`
	Code   string `json:"code"`
	Hint   string `json:"hint,omitempty"`
	Field  string `json:"field,omitempty"`
}

// TCPProtocol is the HTTP Upgrade token that turns a call into a TCP connection to a
// port in the guest.
const TCPProtocol = "agentlab-tcp"

// Health is the response of a running daemon.
type Health struct {
	Status  string `json:"status" enum:"ok,stopping"`
	Version string `json:"version"`
}

// ImageProgress is a line of output of an image build.
type ImageProgress struct {
	Line string `json:"line"`
}

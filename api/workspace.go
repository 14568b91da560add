package api

import "time"

// Workspace is a disk that outlives the sandboxes that use it.
type Workspace struct {
	ID        string     `json:"id" doc:"ws- and 13 characters"`
	Name      string     `json:"name" doc:"Unique among the workspaces that are not deleted"`
	State     string     `json:"state" enum:"CREATING,READY,GROWING,RESTORING,FAILED,TRASHED,DELETING"`
	Reason    string     `json:"reason,omitempty" doc:"Why it is FAILED, or why the current operation is tried again"`
	Backend   string     `json:"backend"`
	Storage   string     `json:"storage,omitempty" doc:"One of the backend's storages"`
	SizeGB    int        `json:"size_gb" doc:"Size in GiB"`
	GrowToGB  int        `json:"grow_to_gb,omitempty" doc:"Requested size in GiB while it is GROWING"`
	Bytes     int64      `json:"bytes" doc:"What it occupied on the backend when it was last compared with it; 0 if that is not known"`
	Unused    bool       `json:"unused,omitempty" doc:"No guest has mounted it yet, so it is empty"`
	UID       string     `json:"uid" doc:"Random ownership mark of its volume on the backend"`
	From      string     `json:"from,omitempty" doc:"What it is a copy of: WORKSPACE or WORKSPACE/SNAPSHOT"`
	CreatedAt time.Time  `json:"created_at"`
	TrashedAt *time.Time `json:"trashed_at,omitempty" doc:"When it was deleted; it is in the trash since then"`

	DeleteAfter *time.Time `json:"delete_after,omitempty" doc:"Of one in the trash: when its retention ends, after which it is deleted for good"`

	Leases []WorkspaceLease `json:"leases,omitempty" doc:"The sandbox that has it, then those that wait for it, in their order"`
}

// WorkspaceLease is the right of a sandbox to use a workspace, or its place in the
// queue.
type WorkspaceLease struct {
	Number      int        `json:"number"`
	SandboxVMID int        `json:"sandbox_vmid"`
	Sandbox     string     `json:"sandbox,omitempty" doc:"Name of the sandbox"`
	JobID       string     `json:"job_id,omitempty" doc:"The job of the sandbox"`
	Nonce       string     `json:"nonce" doc:"Random; another lease has another one"`
	RequestedAt time.Time  `json:"requested_at"`
	AcquiredAt  *time.Time `json:"acquired_at,omitempty" doc:"Absent while it waits"`
	WaitUntil   *time.Time `json:"wait_until,omitempty" doc:"When it gives up; only while it waits"`
	ExpiresAt   *time.Time `json:"expires_at,omitempty" doc:"End of the lease of the sandbox, which ends this one; renewing it renews this one"`
	Release     string     `json:"release,omitempty" enum:"clean,forced" doc:"How its release was requested"`
	Reason      string     `json:"reason,omitempty" doc:"Why the last request for its release failed"`
}

// WorkspaceSelection is the workspace of a new sandbox.
type WorkspaceSelection struct {
	Workspace            string        `json:"workspace,omitempty" doc:"ID or name of a workspace, which the guest mounts at /work; default: none"`
	WorkspaceCreate      *WorkspaceNew `json:"workspace_create,omitempty" doc:"Create the workspace with the sandbox"`
	WorkspaceWaitSeconds int           `json:"workspace_wait_seconds,omitempty" minimum:"0" maximum:"86400" doc:"How long to wait while another sandbox has the workspace; default: not at all"`
}

// WorkspaceNew describes a workspace that is created with a sandbox.
type WorkspaceNew struct {
	Name      string `json:"name,omitempty" doc:"Its name; default, and the only permitted value: workspace"`
	SizeGB    int    `json:"size_gb,omitempty" minimum:"0" maximum:"65536" doc:"Size in GiB; default 20"`
	Storage   string `json:"storage,omitempty" doc:"One of the backend's storages"`
	IfMissing bool   `json:"if_missing,omitempty" doc:"Use the workspace if it exists; otherwise that is an error"`
}

// WorkspaceAttach is a request to give a sandbox a workspace.
type WorkspaceAttach struct {
	Sandbox     string `json:"sandbox,omitempty" doc:"Number or name of a sandbox"`
	VMID        int    `json:"vmid,omitempty" doc:"Number of a sandbox, instead of sandbox"`
	WaitSeconds int    `json:"wait_seconds,omitempty" minimum:"0" maximum:"86400" doc:"How long to wait while another sandbox has the workspace; default: not at all"`
}

// WorkspaceRebind is a request to create a sandbox that takes a workspace from the one
// that has it. A request that is repeated with its name continues with that sandbox.
type WorkspaceRebind struct {
	Profile    string `json:"profile,omitempty" doc:"Profile of the new sandbox; default: the configured default profile"`
	Name       string `json:"name,omitempty" doc:"DNS label; default: generated"`
	TTLMinutes int    `json:"ttl_minutes,omitempty" minimum:"0" doc:"Duration of the lease; default: the profile's"`
	Keepalive  *bool  `json:"keepalive,omitempty" doc:"Default: the profile's"`
	Force      bool   `json:"force,omitempty" doc:"Also if the guest that has the workspace does not unmount it; what that guest wrote last may be lost"`
}

// WorkspaceDetach is a request to take a workspace from the sandbox that has it.
type WorkspaceDetach struct {
	Force bool `json:"force,omitempty" doc:"Also if its guest does not unmount it; what the guest wrote last may be lost"`
}

// WorkspaceCreate is a request to create an empty workspace.
type WorkspaceCreate struct {
	Name    string `json:"name" doc:"DNS label"`
	SizeGB  int    `json:"size_gb,omitempty" minimum:"0" maximum:"65536" doc:"Size in GiB; default 20"`
	Storage string `json:"storage,omitempty" doc:"One of the backend's storages; default: the one for volumes in its configuration"`
	Backend string `json:"backend,omitempty" doc:"Name of a backend of the configuration; default: the configured default"`
}

// WorkspaceRename is a request for another name.
type WorkspaceRename struct {
	Name string `json:"name" doc:"DNS label"`
}

// WorkspaceReplace is a request to put a copy of a workspace in its place.
type WorkspaceReplace struct {
	By   string `json:"by" doc:"ID of the copy, on any backend; it gets the name and the session of the workspace"`
	VMID int    `json:"vmid" minimum:"1" doc:"Number of the maintenance sandbox that has the workspace since its files were copied"`
}

// WorkspaceResize is a request for more space.
type WorkspaceResize struct {
	SizeGB int `json:"size_gb" minimum:"1" maximum:"65536" doc:"New size in GiB, not smaller than the current one"`
}

// WorkspaceUndelete is a request to return a workspace from the trash.
type WorkspaceUndelete struct {
	Name string `json:"name,omitempty" doc:"New name; default: the name that it had"`
}

// WorkspaceFork is a request for a copy of a workspace.
type WorkspaceFork struct {
	Name         string `json:"name" doc:"Name of the copy"`
	FromSnapshot string `json:"from_snapshot,omitempty" doc:"Name of a snapshot to copy; default: the current content"`
}

// WorkspaceSnapshot is the saved content of a workspace.
type WorkspaceSnapshot struct {
	UID         string    `json:"uid" doc:"Random ownership mark"`
	Name        string    `json:"name" doc:"Unique among the snapshots of its workspace"`
	WorkspaceID string    `json:"workspace_id"`
	State       string    `json:"state" enum:"SAVING,SAVED,DELETING"`
	Consistency string    `json:"consistency" enum:"detached,frozen,crash" doc:"detached: no sandbox had the workspace. frozen: its guest had written everything and waited, as the guest says. crash: what a power cut would have left. While it is SAVING, what was requested"`
	SizeGB      int       `json:"size_gb" doc:"Size of the workspace when it was saved, in GiB"`
	CreatedAt   time.Time `json:"created_at"`
}

// WorkspaceSnapshotCreate is a request to save a workspace.
type WorkspaceSnapshotCreate struct {
	Name     string `json:"name" doc:"DNS label, unique among the snapshots of the workspace"`
	Attached string `json:"attached,omitempty" enum:"frozen,crash" doc:"Save the workspace also while a sandbox has it. frozen: the guest writes everything and waits; if it does not, nothing is saved. crash: without the guest; what it has not written is missing"`
}

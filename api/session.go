package api

import "time"

// Session is a name for a workspace and the sandbox that currently uses it.
type Session struct {
	ID          string    `json:"id" doc:"se- and 13 characters"`
	Name        string    `json:"name" doc:"Unique"`
	Profile     string    `json:"profile" doc:"Profile of its sandboxes and jobs"`
	Image       string    `json:"image,omitempty" doc:"Image of its sandboxes; absent if it is the profile's"`
	WorkspaceID string    `json:"workspace_id"`
	Branch      string    `json:"branch,omitempty" doc:"Git branch that its jobs work on"`
	SandboxVMID int       `json:"sandbox_vmid,omitempty" doc:"Its current sandbox; absent if it has none"`
	Sandbox     string    `json:"sandbox,omitempty" doc:"Name of its current sandbox"`
	State       string    `json:"state,omitempty" doc:"State of its current sandbox"`
	CreatedAt   time.Time `json:"created_at"`
	UpdatedAt   time.Time `json:"updated_at"`

	History []SessionSandbox `json:"history,omitempty" doc:"The sandboxes that used its workspace, the newest first; only in the response for one session"`
}

// SessionSandbox is an entry of the history of a session.
type SessionSandbox struct {
	SandboxVMID int       `json:"sandbox_vmid"`
	SandboxUID  string    `json:"sandbox_uid"`
	Sandbox     string    `json:"sandbox" doc:"Name of the sandbox"`
	JobID       string    `json:"job_id,omitempty" doc:"The job of the sandbox"`
	CreatedAt   time.Time `json:"created_at"`
}

// SessionCreate is a request for a session.
type SessionCreate struct {
	Name      string `json:"name,omitempty" doc:"DNS label; default: made of branch"`
	Profile   string `json:"profile,omitempty" doc:"Default: the configured default profile"`
	Backend   string `json:"backend,omitempty" doc:"Name of a backend of the configuration; default: the one of its workspace, else the profile's, else the configured default"`
	Image     string `json:"image,omitempty" doc:"Image of its sandboxes; default: the profile's"`
	Branch    string `json:"branch,omitempty" doc:"Git branch that its jobs work on"`
	IfMissing bool   `json:"if_missing,omitempty" doc:"Return the session with the name, or without a name that of the branch, if there is one"`
	Quick     bool   `json:"quick,omitempty" doc:"Without image: while the image of the profile is not built, use the one of agents (images.agents in config.yaml) if it is a part of it"`

	WorkspaceSelection
}

// SessionResume is a request to continue a session.
type SessionResume struct {
	TTLMinutes int   `json:"ttl_minutes,omitempty" doc:"Lease of a new sandbox; default: the profile's"`
	Keepalive  *bool `json:"keepalive,omitempty" doc:"Of a new sandbox; default: the profile's"`
}

// SessionStop is a request to stop a session.
type SessionStop struct {
	Suspend bool `json:"suspend,omitempty" doc:"Suspend its sandbox to disk instead of destroying it"`
}

// SessionFork is a request for a session with a copy of a workspace.
type SessionFork struct {
	Name         string `json:"name" doc:"Name of the new session and its workspace"`
	FromSnapshot string `json:"from_snapshot,omitempty" doc:"Name of a snapshot of the workspace to copy; default: the current content"`
}

// SessionRename is a request for another name.
type SessionRename struct {
	Name string `json:"name" doc:"DNS label"`
}

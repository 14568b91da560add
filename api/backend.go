package api

// Backend is a backend of the daemon.
type Backend struct {
	Name     string   `json:"name"`
	Driver   string   `json:"driver" doc:"Its driver"`
	Default  bool     `json:"default" doc:"New sandboxes and workspaces are made on it unless a request, a profile, a workspace or a snapshot names another one"`
	Up       bool     `json:"up" doc:"It answered when its sandboxes were last listed"`
	Drained  bool     `json:"drained" doc:"No sandbox and no workspace is made on it"`
	Problem  string   `json:"problem,omitempty" doc:"Since when it has not answered, and why"`
	Supports []string `json:"supports" doc:"What it supports: allowlist, network-off, private, egress-log, suspend, suspend-to-disk, deadlines, console, snapshots, forks, templates, workspaces, workspace-hotplug and attached-workspace-snapshots"`
}

package api

import "time"

// ImageLayer is a result of a build step that later builds use again.
type ImageLayer struct {
	Kind      string    `json:"kind" doc:"What the step makes: packages, npm or go"`
	DiskUsage int64     `json:"disk_usage" doc:"Bytes on this machine"`
	UsedAt    time.Time `json:"used_at" doc:"Time of the last build that made or used it"`
}

// Template is a booted guest of which sandboxes start as copies.
type Template struct {
	Backend   string    `json:"backend"`
	Key       string    `json:"key" doc:"Identifies everything that a sandbox must share to start from it"`
	Image     string    `json:"image" doc:"name@digest; empty if its files cannot be read"`
	Cores     int       `json:"cores"`
	MemoryMB  int       `json:"memory_mb"`
	DiskUsage int64     `json:"disk_usage" doc:"Bytes on the disk of the host"`
	CreatedAt time.Time `json:"created_at"`
	UsedAt    time.Time `json:"used_at" doc:"When a sandbox was last created from it"`
	Stale     bool      `json:"stale" doc:"No sandbox can start from it, because its image was removed, or a part of the host was replaced"`
}

// TemplateWarm is the request to make a template of an image.
type TemplateWarm struct {
	Backend string `json:"backend,omitempty" doc:"Name of a backend of the configuration; default: the profile's, else the configured default"`
	Profile string `json:"profile,omitempty" doc:"Profile whose resources the template has; default: the configured default profile"`
}

// Memory is memory of the host that a sandbox occupies.
type Memory struct {
	UniqueBytes       int64 `json:"unique_bytes" doc:"Only this sandbox has it, and the host cannot drop it"`
	SharedBytes       int64 `json:"shared_bytes" doc:"Other processes of the host have it too, such as the memory of its template, or the host can drop it, because it is page cache of a file"`
	ProportionalBytes int64 `json:"proportional_bytes" doc:"unique_bytes and its part of the shared memory"`
}

// MemoryTotal is the memory of several sandboxes.
type MemoryTotal struct {
	Sandboxes   int   `json:"sandboxes" doc:"Number of the sandboxes"`
	UniqueBytes int64 `json:"unique_bytes" doc:"Sum of their unique_bytes"`
}

// SandboxMemory is the memory of one sandbox.
type SandboxMemory struct {
	VMID int `json:"vmid"`
	Memory
}

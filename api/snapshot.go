package api

import "time"

// Snapshot is a saved sandbox.
type Snapshot struct {
	UID         string    `json:"uid" doc:"Random ownership mark"`
	Name        string    `json:"name" doc:"Unique among the snapshots of its sandbox"`
	State       string    `json:"state" enum:"SAVING,SAVED,DELETING"`
	SandboxVMID int       `json:"sandbox_vmid" doc:"The sandbox that was saved; it may no longer exist"`
	SandboxName string    `json:"sandbox_name"`
	Backend     string    `json:"backend"`
	Profile     string    `json:"profile"`
	Image       string    `json:"image" doc:"name@digest"`
	Cores       int       `json:"cores"`
	MemoryMB    int       `json:"memory_mb"`
	RootSizeGB  int       `json:"root_size_gb" doc:"0 means the size of the image"`
	Keep        bool      `json:"keep" doc:"It is deleted neither with its sandbox nor by retention"`
	Memory      bool      `json:"memory" doc:"The memory of the guest was saved too"`
	Bytes       int64     `json:"bytes" doc:"Size on the backend; 0 if that is not known"`
	CreatedAt   time.Time `json:"created_at"`
}

// SnapshotCreate is a request to save a sandbox.
type SnapshotCreate struct {
	Name string `json:"name" doc:"DNS label, unique among the snapshots of the sandbox"`
	Keep bool   `json:"keep,omitempty" doc:"Delete it neither with the sandbox nor by retention"`
}

// SandboxFork is a request to create sandboxes that continue another one.
type SandboxFork struct {
	Sandbox    string `json:"sandbox" doc:"VMID or name of the sandbox to continue"`
	Count      int    `json:"count" minimum:"1" maximum:"64"`
	NamePrefix string `json:"name_prefix,omitempty" doc:"Names are PREFIX-1, PREFIX-2 and so on; default: the name of the sandbox"`
	TTLMinutes int    `json:"ttl_minutes,omitempty" doc:"Lease of each new sandbox; default: the profile's"`
}

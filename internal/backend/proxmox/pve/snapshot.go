package pve

import (
	"context"
	"net/url"
	"slices"
	"time"
)

// Snapshot is a snapshot of a VM: its disks, its configuration and, if it ran,
// its memory.
type Snapshot struct {
	Name        string `json:"name"`
	Description Str    `json:"description"`
	Parent      Str    `json:"parent"` // the snapshot before it; "" is none
	Time        Int    `json:"snaptime"`
	Memory      Bool   `json:"vmstate"`
	// State is "prepare" or "delete" while the snapshot is saved or deleted, and
	// after a task that does so was killed.
	State Str `json:"snapstate"`
}

// Saved returns when the snapshot was saved.
func (s Snapshot) Saved() time.Time { return time.Unix(int64(s.Time), 0).UTC() }

// currentState is the entry of a list of snapshots that is the VM itself.
const currentState = "current"

// Snapshots lists the snapshots of a VM.
func (c *Client) Snapshots(ctx context.Context, node string, vmid int) ([]Snapshot, error) {
	out, err := list[Snapshot](ctx, c, vmWhat("list snapshots of", vmid), vmPath(node, vmid, "snapshot"), nil)
	if err != nil {
		return nil, onlyAboutVM(err, vmid)
	}
	return slices.DeleteFunc(out, func(s Snapshot) bool { return s.Name == currentState }), nil
}

// SnapshotConfig reads the configuration that a VM gets by a rollback. Unlike
// Config it has no digest: only a deletion changes it.
func (c *Client) SnapshotConfig(ctx context.Context, node string, vmid int, name string) (Config, error) {
	var out Config
	err := c.vmCall(ctx, "read a snapshot of", Get, node, vmid, "snapshot/"+url.PathEscape(name)+"/config", nil, &out)
	return out, err
}

// Save starts to save a snapshot of all disks of a VM and, with memory, of its
// memory if it runs; it continues to run. The task fails with code exists if
// there is a snapshot with the name, and with unsupported if a disk is on a
// storage without snapshots. If the task is killed, the VM has a snapshot with a
// State and stays locked.
func (c *Client) Save(ctx context.Context, node string, vmid int, name, description string, memory bool) (UPID, error) {
	p := url.Values{"snapname": {name}, "vmstate": {boolParam(memory)}}
	setNonEmpty(p, "description", description)
	return c.vmTask(ctx, "save a snapshot of", Post, node, vmid, "snapshot", p)
}

// Rollback starts to replace the disks and the configuration of a VM by those of
// a snapshot, except description and firewall. It cuts the power of a running VM
// first. If the snapshot has memory, the VM runs afterwards: Proxmox VE starts it
// in the same task. Code conflict: the storage can return only to its newest
// snapshot; nothing has changed then.
func (c *Client) Rollback(ctx context.Context, node string, vmid int, name string) (UPID, error) {
	return c.vmTask(ctx, "roll back", Post, node, vmid, "snapshot/"+url.PathEscape(name)+"/rollback", nil)
}

// DeleteSnapshot starts to delete a snapshot. With force the task also succeeds
// if parts of the snapshot do not exist, which is so after a killed task.
func (c *Client) DeleteSnapshot(ctx context.Context, node string, vmid int, name string, force bool) (UPID, error) {
	p := url.Values{}
	if force {
		p.Set("force", "1")
	}
	return c.vmTask(ctx, "delete a snapshot of", Delete, node, vmid, "snapshot/"+url.PathEscape(name), p)
}

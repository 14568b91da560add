package pve

import (
	"context"
	"net/url"
	"strconv"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/lazyre"
)

// Storage is the state of one storage on a node. Sizes are in bytes. Thin
// volumes may exceed the size of the storage; Proxmox does not prevent that.
type Storage struct {
	Name    string `json:"storage"` // in lists
	Type    string `json:"type"`    // zfspool, dir, lvmthin, …
	Content Str    `json:"content"` // comma-separated, in any order
	Active  Bool   `json:"active"`
	Shared  Bool   `json:"shared"`
	Total   Int    `json:"total"`
	Avail   Int    `json:"avail"`
}

// Holds reports whether the storage is for a kind of content: images,
// snippets, iso, ….
func (s Storage) Holds(content string) bool {
	for c := range strings.SplitSeq(string(s.Content), ",") {
		if strings.TrimSpace(c) == content {
			return true
		}
	}
	return false
}

// Storages lists the storages of a node that the caller may see
// (Datastore.Audit or AllocateSpace); others are omitted without an error.
func (c *Client) Storages(ctx context.Context, node string) ([]Storage, error) {
	return list[Storage](ctx, c, "list storages of node "+node, apiPath("nodes", node, "storage"), nil)
}

// StorageStatus reads the state of one storage.
func (c *Client) StorageStatus(ctx context.Context, node, storage string) (Storage, error) {
	out := Storage{}
	err := c.call(ctx, "read the status of storage "+storage, Get, apiPath("nodes", node, "storage", storage, "status"), nil, &out)
	out.Name = storage
	return out, err
}

// Volume is one volume of a storage. Its owner is the number in its name.
type Volume struct {
	VolID string `json:"volid"` // STORAGE:NAME; for a linked clone NAME contains its parent's
	VMID  Int    `json:"vmid"`  // 0: none
	Size  Int    `json:"size"`  // bytes; absent if reading it is slow
}

// notOpened matches the error of a list for a file that qemu-img cannot open.
// The text may be nested.
var notOpened = lazyre.New(`Could not open '([^']+)': (?:Could not open '[^']*': )?(.*)$`)

const noSuchFile = "No such file or directory"

// unreadable returns the file in an error of a list and why it could not be
// opened, "" for any other error.
func unreadable(err error) (file, why string) {
	f, ok := faultOf(err)
	if !ok {
		return "", ""
	}
	m := notOpened.FindStringSubmatch(strings.TrimSpace(f.Message))
	if m == nil {
		return "", ""
	}
	return m[1], m[2]
}

// UnreadableFile returns the damaged file that made Content fail, "" for any
// other error.
func UnreadableFile(err error) string {
	if file, why := unreadable(err); why != noSuchFile {
		return file
	}
	return ""
}

// Content lists the volumes of a storage: of one kind of content, or of all
// kinds ("") and of one VM, or of all (0). Volumes that the caller may not
// access are omitted without an error: after a VM was deleted, all its volumes
// (NotRemoved).
//
// On a file storage the node opens each volume, and the whole list fails if it
// cannot open one. If that volume was deleted in the meantime, Content asks
// again; if it is damaged, the error has code unavailable and UnreadableFile
// returns the file. So callers should list the volumes of only one VM if
// possible.
func (c *Client) Content(ctx context.Context, node, storage, content string, vmid int) ([]Volume, error) {
	p := url.Values{}
	setNonEmpty(p, "content", content)
	if vmid != 0 {
		p.Set("vmid", strconv.Itoa(vmid))
	}
	var out []Volume
	err := c.retry(ctx, func() (again bool, err error) {
		out, err = list[Volume](ctx, c, "list volumes of storage "+storage, apiPath("nodes", node, "storage", storage, "content"), p)
		switch file, why := unreadable(err); {
		case file == "":
			return false, err
		case why == noSuchFile:
			return true, withCode(err, agentlab.CodeUnavailable, "a volume was deleted while the node listed the storage; try again")
		default:
			return false, withCode(err, agentlab.CodeUnavailable, "the file is damaged: repair it, or move it out of the storage: "+agentlab.OneLine(file, 200))
		}
	})
	if err != nil {
		return nil, err
	}
	for _, v := range out {
		if v.VolID == "" {
			return nil, agentlab.Errorf(agentlab.CodeInternal, "list volumes of storage %s: an entry has no name", storage)
		}
	}
	return out, nil
}

// DeleteContent starts the deletion of a volume (for images:
// Datastore.Allocate). Proxmox checks no configuration: it deletes the disk of
// a stopped VM. On some storages a missing volume counts as deleted.
func (c *Client) DeleteContent(ctx context.Context, node, volid string) (UPID, error) {
	storage, name, ok := strings.Cut(volid, ":")
	if !ok || storage == "" || name == "" {
		return "", agentlab.Errorf(agentlab.CodeInvalid, "%q is not a volume ID", agentlab.OneLine(volid, 80)).WithHint("a volume ID has the form STORAGE:NAME")
	}
	// The name of a linked clone's volume has a slash, which the API takes as it is.
	path := apiPath("nodes", node, "storage", storage, "content") + apiPath(strings.Split(name, "/")...)
	return c.task(ctx, "delete volume "+volid, Delete, path, nil)
}

package pve

import (
	"context"
	"net/url"
	"regexp"
	"strconv"
	"strings"

	"github.com/agentlab-vm/agentlab"
)

// Storage is one storage as a node sees it. Sizes are bytes; thin volumes
// over-commit, nothing refuses.
type Storage struct {
	Name    string `json:"storage"` // in lists
	Type    string `json:"type"`    // zfspool, dir, lvmthin, …
	Content Str    `json:"content"` // comma-separated, in any order
	Active  Bool   `json:"active"`
	Enabled Bool   `json:"enabled"`
	Shared  Bool   `json:"shared"`
	Total   Int    `json:"total"`
	Used    Int    `json:"used"`
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
// (Datastore.Audit or AllocateSpace); others are left out silently.
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
	VolID   string `json:"volid"` // STORAGE:NAME; of a linked clone NAME holds its parent's
	Content string `json:"content"`
	Format  string `json:"format"`
	VMID    Int    `json:"vmid"` // 0: none
	Size    Int    `json:"size"` // bytes; absent where finding out is slow
	CTime   Int    `json:"ctime"`
}

// notOpened is what a list says of a file that qemu-img cannot open; it may say
// so twice, one within the other.
var notOpened = regexp.MustCompile(`Could not open '([^']+)': (?:Could not open '[^']*': )?(.*)$`)

const noSuchFile = "No such file or directory"

// unreadable returns the file that an error of a list is about, and why it
// could not be opened; "" for any other error.
func unreadable(err error) (file, why string) {
	f, ok := asFault(err)
	if !ok {
		return "", ""
	}
	m := notOpened.FindStringSubmatch(strings.TrimSpace(f.Message))
	if m == nil {
		return "", ""
	}
	return m[1], m[2]
}

// UnreadableFile returns the damaged file because of which Content failed; ""
// when it failed for another reason.
func UnreadableFile(err error) string {
	if file, why := unreadable(err); why != noSuchFile {
		return file
	}
	return ""
}

// Content lists the volumes of a storage: of one kind of content, or of all
// kinds ("") and of one VM, or of all (0). What the caller may not access is
// left out silently: of a VM that is gone, everything (NotRemoved).
//
// On a storage of files the node opens each volume, and fails the whole list
// for one that it cannot open. Where that one was deleted meanwhile, Content
// asks again; where it is damaged, the error is unavailable and UnreadableFile
// names it. So ask for the volumes of one VM wherever that will do.
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
			return true, recoded(err, agentlab.CodeUnavailable, "a volume was deleted while the node listed the storage; try again")
		default:
			return false, recoded(err, agentlab.CodeUnavailable, "the file is damaged: repair it, or move it out of the storage: "+agentlab.OneLine(file, 200))
		}
	})
	if err != nil {
		return nil, err
	}
	for _, v := range out {
		if v.VolID == "" {
			return nil, agentlab.Errorf(agentlab.CodeInternal, "list volumes of storage %s: an entry without a name", storage)
		}
	}
	return out, nil
}

// DeleteContent begins to delete a volume (of images: Datastore.Allocate).
// Proxmox checks no configuration: the disk of a stopped VM is deleted. One
// that is not there counts as deleted on some storages.
func (c *Client) DeleteContent(ctx context.Context, node, volid string) (UPID, error) {
	storage, name, ok := strings.Cut(volid, ":")
	if !ok || storage == "" || name == "" {
		return "", agentlab.Errorf(agentlab.CodeInvalid, "%q is no volume id", agentlab.OneLine(volid, 80)).WithHint("a volume id is STORAGE:NAME")
	}
	// The name of a linked clone's volume has a slash, which the API takes as it is.
	path := apiPath("nodes", node, "storage", storage, "content") + apiPath(strings.Split(name, "/")...)
	return c.task(ctx, "delete volume "+volid, Delete, path, nil)
}

package pve

import (
	"context"
	"net/url"
	"strconv"
)

// Create starts the creation of a VM with these options, in a pool unless it is
// "". Code exists: the number is taken.
func (c *Client) Create(ctx context.Context, node string, vmid int, pool string, options map[string]string) (UPID, error) {
	p := url.Values{"vmid": {strconv.Itoa(vmid)}}
	setNonEmpty(p, "pool", pool)
	for k, v := range options {
		p.Set(k, v)
	}
	return c.task(ctx, vmWhat("create", vmid), Post, apiPath("nodes", node, "qemu"), p)
}

// SetAsync is Set as a task, for changes that allocate a disk.
func (c *Client) SetAsync(ctx context.Context, node string, vmid int, ch Changes) (UPID, error) {
	return c.vmTask(ctx, "configure", Post, node, vmid, "config", ch.params())
}

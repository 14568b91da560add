package pvenode

import "strings"

// pool is a resource pool. Node.mu guards it.
type pool struct {
	id, comment string
	vms         map[int]bool
	storages    map[string]bool
}

// gives reports whether the privileges on the pool apply to a path.
func (p *pool) gives(path string) bool {
	for id := range p.vms {
		if path == "/vms/"+itoa(id) {
			return true
		}
	}
	s, ok := strings.CutPrefix(path, "/storage/")
	return ok && p.storages[s]
}

// AddPool makes a pool.
func (n *Node) AddPool(id string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.pools[id] == nil {
		n.pools[id] = &pool{id: id, vms: map[int]bool{}, storages: map[string]bool{}}
	}
}

// poolOf returns the pool that a VM is in, or ""; mu is held.
func (n *Node) poolOf(vmid int) string {
	for id, p := range n.pools {
		if p.vms[vmid] {
			return id
		}
	}
	return ""
}

// checkPool is the check of a pool that something goes into.
func (c *call) checkPool(id string) *Error {
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	if id != "" && c.n.pools[id] == nil {
		return denied("pool '" + id + "' does not exist")
	}
	return nil
}

func (n *Node) poolEntry(p *pool, members bool) map[string]any {
	out := map[string]any{"poolid": p.id}
	if p.comment != "" {
		out["comment"] = p.comment
	}
	if !members {
		return out
	}
	list := []map[string]any{}
	for _, id := range n.vmids() {
		if p.vms[id] {
			list = append(list, n.resource(n.vms[id], false))
		}
	}
	for _, s := range sortedKeys(p.storages) {
		list = append(list, map[string]any{"id": "storage/" + n.name + "/" + s, "node": n.name, "storage": s, "type": "storage", "status": "available"})
	}
	out["members"] = list
	return out
}

func apiPools(c *call) (any, *Error) {
	one := c.p.str("poolid")
	out := []map[string]any{}
	for _, id := range sortedKeys(c.n.poolIDs()) {
		if one != "" && one != id {
			continue
		}
		if !c.may("/pool/"+id, "Pool.Audit") && !c.may("/pool/"+id, "Pool.Allocate") {
			if one != "" {
				return nil, denied("/pool/" + id + ", Pool.Audit")
			}
			continue
		}
		c.n.mu.Lock()
		out = append(out, c.n.poolEntry(c.n.pools[id], one != ""))
		c.n.mu.Unlock()
	}
	if one != "" && len(out) == 0 {
		return nil, dief("pool '%s' does not exist", one)
	}
	return out, nil
}

func (n *Node) poolIDs() map[string]bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	out := map[string]bool{}
	for id := range n.pools {
		out[id] = true
	}
	return out
}

func apiPool(c *call) (any, *Error) {
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	p := c.n.pools[c.p.str("poolid")]
	if p == nil {
		return nil, dief("pool '%s' does not exist", c.p.str("poolid"))
	}
	out := c.n.poolEntry(p, true)
	return out, nil
}

func apiPoolCreate(c *call) (any, *Error) {
	id := c.p.str("poolid")
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	if c.n.pools[id] != nil {
		return nil, dief("create pool failed: pool '%s' already exists", id)
	}
	c.n.pools[id] = &pool{id: id, comment: c.p.str("comment"), vms: map[int]bool{}, storages: map[string]bool{}}
	return nil, nil
}

func apiPoolUpdate(c *call) (any, *Error) {
	id := c.p.str("poolid")
	for _, v := range c.p.list("vms") {
		if err := c.need("/vms/"+v, "VM.Allocate"); err != nil && !c.may("/vms/"+v, "Permissions.Modify") {
			return nil, err
		}
	}
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	p := c.n.pools[id]
	if p == nil {
		return nil, dief("update pools failed: pool '%s' does not exist", id)
	}
	if c.p.has("comment") {
		p.comment = c.p.str("comment")
	}
	for _, v := range c.p.list("vms") {
		vmid := atoi(v)
		if c.p.yes("delete") {
			if !p.vms[vmid] {
				return nil, dief("update pools failed: VM %d is not a pool member", vmid)
			}
			delete(p.vms, vmid)
			continue
		}
		if p.vms[vmid] {
			return nil, dief("update pools failed: VM %d is already a pool member", vmid)
		}
		if other := c.n.poolOf(vmid); other != "" {
			if !c.p.yes("allow-move") {
				return nil, dief("update pools failed: VM %d belongs already to pool '%s' and 'allow-move' is not set", vmid, other)
			}
			delete(c.n.pools[other].vms, vmid)
		}
		p.vms[vmid] = true
	}
	for _, s := range c.p.list("storage") {
		if c.p.yes("delete") {
			delete(p.storages, s)
			continue
		}
		p.storages[s] = true
	}
	return nil, nil
}

func apiPoolDelete(c *call) (any, *Error) {
	id := c.p.str("poolid")
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	p := c.n.pools[id]
	if p == nil {
		return nil, dief("delete pool failed: pool '%s' does not exist", id)
	}
	if len(p.vms)+len(p.storages) > 0 {
		return nil, dief("delete pool failed: pool '%s' is not empty", id)
	}
	delete(c.n.pools, id)
	return nil, nil
}

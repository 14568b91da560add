package pvenode

import (
	"maps"
	"slices"
	"time"
)

// apiVersion is GET /version.
func apiVersion(c *call) (any, *Error) {
	if c.n.v9() {
		return map[string]any{"release": "9.2", "version": "9.2.0", "repoid": "2606ac8511111111"}, nil
	}
	return map[string]any{"release": "8.4", "version": "8.4.21", "repoid": "2606ac8511111111"}, nil
}

// apiNextID is GET /cluster/nextid. It reserves nothing, and looks at configs
// only.
func apiNextID(c *call) (any, *Error) {
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	if c.p.has("vmid") {
		if c.n.taken(c.p.num("vmid")) {
			return nil, badParam("vmid", "VM "+c.p.str("vmid")+" already exists")
		}
		return c.p.str("vmid"), nil
	}
	for id := c.n.nextIDs[0]; id < c.n.nextIDs[1]; id++ {
		if !c.n.taken(id) {
			return itoa(id), nil
		}
	}
	return nil, dief("unable to get any free VMID in range [%d, %d]", c.n.nextIDs[0], c.n.nextIDs[1])
}

// broadcast runs until the node ends. It is what the nodes tell each other
// every ten seconds: what /cluster/resources and the lists of nodes and pools
// show is that old.
func (n *Node) broadcast() {
	n.workers.Go(func() {
		t := time.NewTicker(10 * n.cfg.Waits.Second)
		defer t.Stop()
		for {
			select {
			case <-n.ctx.Done():
				return
			case <-t.C:
			}
			n.mu.Lock()
			told := map[int]map[string]any{}
			for id, v := range n.vms {
				told[id] = n.vmStatus(v, false)
			}
			n.told = told
			n.mu.Unlock()
		}
	})
}

// resource is an entry of /cluster/resources: config properties are fresh,
// the rest is as old as the last broadcast; mu is held.
func (n *Node) resource(v *vm, full bool) map[string]any {
	out := map[string]any{}
	if known := n.told[v.id]; known != nil && full {
		for k, val := range known {
			if k != "serial" && k != "pid" && k != "cpus" && k != "lock" && k != "tags" {
				out[k] = val
			}
		}
		out["maxcpu"] = known["cpus"]
	} else if known != nil {
		out["status"], out["name"] = known["status"], known["name"]
	}
	if out["status"] == nil {
		out["status"] = "unknown"
	}
	out["id"], out["type"], out["vmid"], out["node"] = "qemu/"+itoa(v.id), "qemu", v.id, v.node
	if t := v.conf["tags"]; t != "" && full {
		out["tags"] = t
	}
	if l := v.conf["lock"]; l != "" && full {
		out["lock"] = l
	}
	if p := n.poolOf(v.id); p != "" && full {
		out["pool"] = p
	}
	return out
}

// apiResources is GET /cluster/resources.
func apiResources(c *call) (any, *Error) {
	kind := c.p.str("type")
	out := []map[string]any{}
	if kind == "" || kind == "vm" {
		c.n.mu.Lock()
		ids := c.n.vmids()
		c.n.mu.Unlock()
		for _, id := range ids {
			if !c.may("/vms/"+itoa(id), "VM.Audit") {
				continue
			}
			c.n.mu.Lock()
			if v := c.n.vms[id]; v != nil {
				out = append(out, c.n.resource(v, true))
			}
			c.n.mu.Unlock()
		}
	}
	if kind == "" || kind == "vm" {
		out = append(out, c.containerResources()...)
	}
	if kind == "" || kind == "node" {
		for _, name := range c.n.cfg.Nodes {
			c.n.mu.Lock()
			out = append(out, c.n.nodeEntry(name))
			c.n.mu.Unlock()
		}
	}
	if kind == "" || kind == "storage" {
		out = append(out, c.storageResources()...)
	}
	return out, nil
}

// containerResources are those of containers, of which the model knows nothing
// but where they are.
func (c *call) containerResources() []map[string]any {
	out := []map[string]any{}
	c.n.mu.Lock()
	ids := slices.Sorted(maps.Keys(c.n.cts))
	c.n.mu.Unlock()
	for _, id := range ids {
		if !c.may("/vms/"+itoa(id), "VM.Audit") {
			continue
		}
		c.n.mu.Lock()
		out = append(out, map[string]any{"id": "lxc/" + itoa(id), "type": "lxc", "vmid": id, "node": c.n.cts[id], "status": "unknown"})
		c.n.mu.Unlock()
	}
	return out
}

func (c *call) storageResources() []map[string]any {
	out := []map[string]any{}
	c.n.mu.Lock()
	ids := sortedKeys(c.n.storages)
	c.n.mu.Unlock()
	for _, node := range c.n.cfg.Nodes {
		for _, id := range ids {
			if c.needAny("/storage/"+id, "Datastore.Audit", "Datastore.AllocateSpace") != nil {
				continue
			}
			c.n.mu.Lock()
			s := c.n.storages[id]
			st := s.status(node)
			if s.on(node) {
				out = append(out, map[string]any{
					"id": "storage/" + node + "/" + id, "type": "storage", "node": node, "storage": id, "status": "available",
					"plugintype": st["type"], "content": st["content"], "shared": st["shared"], "disk": st["used"], "maxdisk": st["total"],
				})
			}
			c.n.mu.Unlock()
		}
	}
	return out
}

// memUsed is what a node's host and its running VMs take; mu is held.
func (n *Node) memUsed(name string) int64 {
	used := int64(1 << 30)
	for _, v := range n.vms {
		if v.node == name && v.run != nil {
			mem := atoi(v.conf["memory"])
			if mem == 0 {
				mem = 512
			}
			used += int64(mem) << 20
		}
	}
	return used
}

// nodeEntry is an entry of /nodes; mu is held.
func (n *Node) nodeEntry(name string) map[string]any {
	m := n.nodes[name]
	e := map[string]any{"id": "node/" + name, "node": name, "type": "node", "ssl_fingerprint": n.rest.fingerprint, "status": "unknown"}
	if n.cfg.NoStatus {
		return e
	}
	if !m.online {
		e["status"] = "offline"
		return e
	}
	e["status"], e["level"] = "online", ""
	e["cpu"], e["maxcpu"] = 0.01, 8
	e["mem"], e["maxmem"] = n.memUsed(name), m.memory
	e["disk"], e["maxdisk"], e["uptime"] = int64(4<<30), int64(100<<30), int(time.Since(n.started)/time.Second)+1
	return e
}

// apiNodes is GET /nodes.
func apiNodes(c *call) (any, *Error) {
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	out := []map[string]any{}
	for _, name := range c.n.cfg.Nodes {
		out = append(out, c.n.nodeEntry(name))
	}
	return out, nil
}

// apiNodeStatus is GET /nodes/N/status.
func apiNodeStatus(c *call) (any, *Error) {
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	total := c.n.nodes[c.node].memory
	used := c.n.memUsed(c.node)
	release := "pve-manager/8.4.21/2606ac8511111111"
	if c.n.v9() {
		release = "pve-manager/9.2.0/2606ac8511111111"
	}
	return map[string]any{
		"cpu": 0.01, "wait": 0, "uptime": int(time.Since(c.n.started)/time.Second) + 1, "idle": 0,
		"loadavg": []string{"0.10", "0.10", "0.10"}, "kversion": "Linux 6.8.12-fake", "pveversion": release,
		"memory":  map[string]any{"total": total, "used": used, "free": total - used},
		"swap":    map[string]any{"total": 0, "used": 0, "free": 0},
		"rootfs":  map[string]any{"total": int64(100 << 30), "used": int64(4 << 30), "free": int64(96 << 30), "avail": int64(96 << 30)},
		"cpuinfo": map[string]any{"cpus": 8, "cores": 8, "sockets": 1, "model": "fake", "mhz": "2000.000", "hvm": "1", "flags": "", "user_hz": 100},
		"ksm":     map[string]any{"shared": 0}, "current-kernel": map[string]any{"sysname": "Linux", "release": "6.8.12-fake", "version": "#1 SMP", "machine": "x86_64"},
	}, nil
}

// apiNetwork is GET /nodes/N/network: the bridges that the caller may see.
func apiNetwork(c *call) (any, *Error) {
	out := []map[string]any{}
	c.n.mu.Lock()
	bridges := sortedKeys(c.n.nodes[c.node].bridges)
	c.n.mu.Unlock()
	kind := c.p.str("type")
	for i, b := range bridges {
		if c.n.cfg.NoStatus || (kind != "" && kind != "bridge" && kind != "any_bridge" && kind != "any_local_bridge") {
			continue
		}
		if c.needAny("/nodes/"+c.node, "Sys.Audit") != nil && c.needAny("/sdn/zones/localnetwork/"+b, "SDN.Audit", "SDN.Use") != nil {
			continue
		}
		out = append(out, map[string]any{"iface": b, "type": "bridge", "active": 1, "autostart": 1, "method": "manual", "method6": "manual", "families": []string{"inet"}, "bridge_ports": "", "bridge_stp": "off", "bridge_fd": "0", "priority": 3 + i})
	}
	return out, nil
}

// apiCertificates is GET /nodes/N/certificates/info.
func apiCertificates(c *call) (any, *Error) {
	r := c.n.rest
	issuer := "/CN=Proxmox Virtual Environment/OU=" + r.cluster + "/O=PVE Cluster Manager CA"
	return []map[string]any{
		{"filename": "pve-root-ca.pem", "pem": string(r.caPEM), "fingerprint": r.caFingerprint, "san": []string{}, "public-key-bits": 2048, "public-key-type": "rsaEncryption",
			"subject": issuer, "issuer": issuer, "notbefore": r.notBefore, "notafter": r.notAfter},
		{"filename": "pve-ssl.pem", "pem": string(r.leafPEM), "fingerprint": r.fingerprint, "san": []string{"127.0.0.1", "0000:0000:0000:0000:0000:0000:0000:0001", "localhost", "192.0.2.10", c.n.name},
			"public-key-bits": 2048, "public-key-type": "rsaEncryption", "subject": "/OU=PVE Cluster Node/O=Proxmox Virtual Environment/CN=" + c.n.name,
			"issuer": issuer, "notbefore": r.notBefore, "notafter": r.notAfter},
	}, nil
}

// SetOnline takes a node of the cluster down or up again: calls for it fail,
// its VMs are as they were.
func (n *Node) SetOnline(name string, online bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if m := n.nodes[name]; m != nil {
		m.online = online
	}
}

// Move moves a VM to another node manually, also while it runs. Its volumes
// have to be on shared storage.
func (n *Node) Move(vmid int, to string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if v := n.vms[vmid]; v != nil && n.nodes[to] != nil {
		v.node = to
	}
}

func nodePriv(privs ...string) func(c *call) *Error {
	return func(c *call) *Error { return c.need("/nodes/"+c.p.str("node"), privs...) }
}

var clusterCalls = []endpoint{
	{method: "GET", path: "/cluster/nextid", run: apiNextID, params: []param{integer("vmid").as(formatVMID)}},
	{method: "GET", path: "/cluster/resources", run: apiResources, params: []param{str("type").of("vm", "storage", "node", "sdn")}},
	{method: "GET", path: "/nodes", run: apiNodes},
	{method: "GET", path: "/nodes/{node}/status", run: apiNodeStatus, perm: nodePriv("Sys.Audit")},
	{method: "GET", path: "/nodes/{node}/network", run: apiNetwork, params: []param{
		str("type").of("bridge", "bond", "eth", "alias", "vlan", "fabric", "OVSBridge", "OVSBond", "OVSPort", "OVSIntPort", "vnet", "any_bridge", "any_local_bridge", "include_sdn"),
	}},
	{method: "GET", path: "/nodes/{node}/certificates/info", run: apiCertificates},
}

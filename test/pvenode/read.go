package pvenode

import (
	"maps"
	"slices"
	"strings"
	"time"
)

// apiConfig is GET …/config.
func apiConfig(c *call) (any, *Error) {
	v, err := c.load(c.p.num("vmid"))
	if err != nil {
		return nil, err
	}
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	s := v.effective()
	if c.p.yes("current") {
		s = v.conf
	}
	if name := c.p.str("snapshot"); name != "" {
		if v.snaps[name] == nil {
			return nil, dief("snapshot '%s' does not exist", name)
		}
		s = v.snaps[name]
	}
	out := configJSON(s.reread())
	out["digest"] = v.digest()
	return out, nil
}

func configJSON(s section) map[string]any {
	out := map[string]any{}
	for k, val := range s {
		if k == "cipassword" {
			out[k] = "**********"
			continue
		}
		out[k] = jsonValue(k, val)
	}
	return out
}

// apiPending is GET …/pending.
func apiPending(c *call) (any, *Error) {
	v, err := c.load(c.p.num("vmid"))
	if err != nil {
		return nil, err
	}
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	keys := map[string]bool{"digest": true}
	conf, pending := v.conf.reread(), v.pending.reread()
	for _, s := range []section{conf, pending} {
		for k := range s {
			keys[k] = true
		}
	}
	out := []map[string]any{}
	for k := range keys { // in no order
		e := map[string]any{"key": k}
		if k == "digest" {
			e["value"] = v.digest()
		}
		if val, ok := conf[k]; ok {
			e["value"] = jsonValue(k, val)
		}
		if val, ok := pending[k]; ok {
			e["pending"] = jsonValue(k, val)
		}
		if force, ok := v.drop[k]; ok {
			e["delete"] = 1
			if force {
				e["delete"] = 2
			}
		}
		if k == "cipassword" {
			e["value"] = "**********"
		}
		out = append(out, e)
	}
	return out, nil
}

// vmStatus is what lists and status/current share; mu is held.
func (n *Node) vmStatus(v *vm, full bool) map[string]any {
	conf := v.conf
	cores, sockets := max(atoi(conf["cores"]), 1), max(atoi(conf["sockets"]), 1)
	mem := conf["memory"]
	if mem == "" {
		mem = "512"
	}
	out := map[string]any{
		"vmid": v.id, "status": "stopped", "cpus": cores * sockets, "cpu": 0, "disk": 0, "mem": 0, "netin": 0, "netout": 0, "uptime": 0,
		"maxmem": int64(atoi(strings.TrimPrefix(mem, "current="))) << 20, "maxdisk": n.bootSize(v),
	}
	if name := conf["name"]; name != "" {
		out["name"] = name
	} else {
		out["name"] = "VM " + itoa(v.id)
	}
	if t := conf["tags"]; t != "" {
		out["tags"] = t
	}
	if v.template() {
		out["template"] = 1
	}
	if l := conf["lock"]; l != "" {
		out["lock"] = l
	}
	if conf["serial0"] != "" {
		out["serial"] = 1
	}
	if n.v9() {
		out["memhost"] = 0
	}
	if r := v.run; r != nil {
		out["status"], out["pid"] = "running", r.pid
		out["uptime"] = int(time.Since(r.started)/time.Second) + 1
		out["mem"], out["netin"] = 8003971, 110
		if n.v9() {
			for _, k := range []string{"pressurecpusome", "pressurecpufull", "pressureiosome", "pressureiofull", "pressurememorysome", "pressurememoryfull"} {
				out[k] = 0
			}
		}
	}
	_ = full
	return out
}

// bootSize is the size of the first disk in the boot order; mu is held.
func (n *Node) bootSize(v *vm) int64 {
	for _, slot := range bootOrder(v.conf["boot"]) {
		d := parseDrive(v.conf[slot])
		if size, ok := parseSize(d.props["size"]); ok && !d.cdrom() {
			return size
		}
	}
	return 0
}

// apiVMs is GET /nodes/N/qemu. The real node reads the configurations one
// after the other, also those that the caller may not see, and fails as a
// whole when one of them is deleted in the meantime.
func apiVMs(c *call) (any, *Error) {
	var ids []int
	c.n.mu.Lock()
	for _, id := range c.n.vmids() {
		if c.n.vms[id].node == c.node {
			ids = append(ids, id)
		}
	}
	c.n.mu.Unlock()
	seen := map[int]map[string]any{}
	for _, id := range ids {
		if err := c.n.pointOf(c, id, "list.config"); err != nil {
			return nil, err
		}
		c.n.mu.Lock()
		var status map[string]any
		if v := c.n.vms[id]; v != nil && v.node == c.node {
			status = c.n.vmStatus(v, c.p.yes("full"))
		}
		c.n.mu.Unlock()
		if status == nil {
			return nil, dief("Configuration file 'nodes/%s/qemu-server/%d.conf' does not exist", c.node, id)
		}
		if c.may("/vms/"+itoa(id), "VM.Audit") {
			seen[id] = status
		}
	}
	return slices.AppendSeq([]map[string]any{}, maps.Values(seen)), nil // in no order
}

// apiStatus is GET …/status/current.
func apiStatus(c *call) (any, *Error) {
	v, err := c.load(c.p.num("vmid"))
	if err != nil {
		return nil, err
	}
	c.n.mu.Lock()
	asked := v.run
	c.n.mu.Unlock()
	qmp := "stopped"
	if asked != nil { // QMP may take its time
		qmp = asked.guest.Status()
	}
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	out := c.n.vmStatus(v, true)
	out["qmpstatus"], out["clipboard"], out["ha"] = "stopped", nil, map[string]any{"managed": 0}
	if agentEnabled(v.conf) {
		out["agent"] = 1
	}
	if r := v.run; r != nil {
		out["qmpstatus"] = qmp
		nics := map[string]any{}
		for i := range 32 {
			if _, ok := v.conf["net"+itoa(i)]; ok {
				nics["tap"+itoa(v.id)+"i"+itoa(i)] = map[string]any{"netin": 110, "netout": 0}
			}
		}
		out["nics"] = nics
	}
	return out, nil
}

// apiFeature is GET …/feature.
func apiFeature(c *call) (any, *Error) {
	v, err := c.load(c.p.num("vmid"))
	if err != nil {
		return nil, err
	}
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	s := v.conf
	snap := c.p.str("snapname")
	if snap != "" {
		if v.snaps[snap] == nil {
			return nil, dief("snapshot '%s' does not exist", snap)
		}
		s = v.snaps[snap]
	}
	has := 0
	if c.n.feature(c.node, s, c.p.str("feature"), snap) {
		has = 1
	}
	return map[string]any{"hasFeature": has, "nodes": []string{c.node}}, nil
}

// feature reports whether all disks support a feature. The caller holds mu.
func (n *Node) feature(node string, s section, feature, snap string) bool {
	for _, slot := range s.drives() {
		d := parseDrive(s[slot])
		if d.cdrom() || d.cloudinit() {
			continue
		}
		st, r, vol, err := n.findVolume(node, d.file)
		if err != nil || !st.hasFeature(vol, r, feature, snap) {
			return false
		}
	}
	return true
}

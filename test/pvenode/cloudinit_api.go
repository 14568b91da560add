package pvenode

var cloudinitTable = []endpoint{
	{method: "GET", path: "/nodes/{node}/qemu/{vmid}/cloudinit", perm: vmPriv("VM.Audit"), run: apiCloudinit},
	{method: "PUT", path: "/nodes/{node}/qemu/{vmid}/cloudinit", perm: vmPriv("VM.Config.Cloudinit"), run: apiCloudinitUpdate},
	{method: "GET", path: "/nodes/{node}/qemu/{vmid}/cloudinit/dump", perm: vmPriv("VM.Audit"), run: apiCloudinitDump,
		params: []param{str("type").must().of("user", "network", "meta")}},
}

// apiCloudinit lists the options that an image is made of. Those that count as
// false are left out, and ipconfigN are none of them.
func apiCloudinit(c *call) (any, *Error) {
	v, err := c.load(c.p.num("vmid"))
	if err != nil {
		return nil, err
	}
	c.n.mu.Lock()
	defer c.n.mu.Unlock()
	out := []map[string]any{}
	for _, k := range []string{"cicustom", "cipassword", "citype", "ciupgrade", "ciuser", "nameserver", "searchdomain", "sshkeys"} {
		switch val := v.conf[k]; {
		case val == "" || val == "0":
		case k == "cipassword":
			out = append(out, map[string]any{"key": k, "value": "**********"})
		default:
			out = append(out, map[string]any{"key": k, "value": jsonValue(k, val)})
		}
	}
	return out, nil
}

// apiCloudinitUpdate makes the image again.
func apiCloudinitUpdate(c *call) (any, *Error) {
	vmid := c.p.num("vmid")
	v, unlock, err := c.lockUnlocked(vmid)
	if err != nil {
		return nil, err
	}
	defer unlock()
	c.n.mu.Lock()
	conf := v.conf.clone()
	c.n.mu.Unlock()
	for _, slot := range conf.drives() {
		if !parseDrive(conf[slot]).cloudinit() {
			continue
		}
		if _, err := c.seedFiles(vmid, conf); err != nil {
			return nil, err
		}
		c.say("generating cloud-init ISO")
	}
	return nil, nil
}

// apiCloudinitDump shows what would be made, and leaves cicustom out.
func apiCloudinitDump(c *call) (any, *Error) {
	vmid := c.p.num("vmid")
	v, err := c.load(vmid)
	if err != nil {
		return nil, err
	}
	mask := !c.may("/vms/"+itoa(vmid), "VM.Config.Cloudinit")
	c.n.mu.Lock()
	conf := v.conf.clone()
	c.n.mu.Unlock()
	user, network, meta := cloudinitTexts(conf, vmid)
	switch c.p.str("type") {
	case "user":
		return cloudinitUser(conf, vmid, mask), nil
	case "network":
		return network, nil
	}
	_ = user
	return meta, nil
}

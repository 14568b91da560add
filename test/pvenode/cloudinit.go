package pvenode

import (
	"os"
)

// seedFiles are what the cloud-init drive holds.
func (c *call) seedFiles(vmid int, conf section) (map[string]string, *Error) {
	seed := map[string]string{"vendor-data": ""}
	custom, _ := cicustomProps.parse(conf["cicustom"])
	for key, file := range map[string]string{"user": "user-data", "network": "network-config", "meta": "meta-data", "vendor": "vendor-data"} {
		volid := custom[key]
		if volid == "" {
			continue
		}
		content, err := c.snippet(volid)
		if err != nil {
			return nil, err
		}
		seed[file] = content
	}
	for file, own := range map[string]string{"user-data": cloudinitUser(conf, vmid, false), "network-config": cloudinitNetwork(conf)} {
		if _, given := seed[file]; !given {
			seed[file] = own
		}
	}
	if _, given := seed["meta-data"]; !given {
		seed["meta-data"] = cloudinitMeta(seed["user-data"], seed["network-config"])
	}
	return seed, nil
}

// snippet reads a file of a snippets directory. The files of a storage that is
// not shared are on the first node.
func (c *call) snippet(volid string) (string, *Error) {
	c.n.mu.Lock()
	s, r, err := c.n.parseVolid(volid)
	c.n.mu.Unlock()
	if err != nil {
		return "", err
	}
	if r.content != "snippets" {
		return "", dief("'%s' is not in the snippets directory", volid).exit(2)
	}
	b, e := os.ReadFile(c.n.HostPath(s.filePath(r)))
	if e != nil || !s.Shared && c.node != c.n.name {
		return "", dief("volume '%s' does not exist", volid).exit(2)
	}
	return string(b), nil
}

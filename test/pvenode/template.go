package pvenode

import (
	"os"
	"strings"
)

// makeBase renames a volume to a base, from which linked clones are made, and
// returns its new id.
func (c *call) makeBase(volid string) (string, *Error) {
	n := c.n
	n.mu.Lock()
	defer n.mu.Unlock()
	s, r, v, err := n.findVolume(c.node, volid)
	if err != nil {
		return "", err
	}
	if v == nil {
		return "", dief("volume '%s' does not exist", volid)
	}
	if r.isBase {
		return volid, nil
	}
	oldFile := n.HostPath(s.filePath(r))
	delete(s.at(c.node), v.key)
	v.key = strings.Replace(v.key, "vm-", "base-", 1)
	if s.Type == ZFSPool {
		v.snaps = append(v.snaps, baseSnap)
	}
	s.at(c.node)[v.key] = v
	if n.cfg.Files != nil && s.Type == Dir {
		r.key = v.key
		if err := os.Rename(oldFile, n.HostPath(s.filePath(r))); err != nil {
			return "", dief("rename failed: %v", err)
		}
	}
	return s.volid(v), nil
}

package config

import (
	"maps"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
)

// maxPool is the maximum number of waiting sandboxes of one kind.
const maxPool = 100

// PoolEntry is one entry of warm_pool.
type PoolEntry struct {
	Image   string
	Profile string // "" is the default profile
	Count   int
}

// Pool returns the entries of warm_pool in the order of their keys.
func (c Config) Pool() (out []PoolEntry, err error) {
	for _, key := range slices.Sorted(maps.Keys(c.WarmPool)) {
		e := PoolEntry{Count: c.WarmPool[key]}
		profile := false
		e.Image, e.Profile, profile = strings.Cut(key, "/")
		names := []string{e.Image}
		if profile {
			names = append(names, e.Profile)
		}
		for _, name := range names {
			if err := agentlab.ValidateName(name); err != nil {
				return nil, agentlab.Errorf(agentlab.CodeInvalid, "%q is neither an image nor IMAGE/PROFILE", key).WithField("warm_pool").WithHint("%s", agentlab.HintOf(err))
			}
		}
		if e.Count < 0 || e.Count > maxPool {
			return nil, agentlab.Errorf(agentlab.CodeInvalid, "%d is not between 0 and %d", e.Count, maxPool).WithField("warm_pool." + key)
		}
		if e.Count > 0 {
			out = append(out, e)
		}
	}
	return out, nil
}

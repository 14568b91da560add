package machine

import (
	"slices"
	"strconv"
	"strings"
)

// Config is a VM's configuration as its file has it: option to value.
type Config map[string]string

// props are the parts of a value such as "virtio=AA:…,bridge=vmbr1": key to
// value, and what stands without a key under "".
func props(value string) map[string]string {
	out := map[string]string{}
	for part := range strings.SplitSeq(value, ",") {
		k, v, ok := strings.Cut(part, "=")
		if !ok {
			k, v = "", k
		}
		out[k] = v
	}
	return out
}

// on reports whether a boolean option is set.
func (c Config) on(key string, fallback bool) bool {
	switch c[key] {
	case "":
		return fallback
	case "0":
		return false
	}
	return true
}

// AgentEnabled reports whether the VM has an agent's port by its option agent.
func (c Config) AgentEnabled() bool {
	p := props(c["agent"])
	return p[""] == "1" || p["enabled"] == "1"
}

// netNumbers are the numbers of a VM's network devices, in the order of their
// names' text, as Proxmox VE walks them.
func (c Config) netNumbers() []string {
	var out []string
	for key := range c {
		if n, ok := strings.CutPrefix(key, "net"); ok {
			if _, err := strconv.Atoi(n); err == nil {
				out = append(out, n)
			}
		}
	}
	slices.Sort(out)
	return out
}

// MAC returns the address of network device n, and its model.
func (c Config) MAC(n string) (model, mac string) {
	for k, v := range props(c["net"+n]) {
		switch {
		case k == "model" || k == "":
			model = v
		case k == "macaddr":
			mac = v
		case strings.Count(v, ":") == 5:
			return k, v
		}
	}
	return model, mac
}

package proxmox

import (
	"context"
	"os"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab/internal/hostvirt"
)

// Nested implements backend.Host. The modules of other nodes than that of the
// daemon are not known: the guest reports what it has.
func (d *Driver) Nested(context.Context) error {
	if slices.ContainsFunc(d.cfg.Nodes, func(n Node) bool { return !n.Local && n.Host != nil }) {
		return nil
	}
	return hostvirt.Nested(d.cfg.Modules)
}

// CPU types. Only those of exposedCPUs have virtualization that the node provides; that
// of a custom type is the operator's decision.
const (
	hostCPU  = "host"
	plainCPU = "x86-64-v3"
	oldCPU   = "x86-64-v2-AES" // of processors without AVX2
)

var exposedCPUs = []string{hostCPU, "max"}

// cpuFor returns the CPU type of a sandbox, "" for that of its template.
func (d *Driver) cpuFor(h *handle, inherited string) string {
	kind, _, _ := strings.Cut(inherited, ",")
	exposed := slices.Contains(exposedCPUs, strings.TrimPrefix(kind, "cputype="))
	switch {
	case h.Spec.Resources.Nested.Wanted():
		if exposed {
			return ""
		}
		return hostCPU
	case !exposed:
		return ""
	case slices.ContainsFunc(d.cfg.Nodes, func(n Node) bool { return n.Name == h.Node && n.Local }) && !hasAVX2(d.cfg.CPUInfo):
		return oldCPU
	}
	return plainCPU
}

// hasAVX2 reports whether the processor of this machine has what the type plainCPU
// needs, or is not known.
func hasAVX2(cpuinfo string) bool {
	b, err := os.ReadFile(cpuinfo)
	if err != nil {
		return true
	}
	for line := range strings.Lines(string(b)) {
		if name, flags, _ := strings.Cut(line, ":"); strings.TrimSpace(name) == "flags" {
			return slices.Contains(strings.Fields(flags), "avx2")
		}
	}
	return true
}

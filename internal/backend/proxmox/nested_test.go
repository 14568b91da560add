package proxmox

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend"
)

// TestNestedCPU: only sandboxes that may run virtual machines have a CPU type with the
// node's virtualization.
func TestNestedCPU(t *testing.T) {
	for _, c := range []struct {
		template string
		nested   agentlab.Nested
		flags    string // of the node's processor; "" is not known
		want     string
	}{
		{"", agentlab.NestedOff, "", ""},
		{"", "", "", ""},
		{"x86-64-v2-AES", agentlab.NestedOff, "", "x86-64-v2-AES"},
		{"host", agentlab.NestedOff, "", "x86-64-v3"},
		{"cputype=host,hidden=1", agentlab.NestedOff, "flags : fpu avx2", "x86-64-v3"},
		{"max", "", "flags : fpu sse4_2 aes", "x86-64-v2-AES"},
		{"", agentlab.NestedAuto, "", "host"},
		{"x86-64-v3", agentlab.NestedOn, "", "host"},
		{"host,flags=+aes", agentlab.NestedOn, "", "host,flags=+aes"},
	} {
		w := newWorld(t, worldConfig{})
		if c.flags != "" {
			ok(t, "cpuinfo", os.WriteFile(filepath.Join(w.dir, "cpuinfo"), []byte("processor : 0\n"+c.flags+"\n"), 0o600))
		}
		w.node.Edit(templateVMID, map[string]string{"cpu": c.template})
		sp := w.spec(1)
		sp.Resources.Nested = c.nested
		ok(t, "Create", w.driver.Create(t.Context(), sp))
		if got := w.node.Config(sp.VMID)["cpu"]; got != c.want {
			t.Errorf("template %q, nested %q, %q: cpu %q, want %q", c.template, c.nested, c.flags, got, c.want)
		}
		ok(t, "Start", w.driver.Start(t.Context(), sp.Ref()))
	}
}

// TestNestedRefused: a node whose module does not permit it starts no sandbox that
// requires virtualization.
func TestNestedRefused(t *testing.T) {
	w := newWorld(t, worldConfig{})
	sp := w.spec(1)
	sp.Resources.Nested = agentlab.NestedOn
	ok(t, "Create", w.driver.Create(t.Context(), sp))
	parameters := filepath.Join(w.dir, "modules", "kvm_intel", "parameters")
	ok(t, "mkdir", os.MkdirAll(parameters, 0o700))
	ok(t, "parameter", os.WriteFile(filepath.Join(parameters, "nested"), []byte("N\n"), 0o600))
	for what, err := range map[string]error{"Nested": w.driver.Nested(t.Context()), "Start": w.driver.Start(t.Context(), backend.Ref{UID: sp.UID})} {
		if agentlab.CodeOf(err) != agentlab.CodeUnsupported || agentlab.HintOf(err) == "" {
			t.Errorf("%s: %v → %q", what, err, agentlab.HintOf(err))
		}
	}
}

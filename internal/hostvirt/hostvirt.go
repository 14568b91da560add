// Package hostvirt reads whether the hypervisor of this machine's kernel permits
// virtual machines in its guests, and measures the cost of its own virtualization.
package hostvirt

import (
	"os"
	"path/filepath"
	"strings"

	"github.com/agentlab-vm/agentlab"
)

// The kernel's files about its modules and its processors.
const (
	Modules = "/sys/module" // has the parameters of each module
	CPUInfo = "/proc/cpuinfo"
)

// Nested returns an error with code unsupported, the field resources.nested and a hint
// if the module of KVM does not permit guests to use virtualization. Without a module
// that is not known, and the result is nil.
func Nested(modules string) error {
	for _, m := range []string{"kvm_intel", "kvm_amd"} {
		b, err := os.ReadFile(filepath.Join(modules, m, "parameters", "nested"))
		if err != nil {
			continue
		}
		if v := strings.TrimSpace(string(b)); v == "N" || v == "0" {
			return Refused("the module "+m+" of this host does not permit it",
				"echo 'options "+m+" nested=1' | sudo tee /etc/modprobe.d/agentlab-nested.conf; stop all VMs of this host, then: sudo modprobe -r "+m+" && sudo modprobe "+m)
		}
		return nil
	}
	return nil
}

// Refused returns the error for a host that provides no virtualization to guests.
func Refused(why, hint string) error {
	return agentlab.Errorf(agentlab.CodeUnsupported, "no nested virtualization: %s", why).WithField("resources.nested").WithHint("%s", hint)
}

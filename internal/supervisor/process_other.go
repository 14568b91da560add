//go:build !linux

package supervisor

import "github.com/agentlab-vm/agentlab/internal/hostos"

// kill returns an error: without a pidfd the process could be another one by now.
func (p processID) kill() error {
	return hostos.Unsupported("the process of a VM cannot be identified")
}

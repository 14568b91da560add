//go:build !linux

package e2e

func threadID() int { return 0 }

// newNetwork panics: what follows would be done to the host's network.
func newNetwork() { panic("network namespaces exist on Linux only") }

package guestapi

import (
	"slices"
	"time"
)

// Identity is sent to every guest after it boots, because images and templates
// contain none of it: name, clock, entropy, and the bootstrap document of seed
// 000 appendix A. A guest that continues from another sandbox has the identity of
// that sandbox; if the UID differs, everything is replaced.
type Identity struct {
	UID       string     `json:"uid"`
	Hostname  string     `json:"hostname"`
	Time      time.Time  `json:"time"`
	Entropy   []byte     `json:"entropy"`           // at least 32 bytes
	Network   *Network   `json:"network,omitempty"` // nil if the guest's network is configured by other means
	Bootstrap *Bootstrap `json:"bootstrap,omitempty"`
	// HostKey is a new SSH host key: emulated guests take long to create one. A guest
	// that gets none creates it.
	HostKey *HostKey `json:"host_key,omitempty"`
	// RootBytes is the size of the root disk; 0 if it is that of the image. A guest
	// that continues from one with a smaller disk extends its file system before it
	// answers. Other guests do it while they boot.
	RootBytes int64 `json:"root_bytes,omitempty"`
	// Nested is "auto" if the guest makes /dev/kvm usable for its users, and tests it.
	// With "on" its runner starts only if that works. "" changes nothing.
	Nested string `json:"nested,omitempty"`
}

// HostKey is an SSH host key of type ed25519: the contents of its files.
type HostKey struct {
	Private string `json:"private"` // in the format of OpenSSH, unencrypted
	Public  string `json:"public"`
}

// Network is the guest's static network configuration.
type Network struct {
	Address string   `json:"address"` // CIDR, e.g. 10.77.0.2/24
	Gateway string   `json:"gateway"`
	DNS     []string `json:"dns"`
	MTU     int      `json:"mtu"`
	// Address6 (CIDR) and Gateway6 are the IPv6 configuration; "" means no
	// IPv6.
	Address6 string `json:"address6,omitempty"`
	Gateway6 string `json:"gateway6,omitempty"`
}

// Equal reports whether n and o configure the same; nil means nothing.
func (n *Network) Equal(o *Network) bool {
	if n == nil || o == nil {
		return n == o
	}
	return n.Address == o.Address && n.Gateway == o.Gateway && n.MTU == o.MTU && n.Address6 == o.Address6 &&
		n.Gateway6 == o.Gateway6 && slices.Equal(n.DNS, o.DNS)
}

// Bootstrap is the content of /etc/agentlab/bootstrap.json.
type Bootstrap struct {
	Token      string `json:"token"`
	Controller string `json:"controller"`
	VMID       int    `json:"vmid"`
}

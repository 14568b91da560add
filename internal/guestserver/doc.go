// Package guestserver serves the guest plane: bootstrap, runner reports, logs,
// the repository bundle and artifact uploads. There is one listener for each
// sandbox; who calls is told by the channel (the VMID of the handler), and
// that it may is told by a bearer token. Every byte from a guest is hostile.
package guestserver

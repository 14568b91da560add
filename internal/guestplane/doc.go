// Package guestplane serves the guest plane: bootstrap, runner reports, logs,
// the repository bundle and artifact uploads. Each sandbox has its own
// listener, which identifies the caller (the VMID of the handler); a bearer
// token authorises the call. All data from a guest is untrusted.
package guestplane

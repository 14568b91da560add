// Package guestplane serves the guest plane: listeners, tokens, limits, and the
// registry of the services for guests, each of which is a package below this one. Each
// sandbox has its own listener, which identifies the caller (the VMID of the handler);
// a bearer token authorises the call. All data from a guest is untrusted.
package guestplane

// Package egress decides what a sandbox may reach. A policy is compiled from a
// profile's network section and decides, for one flow at a time, whether it is
// allowed and by which rule.
//
// It does no I/O, reads no clock and has no mutable state. Enforcers (package
// vnet for the userspace network, others for other backends) call it and apply
// its decisions. Some addresses are denied in every mode and cannot be allowed
// by any profile; AlwaysDenied is that list.
package egress

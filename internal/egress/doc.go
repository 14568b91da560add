// Package egress decides what a sandbox may reach: a policy is made from a
// profile's network section and answers, for one flow at a time, allow or
// deny and by which rule.
//
// It is pure: no I/O, no clock, no state that changes. Enforcers (package
// vnet for the userspace network, others for other backends) ask it and act.
// Some addresses are denied in every mode and cannot be allowed by any
// profile; AlwaysDenied is that list.
package egress

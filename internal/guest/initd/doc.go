// Package initd is the first process of a guest on backends that boot
// AgentLab's initrd. It finds the root disk, switches to it, starts a
// supervisor of the control server, and becomes the distribution's init. The
// control server answers long before the distribution has booted.
//
// Every millisecond here delays the start of every sandbox, and often runs
// emulated, so the package does as little as possible: no goroutines, and no
// processes except the two that keep running.
//
// The package exists for Linux, which all guests run.
package initd

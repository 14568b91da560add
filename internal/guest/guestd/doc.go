// Package guestd is the control server of a guest. It executes the requests of
// the controller on the control stream (package guestapi, "Guest control"). It
// runs as root, is started by initd before the distribution's init, and needs
// nothing of the distribution to answer.
//
// All secrets are below /run, which is memory.
//
// The package exists for Linux, which all guests run.
package guestd

// Package daemon is agentlabd: it wires store, driver, services, guest plane
// and control API together, and takes them down again. It decides nothing
// itself.
package daemon

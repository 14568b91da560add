// Package daemon is agentlabd: it connects store, driver, services, guest
// plane and control API, and shuts them down. It makes no decisions itself.
package daemon

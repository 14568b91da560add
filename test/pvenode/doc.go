// Package pvenode is a fake of a Proxmox VE node (or a small cluster of them)
// for tests: a model that follows the rules of a real node and returns its
// messages.
//
// Like the real node, the model rejects what it does not know: an unknown
// path, parameter or value is an error, never a success. Texts, status codes
// and loose JSON types are those of versions 8.4 and 9.2 (Config.Version).
//
// One model has several interfaces: the REST API over TLS (rest.go), and the
// command line tools. Both call Node.Invoke, which uses one table of calls
// (schema_*.go), so their answers cannot differ.
//
// Waits are those of a real node (3 seconds for a refused token, 10 for a
// lock, 30 until the proxy gives up) unless Config.Waits shortens them.
//
// Locks of this package: Node.mu guards the whole model and is held only
// while it is read or written, never while something is waited for. What a
// real node guards by lock files is guarded by flocks (lock.go), which are
// taken before Node.mu.
package pvenode

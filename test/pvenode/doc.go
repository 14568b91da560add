// Package pvenode is a fake of a Proxmox VE node (or a small cluster of them)
// for tests: a model that keeps the rules of the real one and answers in its
// words.
//
// What the model does not know it refuses, as the real node does: an unknown
// path, parameter or value is an error, never a success. Texts, status codes
// and loose JSON types are those of versions 8.4 and 9.2 (Config.Version).
//
// One model has several faces: the REST API over TLS (rest.go), and the
// command line tools. Both call Node.Invoke, which knows one table of calls
// (schema_*.go) and so cannot answer the same thing in two ways.
//
// Waits are those of a real node (3 seconds for a refused token, 10 for a
// lock, 30 until the proxy gives up) unless Config.Waits shortens them.
//
// Locks of this package: Node.mu guards the whole model and is held only
// while it is read or written, never while something is waited for. What a
// real node guards by lock files is guarded by flocks (lock.go), which are
// taken before Node.mu.
package pvenode

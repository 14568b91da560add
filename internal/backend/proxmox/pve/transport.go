// Package pve is a client for Proxmox VE with typed calls, over one of two
// transports.
//
// Both transports send a call of the API: a method, a path and parameters.
// REST sends it over TLS with a token; the shell transport runs pvesh on the
// node, which calls the same handlers as root. Only operations that the API
// does not have differ; they are in the interface Root.
//
// The calls are those of the API of versions 8.4 and 9. The API returns faults
// as text, almost always with status 500; a table in this package maps them to
// codes (faults.go).
package pve

import (
	"context"
	"encoding/json"
	"net/url"
)

// Method is a method of the API; pvesh uses other names (get, create, set,
// delete).
type Method string

// The methods.
const (
	Get    Method = "GET"
	Post   Method = "POST"
	Put    Method = "PUT"
	Delete Method = "DELETE"
)

// Transport performs calls of the API.
type Transport interface {
	// Call performs one call and returns the "data" of its answer. path
	// begins after /api2/json, and the caller escapes its segments; a
	// parameter with several values is a list. A call that starts a task
	// returns the UPID as a JSON string, even if the task has already ended
	// or failed. Over the shell transport, the data of a call that neither
	// starts a task nor reads must be ignored.
	//
	// Errors are *Fault if the node answered, otherwise *agentlab.Error with
	// code unavailable (nothing was sent), unknown_outcome (it may have been
	// executed) or denied.
	Call(ctx context.Context, method Method, path string, params url.Values) (json.RawMessage, error)

	// Calls returns how many calls were made since the transport was opened.
	Calls() int64

	// Ended returns the log of a task that one of the last calls started, if the
	// call is known to have waited for its end and the task succeeded without
	// warnings. Otherwise ok is false, and the node must be asked.
	Ended(task UPID) (log []string, ok bool)

	// Root returns the operations that only root on the node can do; nil
	// over REST.
	Root() Root

	Close() error
}

// Root has the operations for which the API has no call, or which it allows
// only to root@pam, which a token never is. The options affinity, hookscript
// and args may be set only over a transport with Root.
type Root interface {
	// Unlock removes the property lock of a configuration (qm unlock).
	Unlock(ctx context.Context, vmid int) error

	// WriteSnippet writes a file of the snippets storage, synced to disk and
	// readable only by root, and returns its volume ID. It succeeds if the
	// file exists with the same content; with other content the error has
	// agentlab.CodeExists.
	WriteSnippet(ctx context.Context, name string, content []byte) (volid string, err error)
	// RemoveSnippet removes a snippet; it succeeds if there is none.
	RemoveSnippet(ctx context.Context, name string) error
	// SnippetsStorage returns the storage of snippets.
	SnippetsStorage() string
	// Snippets lists the names of all files of the snippets storage.
	Snippets(ctx context.Context) ([]string, error)
}

// Fault is an error answer of the node.
type Fault struct {
	Status  int               // of HTTP; 0 over the shell transport
	Message string            // first line of the node's message
	Params  map[string]string // reasons of rejected parameters
}

// Error implements error.
func (f *Fault) Error() string { return f.Message }

// Package pve speaks with Proxmox VE: one client with typed calls, over one
// of two transports.
//
// Both transports carry the same thing, a call of the API: a method, a path
// and parameters. REST sends it over TLS with a token; the shell transport
// runs pvesh on the node, which calls the same handlers as root. Only what
// the API cannot do differs, and is in the interface Root.
//
// The calls are those of the node's API as versions 8.4 and 9 have it. Faults
// come as text there, almost always with status 500; they become codes in one
// table of this package (faults.go).
package pve

import (
	"context"
	"encoding/json"
	"net/url"
)

// Method is a method of the API; pvesh names them otherwise (get, create,
// set, delete).
type Method string

// The methods.
const (
	Get    Method = "GET"
	Post   Method = "POST"
	Put    Method = "PUT"
	Delete Method = "DELETE"
)

// Transport carries calls of the API.
type Transport interface {
	// Call performs one call and returns the "data" of its answer. path
	// begins after /api2/json, its segments are escaped by the caller; a
	// parameter with several values is a list. A call that begins a task
	// returns the UPID as a JSON string, also where the task has ended and
	// failed already. Over the shell transport the data of a call that begins
	// none and reads nothing may be anything: do not look at it.
	//
	// Errors are *Fault where the node answered, else *agentlab.Error with
	// code unavailable (nothing was sent), unknown_outcome (it may have been
	// carried out) or denied.
	Call(ctx context.Context, method Method, path string, params url.Values) (json.RawMessage, error)

	// Calls returns how many calls were made since the transport was opened.
	Calls() int64

	// Root returns what only root on the node can do; nil over REST.
	Root() Root

	Close() error
}

// Root is what the API has no call for, or allows to root@pam alone, which a
// token never is. The options affinity, hookscript and args may be set only
// over a transport that has it.
type Root interface {
	// Unlock removes the property lock of a configuration (qm unlock).
	Unlock(ctx context.Context, vmid int) error

	// WriteSnippet writes a file of the snippets storage, durably and readable
	// by root alone, and returns its volume id. A file of that name with the
	// same content is a success, with other content agentlab.CodeExists.
	WriteSnippet(ctx context.Context, name string, content []byte) (volid string, err error)
	// RemoveSnippet removes one; one that is not there is a success.
	RemoveSnippet(ctx context.Context, name string) error
	// SnippetsStorage is the storage that snippets are on.
	SnippetsStorage() string
	// Snippets lists the names of all files of the snippets storage.
	Snippets(ctx context.Context) ([]string, error)
}

// Fault is an answer of the node that is no success.
type Fault struct {
	Status  int               // of HTTP; 0 over the shell transport
	Message string            // first line of what the node said
	Params  map[string]string // what is wrong with which parameter
}

// Error implements error.
func (f *Fault) Error() string { return f.Message }

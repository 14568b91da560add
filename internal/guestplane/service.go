package guestplane

import (
	"net/http"
	"time"

	"github.com/agentlab-vm/agentlab"
)

// Service is a service for guests. The plane applies what its fields say to each call:
// the channel of the sandbox, the token, and the limits. A call reaches Serve only
// after these checks.
type Service struct {
	Name   string
	Routes []Route
	// Protocol serves requests of programs that speak other protocols. Nil: there are none.
	Protocol *Protocol
	// Lane has limits for all calls of the service, in place of the limits that the
	// other calls of a sandbox share, so that its calls do not take their places. The
	// zero value means that the service shares them.
	Lane Limits
}

// Route is a call of a service. Every column but Limits is required: a route without
// a token denies all calls, and a route without a maximum body reads none.
type Route struct {
	Method, Path string
	Token        Token
	Body         int64 // maximum size of the body in bytes; AnyBody: Serve limits it
	Limits       Limits
	// Serve returns the answer: nil for none (status 204), a *Stream, or a value that
	// is sent as JSON. Its error is sent as JSON, with the status of its code; a
	// *Refused has its own status.
	Serve func(c *Call) (answer any, err error)
}

// AnyBody is the maximum body of a route that limits its body itself.
const AnyBody = -1

// Protocol serves the requests of programs that speak another protocol, such as
// package managers. The channel alone identifies the sandbox, and bodies are not read.
type Protocol struct {
	// Match reports whether a request belongs to the service. It is called before the
	// routes of all services are searched.
	Match func(r *http.Request) bool
	Serve func(c *Call, w http.ResponseWriter)
}

// Limits are limits of the calls of one sandbox. Zero means that there is no limit.
type Limits struct {
	Rate     float64 // calls per second, including refused calls
	Burst    int     // calls at once; at most the calls that Rate permits in forgetAfter
	Parallel int     // calls at the same time
	Wait     bool    // further calls wait for Parallel; otherwise they are refused
}

// Token is what a call must prove, in addition to using the sandbox's own listener.
// The zero value cannot be proven.
type Token int

const (
	// Channel is no token: the listener alone identifies the sandbox, or Serve checks
	// a token in the body.
	Channel Token = iota + 1
	// Runner is the runner's grant, for calls that an ended job may still make.
	Runner
	// RunnerAtWork is the runner's grant, for a job that has not ended.
	RunnerAtWork
	// UploaderAtWork is the upload grant, for a job that has not ended.
	UploaderAtWork
	// Messenger is the grant for messages, with or without a job.
	Messenger
)

// grant returns the kind of the grant of a token, and whether its job must not have
// ended.
func (t Token) grant() (kind string, atWork bool) {
	switch t {
	case Runner:
		return agentlab.GrantRunner, false
	case RunnerAtWork:
		return agentlab.GrantRunner, true
	case UploaderAtWork:
		return agentlab.GrantUpload, true
	case Messenger:
		return agentlab.GrantMessages, false
	}
	return "", false
}

// entry is a call with the limits that apply to it. The shared lane of all services
// is one *Limits, so its address identifies it.
type entry struct {
	lane *Limits
	Route
}

// Add registers services. It must be called before guests are served, and panics for
// routes that overlap and for a rate that a forgotten guest would escape.
func (s *Plane) Add(services ...Service) {
	for _, one := range services {
		lane := &s.shared
		if one.Lane != (Limits{}) {
			lane = &one.Lane
		}
		lane.check(one.Name)
		if one.Protocol != nil {
			s.protocols = append(s.protocols, protocol{*one.Protocol, entry{lane: lane}})
		}
		for _, r := range one.Routes {
			e := &entry{lane, r}
			e.Limits.check(one.Name)
			s.mux.HandleFunc(r.Method+" "+r.Path, s.handler(e))
		}
	}
}

// protocol is a registered Protocol.
type protocol struct {
	Protocol
	entry
}

func (l Limits) check(service string) {
	if float64(l.Burst) > l.Rate*forgetAfter.Seconds() {
		panic("the limit of the service " + service + " has not recovered when its guest is forgotten, after " + forgetAfter.String())
	}
}

// forgetAfter is how long after its last connection the state of a guest is
// deleted. All its rate limits have recovered then, so a new state is the same; the
// limit of its lines in the log may need longer.
const forgetAfter = 15 * time.Second

package guestapi

// Guest control, TCP ports of the guest.
const (
	PathListeners = "/v1/listeners" // POST ListenersRequest → Listeners
	PathDial      = "/v1/dial"      // POST DialRequest with Upgrade: TCPProtocol → 101, then the bytes of a TCP connection

	// TCPProtocol is the token of the HTTP Upgrade of PathDial.
	TCPProtocol = "agentlab-tcp"
)

// Limits of PathListeners.
const (
	MaxListeners        = 64 // in one answer; those with the lowest ports
	MaxListenersSeconds = 55 // that an answer may take
)

// ListenersRequest asks for the TCP ports on which processes of the guest listen.
type ListenersRequest struct {
	// State is that of an earlier answer. While it is still the current one, the guest
	// answers only after Seconds (0 to MaxListenersSeconds).
	State   string `json:"state,omitempty"`
	Seconds int    `json:"seconds,omitempty"`
}

// Listeners are the TCP ports on which processes of the guest listen, in ascending
// order, without those of its SSH server, its resolver and guest control.
type Listeners struct {
	State     string     `json:"state"` // differs if another set of sockets listens
	Listeners []Listener `json:"listeners"`
}

// Listener is a port on which a process listens.
type Listener struct {
	Port uint16 `json:"port"`
	// Local means that the port is bound to no address on which the network of the
	// guest reaches it: PathDial does.
	Local   bool   `json:"local,omitempty"`
	Program string `json:"program,omitempty"` // name of the process
	// Worktree is the directory of the Git worktree in which the process runs,
	// relative to WorktreesDir of the repository; "" if it runs anywhere else.
	Worktree string `json:"worktree,omitempty"`
}

// DialRequest opens a TCP connection to a port of the guest itself, at 127.0.0.1 or
// else ::1. Code unavailable means that nothing listens there.
type DialRequest struct {
	Port uint16 `json:"port"`
}

package backend

import "net"

// PassiveListener is implemented by a listener of ListenGuest that can call a
// function for each connection. No goroutine then waits for a guest that is silent,
// which matters with thousands of sandboxes.
type PassiveListener interface {
	net.Listener

	// Handle makes the listener call accept, which does not block, with each
	// connection, those that wait already included; Accept then returns none.
	// If the listener ends without a Close, it calls ended once, in a goroutine of
	// its own. Handle is called once.
	Handle(accept func(net.Conn), ended func(error))
}

// Package link multiplexes many byte streams over the one byte stream between
// the controller and a guest (a virtio-serial port), and survives that either
// end is restarted at any byte, which such a port does not tell.
//
// Streams are those of yamux; the host opens, the guest accepts. Below yamux
// lies a thin layer that makes the start of a session recognisable anywhere:
// the byte ESC (0xC1) never travels as data. Data that holds it is escaped as
// ESC 0x00; ESC followed by a letter begins a record of fixed length:
//
//	ESC 'S' <32 hex digits>   SYNC, host to guest: a new session begins after it
//	ESC 'A' <32 hex digits>   ACK, guest to host: so does the guest's side of it
//	ESC 'R'                   RESET, guest to host: the guest has no session
//
// The host repeats SYNC with one nonce until that nonce is acknowledged, and
// drops all that comes before; the guest answers each SYNC and starts anew
// when the nonce is another. So whatever a dead predecessor left in the pipe,
// half a frame or half a record, is skipped, and both ends agree again after
// one round trip.
//
// The host trusts nothing: what the guest sends is checked frame by frame
// before yamux sees it (see guard), so that a hostile guest can at worst end
// its own link; the memory it can make the host hold is bounded by
// maxStreams windows of 256 KiB.
//
// Where a guest has an address instead of such a port, each stream is a TCP
// connection of its own, with TLS of keys that both sides know (DialTLS,
// ListenTLS), and none of the above is needed.
package link

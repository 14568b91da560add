// Package link multiplexes byte streams over the single byte stream between
// the controller and a guest (a virtio-serial port). Either end may restart at
// any byte, which such a port does not report.
//
// Streams are those of yamux; the host opens, the guest accepts. A thin layer
// below yamux makes the start of a session recognisable at any position: the
// byte ESC (0xC1) is never sent as data. It is escaped as ESC 0x00; ESC
// followed by a letter begins a record of fixed length:
//
//	ESC 'S' <32 hex digits>   SYNC, host to guest: a new session begins after it
//	ESC 'A' <32 hex digits>   ACK, guest to host: so does the guest's side of it
//	ESC 'R'                   RESET, guest to host: the guest has no session
//
// The host repeats SYNC with one nonce until that nonce is acknowledged, and
// drops all data before. The guest answers each SYNC and starts a new session
// if the nonce has changed. So the rest of an earlier process's data in the
// pipe, such as an incomplete frame or record, is skipped, and both ends are
// synchronised after one round trip.
//
// The host does not trust the guest: each frame from the guest is checked
// before it reaches yamux (see guard), so that a hostile guest can at worst
// end its own link. The memory that it can use on the host is limited to
// maxStreams windows of 256 KiB.
//
// If a guest has an address instead of such a port, each stream is a separate
// TCP connection with TLS (DialTLS, ListenTLS), and none of the above is
// needed.
package link

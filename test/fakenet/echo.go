package fakenet

import (
	"io"
	"net"
)

// Echo serves TCP and UDP port 7 of a host, and its ICMP: what comes in goes
// back. The TCP service closes its side when the peer has closed its own.
func (n *Net) Echo(name string) {
	n.HandleTCP(name, 7, func(c net.Conn) { _, _ = io.Copy(c, c) })
	at := n.HandleUDP(name, 7, echoPackets)
	n.mu.Lock()
	defer n.mu.Unlock()
	n.pings[at.Addr()] = true
}

func echoPackets(c net.Conn) {
	buf := make([]byte, 64<<10)
	for {
		size, err := c.Read(buf)
		if err != nil {
			return
		}
		_, _ = c.Write(buf[:size])
	}
}

// Discard serves TCP port 9 of a host: what comes in is thrown away, and when
// the peer has closed its side the count of bytes is sent, as eight bytes in
// big-endian order.
func (n *Net) Discard(name string) {
	n.HandleTCP(name, 9, func(c net.Conn) {
		count, _ := io.Copy(io.Discard, c)
		var out [8]byte
		for i := range out {
			out[i] = byte(count >> (56 - 8*i))
		}
		_, _ = c.Write(out[:])
	})
}

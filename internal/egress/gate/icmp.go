package gate

import (
	"encoding/binary"
	"net"
)

const (
	icmpHeader   = 8
	echoRequest4 = 8
	echoRequest6 = 128
	echoReply4   = 0
	echoReply6   = 129
)

// icmpConn adds headers to the data of echo requests. The kernel sets
// identifier and checksum, and returns only replies to this socket.
type icmpConn struct {
	net.Conn
	ipv6 bool
	seq  uint16
}

// Write sends one echo request.
func (c *icmpConn) Write(p []byte) (int, error) {
	b := make([]byte, icmpHeader, icmpHeader+len(p))
	b[0] = echoRequest4
	if c.ipv6 {
		b[0] = echoRequest6
	}
	c.seq++
	binary.BigEndian.PutUint16(b[6:], c.seq)
	n, err := c.Conn.Write(append(b, p...))
	return max(n-icmpHeader, 0), err
}

// Read reads the data of one echo reply.
func (c *icmpConn) Read(p []byte) (int, error) {
	b := make([]byte, icmpHeader+len(p))
	for {
		n, err := c.Conn.Read(b)
		if err != nil {
			return 0, err
		}
		if n >= icmpHeader && (b[0] == echoReply4 && !c.ipv6 || b[0] == echoReply6 && c.ipv6) {
			return copy(p, b[icmpHeader:n]), nil
		}
	}
}

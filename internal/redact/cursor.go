package redact

import "bytes"

// A value may be matched loosely: gaps of white space and colons between its
// bytes are allowed, as inserted by base64, fold and hexadecimal dumps.
//
// The first looseLead bytes of a loose match are passed on. Otherwise the last
// letter of almost every line would be held back with its line end, because
// some encoding of a value begins with it.
const (
	looseLead  = 3
	maxGap     = 16  // bytes of one gap
	loosePiece = 256 // longest piece of a pattern, without its gaps
	minLoose   = 16  // shortest pattern, so that ordinary words do not match
)

func isGap(b byte) bool { return b == '\n' || b == '\r' || b == ' ' || b == '\t' || b == ':' }

// cursor processes a stream byte by byte.
type cursor struct {
	r     *Redactor
	exact int32 // states of the two matchers
	loose int32
	n     int             // bytes seen
	gap   int             // length of the gap that the last byte is in
	sig   int             // processed bytes outside of gaps
	at    [loosePiece]int // positions of the last of them in the stream
}

// next processes one byte and returns how many bytes up to and including it
// are secret. All of them were held before.
func (c *cursor) next(b byte) (secret int) {
	c.n++
	c.exact = c.r.exact.step(c.exact, b)
	secret = int(c.r.exact.nodes[c.exact].match)
	if isGap(b) {
		if c.gap++; c.gap > maxGap {
			c.loose = 0
		}
		return secret
	}
	c.gap = 0
	c.at[c.sig%loosePiece] = c.n - 1
	c.sig++
	c.loose = c.r.loose.step(c.loose, b)
	return max(secret, c.raw(c.r.loose.nodes[c.loose].match))
}

// raw returns the length of the last n bytes outside of gaps, without the
// lead, including the gaps between them and after them.
func (c *cursor) raw(n int16) int {
	if n <= looseLead {
		return 0
	}
	return c.n - c.at[(c.sig-int(n)+looseLead)%loosePiece]
}

// lead calls fn with the positions in the stream at which the lead of a loose match of
// the last n bytes outside of gaps begins and ends, if n is not 0.
func (c *cursor) lead(n int16, fn func(begin, end int)) {
	if n == 0 {
		return
	}
	end := c.n
	if n > looseLead {
		end = c.at[(c.sig-int(n)+looseLead)%loosePiece]
	}
	fn(c.at[(c.sig-int(n))%loosePiece], end)
}

// hold returns how many of the last bytes may be the beginning of a secret.
func (c *cursor) hold() int {
	return max(int(c.r.exact.nodes[c.exact].hold), c.raw(c.r.loose.nodes[c.loose].hold))
}

// part returns how many bytes at the end of p, which ends with the last
// processed byte, count as the beginning of a secret if nothing follows.
func (c *cursor) part(p []byte) int {
	out := 0
	if n := c.r.exact.nodes[c.exact].hold; n >= minPart {
		out = int(n)
	}
	if n := c.r.loose.nodes[c.loose].hold; n >= minPart {
		out = max(out, c.raw(n))
	}
	out = min(out, len(p))
	begun := p[len(p)-out:]
	if bytes.HasPrefix(begun, []byte("-----")) && !bytes.Contains(begun, []byte("\n")) {
		return 0 // the border of a PEM block is not secret
	}
	return out
}

// idle reports whether no match has started.
func (c *cursor) idle() bool { return c.exact == 0 && c.loose == 0 }

// skip returns how many bytes at the start of p are not the beginning of a
// secret.
func (r *Redactor) skip(p []byte) int {
	for i, b := range p {
		if r.start[b] {
			return i
		}
	}
	return len(p)
}

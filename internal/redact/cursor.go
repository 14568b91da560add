package redact

import "bytes"

// A value may be looked for loosely: between its bytes there may be gaps of
// white space and colons, as base64, fold and hexadecimal dumps put them.
//
// The first looseLead bytes of what is found so are passed on: else the last
// letter of nearly every line would be held back with its line end, because
// some encoding of some value begins with it.
const (
	looseLead  = 3
	maxGap     = 16  // bytes of one gap
	loosePiece = 256 // longest piece of a pattern, without its gaps
	minLoose   = 16  // shortest pattern, so that ordinary words make none
)

func isGap(b byte) bool { return b == '\n' || b == '\r' || b == ' ' || b == '\t' || b == ':' }

// cursor follows a stream byte by byte.
type cursor struct {
	r     *Redactor
	exact int32 // states of the two matchers
	loose int32
	n     int             // bytes seen
	gap   int             // length of the gap that the last byte is in
	sig   int             // bytes seen that are in no gap
	at    [loosePiece]int // where the last of them are in the stream
}

// next takes one byte and tells how many bytes, it being the last of them, are
// secret. All of them were held before.
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

// raw is how many bytes the last n bytes that are in no gap, but for the lead,
// take with the gaps between them and after them.
func (c *cursor) raw(n int16) int {
	if n <= looseLead {
		return 0
	}
	return c.n - c.at[(c.sig-int(n)+looseLead)%loosePiece]
}

// hold is how many of the last bytes may be the beginning of a secret.
func (c *cursor) hold() int {
	return max(int(c.r.exact.nodes[c.exact].hold), c.raw(c.r.loose.nodes[c.loose].hold))
}

// part is how many of the bytes at the end of p, which ends with the last byte
// seen, are to be taken for the beginning of a secret when nothing follows.
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
		return 0 // the border of a PEM block tells nothing
	}
	return out
}

// idle tells whether nothing has begun.
func (c *cursor) idle() bool { return c.exact == 0 && c.loose == 0 }

// skip returns how many bytes at the start of p begin no secret.
func (r *Redactor) skip(p []byte) int {
	for i, b := range p {
		if r.start[b] {
			return i
		}
	}
	return len(p)
}

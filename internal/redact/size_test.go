package redact

import (
	"encoding/base64"
	"encoding/hex"
	"math/rand/v2"
	"strings"
	"testing"
)

// bigValue is a value of n bytes in lines of 64, as keys have them.
func bigValue(n int) string {
	const alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
	r := rand.New(rand.NewPCG(1, 2))
	var b strings.Builder
	for i := range n {
		if i%65 == 64 {
			b.WriteByte('\n')
		} else {
			b.WriteByte(alphabet[r.IntN(len(alphabet))])
		}
	}
	return b.String()
}

// A long value costs a bounded amount of memory and is found in its usual
// encodings, in one line or in many.
func TestLongValues(t *testing.T) {
	many := bigValue(32 << 10)
	for name, v := range map[string]string{"many lines": many, "one line": strings.ReplaceAll(many, "\n", "")} {
		r := New(v)
		if n := len(r.exact.nodes) + len(r.loose.nodes); n > 24*len(v) {
			t.Errorf("%s: %d nodes for %d bytes", name, n, len(v))
		}
		b64 := base64.StdEncoding.EncodeToString([]byte("x" + v))
		for how, text := range map[string]string{
			"plain": v, "base64": b64, "wrapped": wrapped(b64, 76), "hex": hex.EncodeToString([]byte(v)), "JSON": jsonPlain(v), "CRLF": strings.ReplaceAll(v, "\n", "\r\n"),
		} {
			left := strings.ReplaceAll(r.String(text), Replacement, "")
			// What joins two lines is no part of either.
			if lines := strings.Count(v, "\n") + 1; len(left) > 10*lines+20 {
				t.Errorf("%s as %s: %d bytes of %d are left: %.200q", name, how, len(left), len(text), left)
			}
		}
	}
}

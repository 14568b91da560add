package verify

import (
	"testing"
	"unicode"
)

// Whatever a guest writes as results, nothing in them drives a terminal or is
// long.
func FuzzResults(f *testing.F) {
	f.Add([]byte(`{"id":"lan-10","reached":true,"answer":"\u001b[2J","addrs":["10.0.0.1"]}` + "\n"))
	f.Add([]byte(`{"id":"a"}{"id":"b","error":"refused"}`))
	f.Fuzz(func(t *testing.T, in []byte) {
		list, err := results(in)
		if err != nil {
			return
		}
		for _, r := range list {
			for _, s := range append(r.Addrs, r.Answer, r.Error) {
				if len(s) > maxText+len("…") {
					t.Fatalf("a text of %d bytes", len(s))
				}
				for _, c := range s {
					if !unicode.IsPrint(c) {
						t.Fatalf("%q is not printable", s)
					}
				}
			}
		}
	})
}

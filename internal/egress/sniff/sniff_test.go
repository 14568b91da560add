package sniff_test

import (
	"bytes"
	"crypto/tls"
	"encoding/binary"
	"net"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/internal/egress/sniff"
)

// hello is what Go's TLS client really sends for a server name.
func hello(t testing.TB, name string) []byte {
	t.Helper()
	ours, theirs := net.Pipe()
	defer func() { _ = ours.Close() }()
	go func() {
		_ = tls.Client(theirs, &tls.Config{ServerName: name, InsecureSkipVerify: true}).Handshake()
		_ = theirs.Close()
	}()
	var b []byte
	buf := make([]byte, 4096)
	for {
		n, err := ours.Read(buf)
		b = append(b, buf[:n]...)
		if _, _, more := sniff.Name(b); !more || err != nil {
			return b
		}
	}
}

// records spreads the handshake message in record over records of size bytes.
func records(record []byte, size int) []byte {
	var out []byte
	for body := record[5:]; len(body) > 0; {
		n := min(size, len(body))
		out = append(out, record[:3]...)
		out = binary.BigEndian.AppendUint16(out, uint16(n))
		out = append(out, body[:n]...)
		body = body[n:]
	}
	return out
}

func TestClientHello(t *testing.T) {
	t.Parallel()
	h := hello(t, "API.Example.com")
	for what, b := range map[string][]byte{
		"whole": h, "with data behind it": append(bytes.Clone(h), "more"...),
		"in records of one byte": records(h, 1), "in records of 100": records(h, 100),
	} {
		if name, kind, more := sniff.Name(b); name != "api.example.com." || kind != sniff.TLS || more {
			t.Errorf("%s: %q %v %v", what, name, kind, more)
		}
	}
	for i := range len(h) - 1 {
		if name, _, more := sniff.Name(h[:i]); name != "" || !more {
			t.Fatalf("after %d bytes: %q, more %v", i, name, more)
		}
	}
	// An address is no name; Go sends none for it.
	if name, kind, _ := sniff.Name(hello(t, "192.0.2.1")); name != "" || kind != sniff.TLS {
		t.Errorf("an address: %q %v", name, kind)
	}
}

func TestHostileHello(t *testing.T) {
	t.Parallel()
	h := hello(t, "allowed.example")
	change := func(f func(b []byte) []byte) []byte { return f(bytes.Clone(h)) }
	sni := bytes.Index(h, []byte("allowed.example"))
	for what, b := range map[string][]byte{
		"another message":          change(func(b []byte) []byte { b[5] = 2; return b }),
		"a record of another type": append(records(h, 100)[:105], 23, 3, 1, 0, 1, 0),
		"an empty record":          {22, 3, 1, 0, 0},
		"a huge record":            {22, 3, 1, 0xff, 0xff},
		"a huge message":           append([]byte{22, 3, 1, 0, 4, 1, 1, 0, 0}, make([]byte, 8)...),
		"a zero byte in the name":  change(func(b []byte) []byte { b[sni+3] = 0; return b }),
		"a space in the name":      change(func(b []byte) []byte { b[sni+3] = ' '; return b }),
		"an empty label":           change(func(b []byte) []byte { b[sni+3] = '.'; b[sni+4] = '.'; return b }),
		"a name of another type":   change(func(b []byte) []byte { b[sni-3] = 1; return b }),
		"a list too long":          change(func(b []byte) []byte { b[sni-4]++; return b }),
		"an extension too long":    change(func(b []byte) []byte { b[sni-6]++; return b }),
	} {
		if name, kind, more := sniff.Name(b); name != "" || kind != sniff.Invalid || more {
			t.Errorf("%s: %q %v %v", what, name, kind, more)
		}
	}
}

func TestRequest(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		in   string
		name string
		kind sniff.Kind
	}{
		{"GET / HTTP/1.1\r\nHost: Example.com\r\n\r\n", "example.com.", sniff.HTTP},
		{"GET / HTTP/1.1\r\nA: b\r\nhOsT:example.com:8080\r\n\r\nHost: evil.example", "example.com.", sniff.HTTP},
		{"POST /x HTTP/1.0\nHost: example.com.\n\nbody", "example.com.", sniff.HTTP},
		{"GET / HTTP/1.0\r\n\r\n", "", sniff.HTTP},
		{"GET / HTTP/1.1\r\nHost:\r\n\r\n", "", sniff.HTTP},
		{"GET / HTTP/1.1\r\nHost: 192.0.2.1:80\r\n\r\n", "", sniff.HTTP},
		{"GET / HTTP/1.1\r\nHost: [2001:db8::1]:80\r\n\r\n", "", sniff.HTTP},
		{"GET http://example.com:80/x HTTP/1.1\r\nHost: example.com\r\n\r\n", "example.com.", sniff.HTTP},
		{"CONNECT example.com:443 HTTP/1.1\r\n\r\n", "example.com.", sniff.HTTP},
		{"GET /?u=http://evil.example/ HTTP/1.1\r\nHost: example.com\r\n\r\n", "example.com.", sniff.HTTP},

		{"GET http://evil.example/ HTTP/1.1\r\nHost: example.com\r\n\r\n", "", sniff.Invalid},
		{"GET http://example.com@evil.example/ HTTP/1.1\r\nHost: example.com\r\n\r\n", "", sniff.Invalid},
		{"GET http:///x HTTP/1.1\r\nHost: example.com\r\n\r\n", "", sniff.Invalid},
		{"CONNECT evil.example:443 HTTP/1.1\r\nHost: example.com\r\n\r\n", "", sniff.Invalid},
		{"GET / HTTP/1.1\r\nHost: example.com\r\nHost: evil.example\r\n\r\n", "", sniff.Invalid},
		{"GET / HTTP/1.1\r\nHost: example.com\r\nHost: example.com\r\n\r\n", "", sniff.Invalid},
		{"GET / HTTP/1.1\r\nHost : evil.example\r\nHost: example.com\r\n\r\n", "", sniff.Invalid},
		{"GET / HTTP/1.1\r\nHost: example.com\r\n evil.example\r\n\r\n", "", sniff.Invalid},
		{"GET / HTTP/1.1\r\nHost\v: evil.example\r\nHost: example.com\r\n\r\n", "", sniff.Invalid},
		{"GET / HTTP/1.1\r\n\fHost: evil.example\r\nHost: example.com\r\n\r\n", "", sniff.Invalid},
		{"GET / HTTP/1.1\r\nA: b\rHost: evil.example\r\nHost: example.com\r\n\r\n", "", sniff.Invalid},
		{"GET / HTTP/1.1\r\nHost: example.com\x00.evil.example\r\n\r\n", "", sniff.Invalid},
		{"GET / HTTP/1.1\r\nHost: example.com, evil.example\r\n\r\n", "", sniff.Invalid},
		{"GET / HTTP/1.1\r\nHost: example.com:443:80\r\n\r\n", "", sniff.Invalid},
		{"GET / HTTP/1.1\r\nHost: exämple.com\r\n\r\n", "", sniff.Invalid},
		{"GET / HTTP/1.1\r\nno colon\r\n\r\n", "", sniff.Invalid},
		{"GET / HTTP/1.1\r\nA: " + strings.Repeat("x", sniff.Max) + "\r\nHost: example.com\r\n\r\n", "", sniff.Invalid},

		{"SSH-2.0-OpenSSH_9\r\n", "", sniff.Other},
		{"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "", sniff.Other},
		{"GET /\r\n\r\n", "", sniff.Other},
		{"HELO example.com\r\n\r\n", "", sniff.Other},
		{strings.Repeat("A", 100), "", sniff.Other},
		{"\x80\x2e\x01\x03\x01", "", sniff.Other},
	} {
		name, kind, more := sniff.Name([]byte(c.in))
		if name != c.name || kind != c.kind || more {
			t.Errorf("%.80q: %q %v %v, want %q %v", c.in, name, kind, more, c.name, c.kind)
		}
		for i := range min(len(c.in), 300) {
			if early, k, more := sniff.Name([]byte(c.in[:i])); !more && (early != c.name || k != c.kind) {
				t.Errorf("%.80q: after %d bytes %q %v, in the end %q %v", c.in, i, early, k, name, kind)
			}
		}
	}
}

// FuzzName: no input breaks the parser, an answer never changes when more
// bytes come, and a name is always canonical.
func FuzzName(f *testing.F) {
	f.Add(hello(f, "example.com"), 10)
	f.Add(records(hello(f, "example.com"), 7), 100)
	f.Add([]byte("GET / HTTP/1.1\r\nHost: example.com\r\n\r\n"), 20)
	f.Add([]byte("GET http://a.b/ HTTP/1.1\nHost: a.b:80\n\n"), 5)
	f.Fuzz(func(t *testing.T, b []byte, cut int) {
		name, kind, more := sniff.Name(b)
		if name != "" && (kind != sniff.TLS && kind != sniff.HTTP || more || name != strings.ToLower(name) ||
			!strings.HasSuffix(name, ".") || strings.ContainsAny(name, " \x00\r\n/:@") || len(name) > 254) {
			t.Fatalf("%q %v %v", name, kind, more)
		}
		if more && len(b) >= sniff.Max {
			t.Fatal("it never has enough")
		}
		if cut < 0 || cut > len(b) {
			return
		}
		if early, k, m := sniff.Name(b[:cut]); !m && (early != name || k != kind || more) {
			t.Fatalf("after %d bytes %q %v, in the end %q %v %v", cut, early, k, name, kind, more)
		}
	})
}

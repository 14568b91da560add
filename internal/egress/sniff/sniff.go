// Package sniff reads the host name in the first bytes of a TCP stream: the
// server name of a TLS ClientHello (RFC 6066 §3) or the Host of an HTTP/1
// request (RFC 9112 §3.2). It does no I/O.
//
// The sender is an untrusted guest, and the name decides whether its flow is
// allowed. So if a server might parse the bytes differently, the result is
// Invalid.
package sniff

import (
	"net/netip"
	"strings"
)

// Kind is the protocol of the first bytes of a stream.
type Kind int

// The kinds.
const (
	Other   Kind = iota // neither TLS nor HTTP/1
	TLS                 // a complete ClientHello
	HTTP                // the complete head of an HTTP/1 request
	Invalid             // begins as one of them, and is malformed, ambiguous or too long
)

// String implements fmt.Stringer.
func (k Kind) String() string {
	switch k {
	case TLS:
		return "tls"
	case HTTP:
		return "http"
	case Invalid:
		return "invalid"
	case Other:
	}
	return "other"
}

// Max is the maximum size of the prefix that Name needs, in bytes. A
// ClientHello with post-quantum key shares has about 2 KiB, a request with
// many cookies 8.
const Max = 32 << 10

// Name reads the prefix b of a stream. If more is true, it needs a longer
// prefix. name is canonical, in lower case with a final dot; "" if the stream
// has no host name or an IP address.
func Name(b []byte) (name string, kind Kind, more bool) {
	if len(b) == 0 {
		return "", Other, true
	}
	whole := len(b) < Max
	b = b[:min(len(b), Max)]
	switch {
	case b[0] == recordHandshake:
		name, kind, more = clientHello(b)
	case isUpper(b[0]):
		name, kind, more = request(b)
	default:
		return "", Other, false
	}
	if more && !whole {
		return "", Invalid, false
	}
	return name, kind, more
}

// canonical checks a host of TLS or HTTP and returns it in lower case with a
// final dot. It returns "" and true for an IP address.
func canonical(host string) (string, bool) {
	host = strings.TrimSuffix(host, ".")
	if a, err := netip.ParseAddr(strings.Trim(host, "[]")); err == nil && a.Zone() == "" {
		return "", true
	}
	if host == "" || len(host) > 253 {
		return "", false
	}
	for label := range strings.SplitSeq(host, ".") {
		if label == "" || len(label) > 63 {
			return "", false
		}
		for _, c := range []byte(label) {
			if !isUpper(c) && (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' && c != '_' {
				return "", false
			}
		}
	}
	return strings.ToLower(host) + ".", true
}

func isUpper(c byte) bool { return c >= 'A' && c <= 'Z' }

package sniff

import "golang.org/x/crypto/cryptobyte"

// Numbers of RFC 8446 and RFC 6066.
const (
	recordHandshake     = 22
	recordHeader        = 5
	maxRecord           = 1 << 14
	messageClientHello  = 1
	extensionServerName = 0
	nameTypeHost        = 0
)

// clientHello returns the server name of the ClientHello at the start of b,
// which may be split over several records.
func clientHello(b []byte) (name string, kind Kind, more bool) {
	hello, more, ok := firstMessage(b)
	if !ok {
		return "", Invalid, false
	}
	if more {
		return "", Other, true
	}
	name, ok = serverName(hello)
	if !ok {
		return "", Invalid, false
	}
	return name, TLS, false
}

// firstMessage reassembles the first handshake message; the rest of the stream
// is ignored. Like a server, it waits for all parts of the message.
func firstMessage(b []byte) (body []byte, more, ok bool) {
	const messageHeader = 4
	var message []byte
	for {
		if len(message) >= messageHeader {
			size := messageHeader + int(message[1])<<16 + int(message[2])<<8 + int(message[3])
			switch {
			case message[0] != messageClientHello || size > Max:
				return nil, false, false
			case len(message) >= size:
				return message[messageHeader:size], false, true
			}
		}
		if len(b) < recordHeader {
			return nil, true, len(b) == 0 || b[0] == recordHandshake
		}
		size := int(b[3])<<8 | int(b[4])
		if b[0] != recordHandshake || b[1] != 3 || size == 0 || size > maxRecord {
			return nil, false, false
		}
		b = b[recordHeader:]
		n := min(size, len(b))
		message = append(message, b[:n]...)
		b = b[n:]
	}
}

// serverName parses a ClientHello's body (RFC 8446 §4.1.2). The name is "" if
// it has none.
func serverName(hello []byte) (name string, ok bool) {
	s := cryptobyte.String(hello)
	var version uint16
	var random, session, suites, compressions, extensions cryptobyte.String
	if !s.ReadUint16(&version) || version>>8 != 3 || !s.ReadBytes((*[]byte)(&random), 32) ||
		!s.ReadUint8LengthPrefixed(&session) || !s.ReadUint16LengthPrefixed(&suites) || !s.ReadUint8LengthPrefixed(&compressions) {
		return "", false
	}
	if s.Empty() { // before TLS 1.2 there need be no extensions
		return "", true
	}
	if !s.ReadUint16LengthPrefixed(&extensions) || !s.Empty() {
		return "", false
	}
	seen := false
	for !extensions.Empty() {
		var kind uint16
		var body cryptobyte.String
		if !extensions.ReadUint16(&kind) || !extensions.ReadUint16LengthPrefixed(&body) {
			return "", false
		}
		if kind != extensionServerName {
			continue
		}
		if seen {
			return "", false
		}
		seen = true
		if name, ok = hostName(body); !ok {
			return "", false
		}
	}
	return name, true
}

// hostName parses the server_name extension, whose list has exactly one name
// by RFC 6066. If there are several, servers differ in which one they use.
func hostName(body cryptobyte.String) (string, bool) {
	var list, host cryptobyte.String
	var kind uint8
	if !body.ReadUint16LengthPrefixed(&list) || !body.Empty() ||
		!list.ReadUint8(&kind) || kind != nameTypeHost || !list.ReadUint16LengthPrefixed(&host) || !list.Empty() {
		return "", false
	}
	return canonical(string(host))
}

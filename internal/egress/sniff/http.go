package sniff

import (
	"bytes"
	"net/netip"
	"strings"
)

// maxMethod is longer than every registered HTTP method.
const maxMethod = 24

// request returns the host in the head of an HTTP/1 request.
func request(b []byte) (name string, kind Kind, more bool) {
	method, more, ok := methodOf(b)
	switch {
	case !ok:
		return "", Other, false
	case more:
		return "", Other, true
	}
	head, ended := headOf(b)
	line, rest, whole := bytes.Cut(head, []byte{'\n'})
	if !whole && !ended {
		return "", Other, true
	}
	target, ok := targetOf(string(trimCR(line)), method)
	switch {
	case !ok:
		return "", Other, false // it is not a request
	case !ended:
		return "", Other, true
	}
	host, ok := hostOf(rest)
	if !ok {
		return "", Invalid, false
	}
	// A target with a host takes precedence over the Host header (RFC 9112
	// §3.2.2), but not for every server.
	if target != "" {
		named, ok := withoutPort(target)
		if !ok || host != named && host != "" {
			return "", Invalid, false
		}
		host = named
	}
	return host, HTTP, false
}

func methodOf(b []byte) (method string, more, ok bool) {
	for i, c := range b[:min(len(b), maxMethod+1)] {
		switch {
		case c == ' ' && i > 0:
			return string(b[:i]), false, true
		case !isUpper(c):
			return "", false, false
		}
	}
	return "", len(b) <= maxMethod, len(b) <= maxMethod
}

// headOf returns the request's head in b, without the empty line at its end. A
// bare line feed ends a line here, as for many servers.
func headOf(b []byte) (head []byte, ended bool) {
	for i := range b {
		if b[i] != '\n' {
			continue
		}
		switch rest := b[i+1:]; {
		case bytes.HasPrefix(rest, []byte("\n")), bytes.HasPrefix(rest, []byte("\r\n")):
			return b[:i+1], true
		}
	}
	return b, false
}

func trimCR(line []byte) []byte { return bytes.TrimSuffix(line, []byte{'\r'}) }

// targetOf checks the request line and returns the authority in its target, ""
// if it has none.
func targetOf(line, method string) (authority string, ok bool) {
	fields := strings.Split(line, " ")
	if len(fields) != 3 || fields[2] != "HTTP/1.1" && fields[2] != "HTTP/1.0" || fields[1] == "" {
		return "", false
	}
	target := fields[1]
	if method == "CONNECT" {
		return target, true
	}
	if _, after, found := strings.Cut(target, "://"); found && target[0] != '/' {
		authority, _, _ = strings.Cut(after, "/")
		authority, _, _ = strings.Cut(authority, "?")
		if authority == "" || strings.Contains(authority, "@") {
			return "\x00", true // not a valid host: the caller rejects it
		}
		return authority, true
	}
	return "", true
}

// hostOf returns the single Host header. Anything that two servers could parse
// differently is rejected: several Host headers, folded lines, spaces before
// the colon.
func hostOf(headers []byte) (string, bool) {
	host, seen := "", false
	for line := range bytes.Lines(headers) {
		line = trimCR(bytes.TrimSuffix(line, []byte{'\n'}))
		key, value, found := bytes.Cut(line, []byte{':'})
		if !found || len(key) == 0 || bytes.ContainsFunc(key, notToken) || bytes.ContainsAny(value, "\r\x00") {
			return "", false
		}
		if !strings.EqualFold(string(key), "host") {
			continue
		}
		if seen {
			return "", false
		}
		seen = true
		var ok bool
		if host, ok = withoutPort(string(bytes.Trim(value, " \t"))); !ok {
			return "", false
		}
	}
	return host, true
}

// notToken reports whether a character is not allowed in the name of a header
// (RFC 9110 §5.6.2). Some servers treat one or another of them as white space.
func notToken(r rune) bool {
	return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && !strings.ContainsRune("!#$%&'*+-.^_`|~", r)
}

// withoutPort removes the port of a host and returns its canonical form.
func withoutPort(s string) (string, bool) {
	if s == "" {
		return "", true
	}
	if i := strings.LastIndexByte(s, ':'); i >= 0 && (s[0] != '[' || s[i-1] == ']') {
		if _, err := netip.ParseAddrPort("0.0.0.0" + s[i:]); err != nil && s[i:] != ":" {
			return "", false
		}
		s = s[:i]
	}
	return canonical(s)
}

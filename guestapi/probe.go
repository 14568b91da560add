package guestapi

// Probe is one network test of 'agent-runner probe'. That command reads a JSON
// array of probes from its standard input and writes one ProbeResult per line,
// in any order, as each test ends.
type Probe struct {
	ID   string `json:"id"`   // chosen by the caller, unique in the array
	Kind string `json:"kind"` // "tcp", "udp", "dns", "dnstcp", "ping", "tls", "http", "quic", "raw"
	// Target is "ADDR:PORT" or "NAME:PORT" (tcp, udp, tls, http, quic), an
	// address or a name (ping) or a question (dns, dnstcp). A name is first
	// resolved by the configured DNS server, with a question of type Type. For
	// kind raw, Target is only a description.
	Target string `json:"target"`
	// Name is the TLS server name (tls) or the Host (http) to send; ""
	// sends none.
	Name string `json:"name,omitempty"`
	// Server is the DNS server ADDR:PORT; "" means the configured one.
	Server string `json:"server,omitempty"`
	// Type is the DNS question's type, default "A".
	Type string `json:"type,omitempty"`
	// Repeat is how many times a dns question is asked, one after the
	// other. The result has the addresses of all answers. 0 means once.
	Repeat int `json:"repeat,omitempty"`
	// Frame is, for kind raw, the whole Ethernet frame to send (base64 in
	// JSON). The probe does not wait for an answer. A destination of six zero
	// bytes is replaced by the MAC address of the gateway, and such a source
	// by the guest's own.
	Frame []byte `json:"frame,omitempty"`
	// TimeoutMS is the time limit of the probe; 0 means 3000.
	TimeoutMS int `json:"timeout_ms,omitempty"`
}

// ProbeUnknown is the ProbeResult.Error for an unknown Kind.
const ProbeUnknown = "unknown kind"

// ProbeResult is the result of a Probe.
type ProbeResult struct {
	ID        string   `json:"id"`
	Reached   bool     `json:"reached"`             // the target answered; for dns: the answer has addresses
	Connected bool     `json:"connected,omitempty"` // a TCP connection was accepted, by the target or by another host
	Answer    string   `json:"answer,omitempty"`    // the first line or bytes of the answer, at most 200 bytes
	Addrs     []string `json:"addrs,omitempty"`     // of a dns answer, or of a name in Target
	Error     string   `json:"error,omitempty"`     // why it was not reached: "refused", "timeout", "unreachable", "reset", "NXDOMAIN", …
	Millis    int64    `json:"millis"`              // how long it took
}

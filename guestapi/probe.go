package guestapi

// Probe is one thing that 'agent-runner probe' tries to do on the network. It
// reads a JSON array of them on its standard input and writes one ProbeResult
// per line, in any order, as each is known.
type Probe struct {
	ID   string `json:"id"`   // chosen by the caller, unique in the array
	Kind string `json:"kind"` // "tcp", "udp", "dns", "dnstcp", "ping", "tls", "http", "quic", "raw"
	// Target is "ADDR:PORT" or "NAME:PORT" (tcp, udp, tls, http, quic), an
	// address or a name (ping) or a question (dns, dnstcp). A name is resolved
	// by the configured DNS server first, by the question Type. Of kind raw it
	// is for people only.
	Target string `json:"target"`
	// Name is the TLS server name (tls) or the Host (http) that is sent. ""
	// sends none.
	Name string `json:"name,omitempty"`
	// Server is the DNS server ADDR:PORT; "" means the configured one.
	Server string `json:"server,omitempty"`
	// Type is the DNS question's type, default "A".
	Type string `json:"type,omitempty"`
	// Repeat is how many times a dns question is put, one after the other;
	// the result holds the addresses of all answers. 0 means once.
	Repeat int `json:"repeat,omitempty"`
	// Frame is, of kind raw, the whole Ethernet frame to send (base64 in
	// JSON). Nothing is awaited. A destination or source of six zero bytes is
	// replaced by the card of the gateway, or by the guest's own.
	Frame []byte `json:"frame,omitempty"`
	// TimeoutMS bounds the probe; 0 means 3000.
	TimeoutMS int `json:"timeout_ms,omitempty"`
}

// ProbeUnknown is the ProbeResult.Error of a Kind that is not known.
const ProbeUnknown = "unknown kind"

// ProbeResult tells what became of a Probe.
type ProbeResult struct {
	ID        string   `json:"id"`
	Reached   bool     `json:"reached"`             // an answer came from the target; for dns: addresses came
	Connected bool     `json:"connected,omitempty"` // a TCP connection was accepted, by whomever
	Answer    string   `json:"answer,omitempty"`    // the first line or bytes of what came, at most 200 bytes
	Addrs     []string `json:"addrs,omitempty"`     // of a dns answer, or what a name in Target was resolved to
	Error     string   `json:"error,omitempty"`     // why it was not reached: "refused", "timeout", "unreachable", "reset", "NXDOMAIN", …
	Millis    int64    `json:"millis"`              // how long it took
}

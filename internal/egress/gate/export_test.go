package gate

// NewUpstreamAt is NewUpstream with another resolv.conf.
func NewUpstreamAt(d Dialer, path string) *Upstream {
	u := NewUpstream(d)
	u.path = path
	return u
}

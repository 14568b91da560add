package pvetest

// apiVersion is GET /version.
func apiVersion(c *call) (any, *Error) {
	if c.n.v9() {
		return map[string]any{"release": "9.2", "version": "9.2.6", "repoid": "14a22df311111111"}, nil
	}
	return map[string]any{"release": "8.4", "version": "8.4.21", "repoid": "2606ac8511111111"}, nil
}

package server

import (
	"net/http"
	"strings"
	"testing"
)

// Who may do nothing may not push the lines of others out of the daemon's log
// either, whose size is bounded.
func TestRefusalsDoNotFloodTheLog(t *testing.T) {
	h := start(t, nil)
	addr := h.serveTCP(t, TCP{})
	hc := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	long := strings.Repeat("x", 30_000)
	for range 150 {
		for _, host := range []string{"", "evil.example"} {
			req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+addr+"/v1/"+long, nil)
			if err != nil {
				t.Fatal(err)
			}
			req.Host = host
			resp, err := hc.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			_ = resp.Body.Close()
			if resp.StatusCode != http.StatusForbidden {
				t.Fatal(resp.Status)
			}
		}
	}
	logged := h.logged.String()
	if n := strings.Count(logged, "refused"); n == 0 || n > 100 || len(logged) > 100_000 {
		t.Errorf("300 refusals made %d lines, %d bytes", n, len(logged))
	}
}

// One network of IPv6, which one host can have all for itself, counts as one
// address; every IPv4 address is its own.
func TestConnectionsOfOneNetwork(t *testing.T) {
	l := newLimitListener(nil, 100, 2)
	for _, test := range []struct {
		from string
		ok   bool
	}{
		{"[2001:db8:1:2::1]:1", true}, {"[2001:db8:1:2::2]:1", true}, {"[2001:db8:1:2:ffff::3]:1", false},
		{"[2001:db8:1:3::1]:1", true}, {"192.0.2.1:1", true}, {"192.0.2.1:2", true}, {"[::ffff:192.0.2.1]:3", false},
		{"192.0.2.2:1", true}, {"[fe80::1%eth0]:1", true}, {"[fe80::2%eth0]:1", true}, {"[fe80::3%eth0]:1", false},
	} {
		if got := l.take(hostOf(test.from)); got != test.ok {
			t.Errorf("%s: %v", test.from, got)
		}
	}
}

package server

import (
	"net/http"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/auth"
)

// Who may do nothing may not push the lines of others out of the daemon's log
// either, whose size is bounded.
func TestRejectionsDoNotFloodTheLog(t *testing.T) {
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

// The log tells where a caller is whose token is refused, and never the token.
func TestRejectionsHaveLocation(t *testing.T) {
	l := startAccess(t)
	bad := auth.Prefix + agentlab.NewToken()
	narrow := l.make(t, auth.Request{Role: agentlab.RoleRead, Verbs: []string{"job.read"}})
	for _, c := range []struct {
		credential credential
		want       string
	}{
		{credential{token: bad}, `err="the token is not valid" from=127.0.0.1`},
		{credential{token: narrow}, `which the token lacks" from=127.0.0.1`},
		{credential{}, `err="over TCP a token is required" from=127.0.0.1`},
		{credential{unix: true, token: bad, peer: Peer{UID: 77}}, `err="the token is not valid" from="the unix socket, uid 77"`},
		{credential{unix: true, token: narrow, peer: Peer{UID: 78}}, `which the token lacks" from="the unix socket, uid 78"`},
		{credential{unix: true, peer: Peer{UID: 4321, GID: 4321}}, `from="the unix socket, uid 4321"`},
	} {
		for _, r := range l.srv.table {
			if r.id == "status" {
				if denied, status, body := l.call(t, r, "", "", c.credential); !denied {
					t.Errorf("%+v: %d %s", c.credential, status, body)
				}
			}
		}
		if logged := l.logged.String(); !strings.Contains(logged, c.want) {
			t.Errorf("no %s in the log:\n%s", c.want, logged)
		}
	}
	if strings.Contains(l.logged.String(), strings.TrimPrefix(bad, auth.Prefix)) {
		t.Error("the log holds a token")
	}
}

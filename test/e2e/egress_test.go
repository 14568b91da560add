package e2e

import (
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab/api"
)

// The network use of a job is recorded completely when its sandbox is gone,
// and names that a hostile guest chose are sanitised.
func TestEgressRecord(t *testing.T) {
	t.Parallel()
	l, n := newNetLab(t)
	n.HandleHTTP("web.example.com", 80, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "hello\n") }))
	j, r := l.job("--agent", "shell", "--task", `curl -fsS http://web.example.com/
for i in 1 2 3; do curl -m 3 -sS http://10.1.2.3:8080/ || true; done
curl -m 3 -sS http://169.254.169.254/latest/meta-data/ || true
getent hosts no-such-name.example.com || true
curl -m 3 -sS http://192.168.77.77/the-last || true`)
	if j.Status != "COMPLETED" {
		t.Fatalf("%v\n%s", r, l.ok("job", "logs", j.ID))
	}
	l.noSandboxes()
	var recs []api.EgressRecord
	dec := json.NewDecoder(strings.NewReader(l.ok("--json", "egress", "log", "--limit", "0", "--job", j.ID)))
	for dec.More() {
		var rec api.EgressRecord
		if err := dec.Decode(&rec); err != nil {
			t.Fatal(err)
		}
		recs = append(recs, rec)
	}
	total := func(match func(api.EgressRecord) bool) (n int) {
		for _, rec := range recs {
			if match(rec) {
				n += rec.Count
			}
		}
		return n
	}
	for what, c := range map[string]struct {
		match func(api.EgressRecord) bool
		least int
	}{
		"the page": {func(e api.EgressRecord) bool {
			return e.Allow && e.Proto == "tcp" && e.Name == "web.example.com" && e.Port == 80
		}, 1},
		"its name":       {func(e api.EgressRecord) bool { return e.Allow && e.Proto == "dns" && e.Name == "web.example.com" }, 1},
		"the LAN":        {func(e api.EgressRecord) bool { return !e.Allow && e.Addr == "10.1.2.3" && e.Port == 8080 }, 3},
		"metadata":       {func(e api.EgressRecord) bool { return !e.Allow && e.Addr == "169.254.169.254" }, 1},
		"the last thing": {func(e api.EgressRecord) bool { return !e.Allow && e.Addr == "192.168.77.77" && e.Port == 80 }, 1},
	} {
		if got := total(c.match); got < c.least {
			t.Errorf("%s: %d decisions, want at least %d", what, got, c.least)
		}
	}
	for i, rec := range recs {
		if rec.JobID != j.ID || rec.Rule == "" || i > 0 && rec.Seq <= recs[i-1].Seq {
			t.Errorf("%+v", rec)
		}
	}
	shown := l.ok("job", "show", j.ID)
	for _, want := range []string{"Network: ", "10.1.2.3:8080", "169.254.169.254:80"} {
		if !strings.Contains(shown, want) {
			t.Errorf("job show does not tell %q:\n%s", want, shown)
		}
	}
	if denied := l.ok("egress", "log", "--denied", "--job", j.ID); strings.Contains(denied, "web.example.com") || !strings.Contains(denied, "192.168.77.77:80") {
		t.Errorf("what was refused:\n%s", denied)
	}
	if t.Failed() {
		t.Logf("%+v\n%s", recs, l.ok("job", "logs", j.ID))
	}
}

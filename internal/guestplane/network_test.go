package guestplane_test

import (
	"net/http"
	"reflect"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/artifact"
)

func TestNetworkIsNarrowed(t *testing.T) {
	c := setup(t, artifact.Limits{})
	send := func(body string) (int, string) {
		st, p := c.do(http.MethodPost, guestapi.PathNetwork, c.runner(), strings.NewReader(body))
		return st, string(p)
	}
	deep := strings.Repeat("[", 50) + strings.Repeat("]", 50)
	for _, bad := range []string{``, `x`, `[]`, `{"mode":1}`, `{"allow":"github.com"}`, `{"mode":"nat","x":` + deep + `}`, `{"mode":"nat"}{}`} {
		if st, p := send(bad); st != http.StatusBadRequest {
			t.Errorf("%.60s: %d %s", bad, st, p)
		}
	}
	if st, _ := send(`{"mode":"allowlist","allow":["` + strings.Repeat("x", 100<<10) + `"]}`); st != http.StatusRequestEntityTooLarge {
		t.Errorf("too large: %d", st)
	}
	if got := c.Narrowed(); len(got) != 0 {
		t.Fatalf("narrowed %+v", got)
	}
	if st, p := send(`{"mode":"allowlist","allow":["github.com"],"deny":["x.github.com"],"ports":["443"],"limits":{"flows":9}}`); st != http.StatusNoContent || p != "" {
		t.Errorf("good: %d %s", st, p)
	}
	want := []guestapi.NetworkNarrow{{Mode: "allowlist", Allow: []string{"github.com"}, Deny: []string{"x.github.com"}, Ports: []string{"443"}}}
	if got := c.Narrowed(); !reflect.DeepEqual(got, want) {
		t.Errorf("narrowed %+v", got)
	}
	for code, status := range map[agentlab.Code]int{
		agentlab.CodeInvalid: 400, agentlab.CodeConflict: 409, agentlab.CodeLimit: 413, agentlab.CodeUnsupported: 501, agentlab.CodeUnavailable: 503,
	} {
		c.FailNarrow(agentlab.Errorf(code, "because"))
		if st, p := send(`{"mode":"off"}`); st != status || (status < 500) != strings.Contains(p, "because") {
			t.Errorf("%s: %d %s", code, st, p)
		}
	}
}

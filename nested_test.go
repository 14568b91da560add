package agentlab

import "testing"

// A request never gets what its profile refuses.
func TestNestedNarrow(t *testing.T) {
	for _, c := range []struct {
		profile, asked, want Nested
		code                 Code
	}{
		{"", "", NestedOff, ""},
		{"off", "off", "off", ""},
		{"off", "auto", "", CodeDenied},
		{"", "on", "", CodeDenied},
		{"auto", "", "auto", ""},
		{"auto", "off", "off", ""},
		{"auto", "on", "on", ""},
		{"on", "", "on", ""},
		{"on", "auto", "auto", ""},
		{"auto", "yes", "", CodeInvalid},
	} {
		got, err := c.profile.Narrow(c.asked)
		if CodeOf(err) != c.code || err == nil && got != c.want {
			t.Errorf("profile %q, request %q: %q, %v", c.profile, c.asked, got, err)
		}
	}
}

func TestNestedState(t *testing.T) {
	for _, s := range []NestedState{"", "works", "no-cpu", "no-module", "no-access", "no-vm", "unknown"} {
		if !s.Valid() || (s.Reason() == "") != (s == "" || s == NestedWorks) {
			t.Errorf("%q: valid %t, reason %q", s, s.Valid(), s.Reason())
		}
	}
	if NestedState("fine").Valid() {
		t.Error("any state is valid")
	}
}

package agentlab

import (
	"encoding/json"
	"testing"
)

func TestOptions(t *testing.T) {
	type holder struct{ O Options }
	for text, want := range map[string]string{
		`{}`:                     `{}`,
		`null`:                   `{}`,
		` {"b": 1, "a" : [ ] } `: `{"a":[],"b":1}`,
	} {
		var v holder
		if err := json.Unmarshal([]byte(`{"O":`+text+`}`), &v); err != nil || (v.O == "") != (want == "{}") {
			t.Errorf("%s: %q, %v", text, v.O, err)
		}
		if b, err := json.Marshal(&v); err != nil || string(b) != `{"O":`+want+`}` {
			t.Errorf("%s is written as %s, %v", text, b, err)
		}
	}
	for _, text := range []string{`[]`, `"x"`, `1`} {
		if err := json.Unmarshal([]byte(text), new(Options)); err == nil {
			t.Errorf("%s is accepted", text)
		}
	}
	if _, err := json.Marshal(holder{"{broken"}); err == nil {
		t.Error("what is not JSON is written")
	}
	var v struct{ B int }
	if err := Options(`{"B":7}`).Decode(&v); err != nil || v.B != 7 {
		t.Errorf("%+v, %v", v, err)
	}
	if err := Options("").Decode(&v); err != nil {
		t.Error(err)
	}
}

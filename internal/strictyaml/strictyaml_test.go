package strictyaml

import (
	"errors"
	"reflect"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
)

type inner struct {
	Mode string   `yaml:"mode"`
	List []string `yaml:"list"`
}

type outer struct {
	Name   string            `yaml:"name"`
	Count  int               `yaml:"count"`
	On     *bool             `yaml:"on"`
	Inner  inner             `yaml:"inner"`
	Env    map[string]string `yaml:"env"`
	Hidden string            // no tag: not a key
}

func TestDecode(t *testing.T) {
	yes := true
	for _, tc := range []struct {
		name, in string
		want     outer
	}{
		{"empty", "", outer{Count: 7}},
		{"only comments", "# nothing\n---\n", outer{Count: 7}},
		{"all", "name: x\ncount: 3\non: true\ninner: {mode: off, list: [a, 'b']}\nenv:\n  A: \"1\"\n  B: 2\n",
			outer{Name: "x", Count: 3, On: &yes, Inner: inner{Mode: "off", List: []string{"a", "b"}}, Env: map[string]string{"A": "1", "B": "2"}}},
		{"one key", "name: only", outer{Name: "only", Count: 7}},
		{"number as text keeps its form", "name: 1.10", outer{Name: "1.10", Count: 7}},
		{"block text", "name: |\n  a: b\n  c\n", outer{Name: "a: b\nc\n", Count: 7}},
		{"null is not mentioned", "count: null\nname:\n", outer{Count: 7}},
		{"negative", "count: -2", outer{Count: -2}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got := outer{Count: 7}
			if err := Decode([]byte(tc.in), &got); err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(got, tc.want) {
				t.Errorf("got %+v, want %+v", got, tc.want)
			}
		})
	}
}

func TestDecodeRefuses(t *testing.T) {
	for _, tc := range []struct{ name, in, field, message, hint string }{
		{"unknown", "name: x\ninner:\n  mod: s3cret", "inner.mod", "line 3: unknown key", `did you mean "inner.mode"?`},
		{"unknown far", "zzzzzz: s3cret", "zzzzzz", "line 1: unknown key", "the keys here are count, env, inner, name, on"},
		{"untagged", "hidden: s3cret", "hidden", "line 1: unknown key", "the keys here"},
		{"in a list", "inner: {list: [a, {b: s3cret}]}", "inner.list[1]", "line 1: text is expected", ""},
		{"twice", "name: s3cret\nname: s3cret", "", "line 2: ", ""},
		{"text for a number", "count: s3cret", "count", "line 1: a whole number is expected", ""},
		{"quoted number", "count: '3'", "count", "a whole number is expected", ""},
		{"octal", "count: 010", "count", "a whole number is expected", ""},
		{"huge", "count: 99999999999999999999", "count", "a whole number is expected", ""},
		{"yes is no bool", "on: yes", "on", "true or false is expected", ""},
		{"bool for text", "name: true", "name", "put it between quotes", ""},
		{"list for a mapping", "inner: [s3cret]", "inner", "a mapping", ""},
		{"text for a mapping", "s3cret", "", "a mapping", ""},
		{"anchor", "name: &a s3cret", "", "anchors and aliases", ""},
		{"alias", "name: *a", "", "line 1", ""},
		{"merge", "inner: {mode: x}\n<<: {name: s3cret}", "", "not allowed", ""},
		{"tag", "name: !!binary s3cret", "", "tags are not allowed", ""},
		{"two documents", "name: s3cret\n---\nname: s3cret\n", "", "second document", ""},
		{"complex key", "? [s3cret, b]\n: c", "", "not valid YAML", ""},
		{"broken", "name: 's3cret", "", "line 1: not valid YAML", ""},
		{"broken flow", "inner: {mode: s3cret", "", "not valid YAML", ""},
		{"nul", "name: a\x00", "", "NUL", ""},
		{"too big", "name: " + strings.Repeat("x", MaxBytes), "", "exceed", ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var got outer
			err := Decode([]byte(tc.in), &got)
			if agentlab.CodeOf(err) != agentlab.CodeInvalid {
				t.Fatalf("got %v (%+v), want invalid", err, got)
			}
			e, _ := errors.AsType[*agentlab.Error](err)
			if tc.field != "" && e.Field != tc.field {
				t.Errorf("field %q, want %q", e.Field, tc.field)
			}
			if !strings.Contains(e.Message, tc.message) || !strings.Contains(e.Hint, tc.hint) {
				t.Errorf("message %q, hint %q; want %q, %q", e.Message, e.Hint, tc.message, tc.hint)
			}
			if strings.Contains(err.Error()+e.Hint, "s3cret") {
				t.Errorf("the error repeats a value: %q", err)
			}
		})
	}
}

// DecodeMore knows keys that the struct does not have: at the top, in a mapping
// that it has, and in one that it does not have.
func TestDecodeMore(t *testing.T) {
	type section struct {
		A string `yaml:"a"`
	}
	decode := func(text string) (v outer, top *int, in *string, far *bool, s section, err error) {
		doc, err := Parse([]byte(text))
		if err == nil {
			err = doc.DecodeMore(&v, map[string]any{"top": &top, "inner.more": &in, "far.off.key": &far, "section": &s})
		}
		return v, top, in, far, s, err
	}
	v, top, in, far, s, err := decode("name: x\ntop: 3\ninner: {mode: m, more: text}\nfar: {off: {key: true}}\nsection: {a: b}")
	if err != nil || v.Name != "x" || v.Inner.Mode != "m" || top == nil || *top != 3 || in == nil || *in != "text" || far == nil || !*far || s.A != "b" {
		t.Errorf("%+v, %v, %v, %v, %+v, %v", v, top, in, far, s, err)
	}
	if _, top, in, far, _, err = decode("top: null\ninner: {more: null}\nfar:\n"); err != nil || top != nil || in != nil || far != nil {
		t.Errorf("null is a value: %v, %v, %v, %v", top, in, far, err)
	}
	for text, want := range map[string]struct{ field, hint string }{
		"top: text":              {"top", ""},
		"inner: {more: [x]}":     {"inner.more", ""},
		"inner: {mor: x}":        {"inner.mor", `"inner.more"`},
		"inner: {zzzzzz: x}":     {"inner.zzzzzz", "the keys in inner are list, mode, more"},
		"zzzzzzzzzzzz: x":        {"zzzzzzzzzzzz", "the keys here are count, env, far, inner, name, on, section, top"},
		"'inner.more': x":        {"inner.more", "the keys here"},
		"'far.off.key': true":    {"far.off.key", "the keys here"},
		"far: {of: {key: true}}": {"far.of", `"far.off"`},
		"far: {off: {kez: 1}}":   {"far.off.kez", `"far.off.key"`},
		"far: true":              {"far", ""},
		"more: x":                {"more", ""},
		"section: {b: x}":        {"section.b", `"section.a"`},
		"env: {more: {x: y}}":    {"env.more", ""},
	} {
		_, _, _, _, _, err := decode(text)
		if e, ok := errors.AsType[*agentlab.Error](err); !ok || e.Code != agentlab.CodeInvalid || e.Field != want.field || !strings.Contains(e.Hint, want.hint) {
			t.Errorf("%s: %v (%s)", text, err, agentlab.HintOf(err))
		}
	}
}

func TestDeepNestingIsAnError(t *testing.T) {
	for _, unit := range []string{"[", "{a: ", "- ", "? ", "[{"} {
		text := "inner: " + strings.Repeat(unit, 60000/len(unit))
		if err := Decode([]byte(text), &outer{}); err == nil || !strings.Contains(err.Error(), "levels deep") {
			t.Errorf("%q nested: %v", unit, err)
		}
	}
}

func TestKeysAndLines(t *testing.T) {
	doc, err := Parse([]byte("a: 1\nb:\n  - c: 2\n  - {d: {e: 3}}\n"))
	if err != nil {
		t.Fatal(err)
	}
	want := []Key{{"a", "a", 1, "1"}, {"b", "b", 2, ""}, {"c", "b[0].c", 3, "2"}, {"d", "b[1].d", 4, ""}, {"e", "b[1].d.e", 4, "3"}}
	if got := doc.Keys(); !reflect.DeepEqual(got, want) {
		t.Errorf("got %v", got)
	}
	for path, line := range map[string]int{"b[0]": 3, "b[1]": 4, "b[2]": 0, "b[1].x": 0} {
		if got := doc.Line(path); got != line {
			t.Errorf("%s is on line %d, want %d", path, got, line)
		}
	}
	for field, want := range map[string]string{"b[1].d.x": "b[1].d.x: line 4: no", "b[0].x": "b[0].x: line 3: no", "b[7]": "b[7]: line 2: no", "x.y": "x.y: no"} {
		if got := doc.At(agentlab.Errorf(agentlab.CodeInvalid, "no").WithField(field)); got.Error() != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	err = doc.At(agentlab.Errorf(agentlab.CodeUnsupported, "no").WithField("b[1].d.e"))
	if err.Error() != "b[1].d.e: line 4: no" || agentlab.CodeOf(err) != agentlab.CodeUnsupported {
		t.Errorf("got %v", err)
	}
}

func TestNearest(t *testing.T) {
	keys := []string{"backend", "default_profile", "default_agent", "limits", "vmid_range", "qemu"}
	for _, tc := range []struct{ in, want string }{
		{"limit", "limits"}, {"bakcend", "backend"}, {"default-profile", "default_profile"}, {"DefaultProfile", "default_profile"},
		{"qmeu", "qemu"}, {"default_agnet", "default_agent"}, {"xyz", ""}, {"", ""}, {"timeout", ""}, {"q", ""},
	} {
		if got := Nearest(tc.in, keys); got != tc.want {
			t.Errorf("Nearest(%q) = %q, want %q", tc.in, got, tc.want)
		}
	}
}

func FuzzDecode(f *testing.F) {
	for _, s := range []string{"name: x\ncount: 3", "inner: {mode: [a", "a: &b *b", "- - -", "? a\n: b", "x: |\n y"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var v outer
		if err := Decode(data, &v); err != nil && agentlab.CodeOf(err) != agentlab.CodeInvalid {
			t.Errorf("code %s: %v", agentlab.CodeOf(err), err)
		}
	})
}

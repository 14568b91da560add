package config

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"reflect"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the generated documents")

const document = "../../docs/config.md"

// docs/config.md is generated from the doc tags of Config; run
// 'go test ./internal/config -run TestReference -update' after a change.
func TestReference(t *testing.T) {
	var b bytes.Buffer
	b.WriteString(`# Configuration

Generated from internal/config. AgentLab needs no configuration: the file is
optional, and so is each key. It is ` + "`$XDG_CONFIG_HOME/agentlab/config.yaml`" + `
(` + "`~/.config/agentlab/config.yaml`" + `), ` + "`$AGENTLAB_HOME/config/config.yaml`" + ` when
AGENTLAB_HOME is set, or ` + "`/etc/agentlab/config.yaml`" + ` for the machine-wide daemon. The
daemon reads it when it starts. A key that is not listed here is an error.

`)
	section := ""
	b.WriteString("```yaml\n")
	for _, k := range keys() {
		prefix, name, nested := strings.Cut(k.path, ".")
		indent := ""
		if nested {
			if prefix != section {
				fmt.Fprintf(&b, "%s:\n", prefix)
			}
			section, indent = prefix, "  "
		} else {
			section, name = "", k.path
		}
		fmt.Fprintf(&b, "%s# %s\n%s%s: %s\n", indent, k.doc, indent, name, k.def)
	}
	b.WriteString("```\n")
	if *update {
		if err := os.WriteFile(document, b.Bytes(), 0o644); err != nil { //nolint:gosec // a document
			t.Fatal(err)
		}
	}
	have, err := os.ReadFile(document)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(have, b.Bytes()) {
		t.Error("docs/config.md is out of date: go test ./internal/config -run TestReference -update")
	}
	_, sample, _ := strings.Cut(string(have), "```yaml\n")
	sample, _, _ = strings.Cut(sample, "```")
	if c, err := Parse([]byte(sample)); err != nil || !reflect.DeepEqual(c, Default()) {
		t.Errorf("the file in docs/config.md does not mean the defaults: %+v, %v", c, err)
	}
}

type key struct{ path, def, doc string }

// keys returns every key of the file with its default, as YAML.
func keys() []key { return keysOf("", reflect.ValueOf(Default())) }

func keysOf(prefix string, v reflect.Value) []key {
	var out []key
	for i := range v.NumField() {
		f := v.Type().Field(i)
		path := prefix + f.Tag.Get("yaml")
		if f.Type.Kind() == reflect.Struct {
			out = append(out, keysOf(path+".", v.Field(i))...)
			continue
		}
		def := fmt.Sprint(v.Field(i).Interface())
		switch {
		case def == "":
			def = `""`
		case f.Type.Kind() == reflect.Slice:
			def = strings.ReplaceAll(def, " ", ", ")
		case f.Type.Kind() == reflect.Map:
			def = "{}"
		}
		out = append(out, key{path, def, f.Tag.Get("doc")})
	}
	return out
}

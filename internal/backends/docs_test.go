package backends_test

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backends"
	"github.com/agentlab-vm/agentlab/internal/config"
	"github.com/agentlab-vm/agentlab/internal/profile"
)

var update = flag.Bool("update", false, "write the generated documents")

const document = "../../docs/config.md"

const severalBackends = `
## Several backends

` + "`backends`" + ` gives names to backends, each with a driver and the keys of the driver's section. The one in
` + "`backend`" + ` is the default; without that key it is the first.

` + "```yaml" + `
backend: local
backends:
  local:
    driver: qemu
  lab:
    driver: proxmox
    token_id: agentlab@pve!agentlab
` + "```" + `

Each sandbox, workspace, snapshot and template stays on its backend, and the daemon drives all of them. A new
sandbox is made on the backend of the workspace or snapshot that it uses; else on the backend in the request
(` + "`" + `--backend` + "`" + ` of ` + "`" + `sandbox new` + "`" + `, ` + "`" + `job run` + "`" + `, ` + "`" + `start` + "`" + `, ` + "`" + `session create` + "`" + `, ` + "`" + `workspace create` + "`" + ` and ` + "`" + `image warm` + "`" + `); else on
the backend in its profile (` + "`" + `backend` + "`" + `); else on the default. A request for another backend than the one of its workspace
or snapshot is refused, and so is one for what the backend does not support: the error names the backends that do.
` + "`" + `agentlab backend list` + "`" + ` shows them, ` + "`" + `agentlab backend show NAME` + "`" + ` what one supports, and ` + "`" + `agentlab backend check NAME` + "`" + ` checks one. While one is drained (` + "`" + `agentlab backend
drain NAME` + "`" + `), nothing new is made on it; ` + "`" + `agentlab workspace move` + "`" + ` moves its workspaces away. The warm pool is on the default.

A backend that has the name of its driver, with or without ` + "`" + `backends` + "`" + `, has the files that the only backend had
before; the files of others are in ` + "`" + `backends/NAME` + "`" + ` of the state and cache directories. A sandbox of a backend that is
not in the file is not changed. At most 16 backends are possible.

A backend that hangs or fails delays nothing on the others: each has its own workers and its own slots for VMs that
boot. One that twice fails to list its sandboxes, or does not return the list within three minutes, is down. Until
it answers again, requests for it are refused or wait, with the time since when it is down and the reason; only what
limits a sandbox (to stop, suspend or destroy it, or to change its network) is still tried. ` + "`" + `agentlab status` + "`" + ` and
` + "`" + `doctor` + "`" + ` show it, and so does ` + "`" + `agentlab_backend_up` + "`" + ` in the [metrics](metrics.md).
`

// docs/config.md is generated from the doc tags of config.Config and of the
// sections of backends; run 'go test ./internal/backends -run TestReference -update' after a change.
func TestReference(t *testing.T) {
	var b bytes.Buffer
	b.WriteString(`# Configuration

Generated from internal/config and the settings of each backend. AgentLab needs
no configuration: the file is optional, and so is each key. It is ` + "`$XDG_CONFIG_HOME/agentlab/config.yaml`" + `
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
	b.WriteString(severalBackends)
	if *update {
		if err := os.WriteFile(document, b.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	have, err := os.ReadFile(document)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(have, b.Bytes()) {
		t.Error("docs/config.md is out of date: go test ./internal/backends -run TestReference -update")
	}
	_, sample, _ := strings.Cut(string(have), "```yaml\n")
	sample, _, _ = strings.Cut(sample, "```")
	if c, err := parse(sample); err != nil || !reflect.DeepEqual(c, defaults()) {
		t.Errorf("the file in docs/config.md does not mean the defaults: %+v, %v", c, err)
	}
}

func defaults() config.Config { return config.Default(backends.All.Known()...) }

func parse(text string) (config.Config, error) {
	return config.Parse([]byte(text), backends.All.Known()...)
}

type key struct {
	path, def, doc string
	of             reflect.Type
}

// keys returns every key of the file with its default, as YAML.
func keys() []key {
	c := defaults()
	out := keysOf("", reflect.ValueOf(c))
	var names []string
	for _, b := range backends.All {
		names = append(names, b.Name)
		if b.Section != nil {
			out = append(out, keysOf(b.Name+".", reflect.ValueOf(b.Section()).Elem())...)
		}
	}
	out[0].doc += " Known: " + strings.Join(names, ", ") + "."
	return out
}

func keysOf(prefix string, v reflect.Value) []key {
	var out []key
	for i := range v.NumField() {
		f := v.Type().Field(i)
		name, ok := f.Tag.Lookup("yaml")
		if !ok {
			continue
		}
		path := prefix + name
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
		out = append(out, key{path, def, f.Tag.Get("doc"), f.Type})
	}
	return out
}

// TestProfileKeysAreDocumented checks that docs/profiles.md, which is written by
// hand, has every key of profiles: those of all backends, and those of single ones.
func TestProfileKeysAreDocumented(t *testing.T) {
	text, err := os.ReadFile("../../docs/profiles.md")
	if err != nil {
		t.Fatal(err)
	}
	var paths []string
	for _, k := range keysOf("", reflect.ValueOf(profile.Doc{})) {
		paths = append(paths, k.path)
	}
	for _, options := range backends.All.Options() {
		for _, o := range options {
			paths = append(paths, o.Path)
		}
	}
	for _, path := range paths {
		last := path[strings.LastIndex(path, ".")+1:]
		if !bytes.Contains(text, []byte("`"+path+"`")) && !bytes.Contains(text, []byte("`."+last+"`")) {
			t.Errorf("docs/profiles.md does not describe %s", path)
		}
	}
	if len(paths) < 25 {
		t.Errorf("only %d keys found", len(paths))
	}
}

// file returns a config.yaml that sets only this key.
func (k key) file(value string) string {
	section, name, nested := strings.Cut(k.path, ".")
	if !nested {
		return k.path + ": " + value + "\n"
	}
	return section + ":\n  " + name + ": " + value + "\n"
}

// Every number has a range, and the error about a value outside of it names the
// key. That the default is inside of it is checked by the other tests.
func TestEveryNumberHasARange(t *testing.T) {
	checked := 0
	for _, k := range keys() {
		format := "%d"
		switch {
		case k.of.Kind() == reflect.Slice && k.of.Elem().Kind() == reflect.Int:
			format = "[%d]"
		case k.of.Kind() != reflect.Int:
			continue
		}
		for _, value := range []int{-1, 1 << 40} {
			text := k.file(fmt.Sprintf(format, value))
			_, err := parse(text)
			e, _ := errors.AsType[*agentlab.Error](err)
			if agentlab.CodeOf(err) != agentlab.CodeInvalid || e.Field != k.path {
				t.Errorf("%q: %v, want an error about %s: add the key to validateRanges", text, err, k.path)
			}
		}
		checked++
	}
	if checked < 15 {
		t.Errorf("only %d numbers found", checked)
	}
}

func TestEveryKeyIsDocumentedAndReadable(t *testing.T) {
	for _, k := range keys() {
		if k.doc == "" || k.path == "" {
			t.Errorf("key %q has no doc", k.path)
		}
		text := k.file(k.def)
		c, err := parse(text)
		if err != nil || !reflect.DeepEqual(c, defaults()) {
			t.Errorf("%q: %v", text, err)
		}
	}
	if n := len(keys()); n < 15 {
		t.Errorf("only %d keys", n)
	}
}

// Package secret stores secrets bundles, encrypted with age, resolves the
// references in them, and creates and compares the tokens with which sandboxes
// fetch them.
//
// No function takes a secret from a command line, and no error contains one.
// Errors may contain the text of a reference, which is not a secret, but never
// its value.
package secret

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/lazyre"
	"github.com/agentlab-vm/agentlab/internal/redact"
	"github.com/agentlab-vm/agentlab/internal/strictyaml"
)

// MaxValueBytes is the maximum length of a value.
const MaxValueBytes = 128 << 10

// Bundle has the secrets of one profile's sandboxes. The zero
// Bundle is empty. In a stored bundle a value may be a reference (see
// Reference); in one that Vault.Deliver returns, all values are plain.
type Bundle struct {
	Git                Git               `yaml:"git"`
	Env                map[string]string `yaml:"env"`      // environment of the agent
	SSHKeys            map[string]string `yaml:"ssh_keys"` // private keys by host
	ClaudeSettingsJSON string            `yaml:"claude_settings_json"`
	Artifact           Artifact          `yaml:"artifact"`
}

// Git is the credential for the job's remote.
type Git struct {
	URL           string `yaml:"url"` // the credential is used only for this URL's scheme and host
	Token         string `yaml:"token"`
	Username      string `yaml:"username"`
	SSHPrivateKey string `yaml:"ssh_private_key"` // a deploy key
	SSHKnownHosts string `yaml:"ssh_known_hosts"`
}

// Artifact is a store outside of AgentLab that receives a copy of each
// artifact.
type Artifact struct {
	Endpoint string `yaml:"endpoint"` // files are PUT below it, as ENDPOINT/JOB/PATH
	Token    string `yaml:"token"`    // bearer token
}

func parseBundle(data []byte) (Bundle, error) {
	var b Bundle
	if err := strictyaml.Decode(data, &b); err != nil {
		return Bundle{}, err
	}
	for _, e := range b.entries() {
		if err := checkKey(e.key); err != nil {
			return Bundle{}, err
		}
		if err := checkStored(e.key, e.value); err != nil {
			return Bundle{}, err
		}
	}
	return b, nil
}

// fixedKeys returns the keys that are not part of a map, with pointers to
// their values.
func (b *Bundle) fixedKeys() map[string]*string {
	return map[string]*string{
		"git.url":              &b.Git.URL,
		"git.token":            &b.Git.Token,
		"git.username":         &b.Git.Username,
		"git.ssh_private_key":  &b.Git.SSHPrivateKey,
		"git.ssh_known_hosts":  &b.Git.SSHKnownHosts,
		"claude_settings_json": &b.ClaudeSettingsJSON,
		"artifact.endpoint":    &b.Artifact.Endpoint,
		"artifact.token":       &b.Artifact.Token,
	}
}

// open lists the keys whose values are not secret.
var open = append([]string{"git.url", "git.username", "git.ssh_known_hosts", "artifact.endpoint"}, openVariables()...)

// openVariables returns the keys of the variables that are not secret.
func openVariables() (keys []string) {
	for _, name := range redact.OpenVariables {
		keys = append(keys, "env."+name)
	}
	return keys
}

// entry is one value of a bundle under its key: "env.NAME",
// "ssh_keys.HOST", or one of fixedKeys.
type entry struct{ key, value string }

// entries returns every non-empty value, and the empty values of maps, sorted
// by key.
func (b *Bundle) entries() []entry {
	var out []entry
	for key, p := range b.fixedKeys() {
		if *p != "" {
			out = append(out, entry{key, *p})
		}
	}
	for name, v := range b.Env {
		out = append(out, entry{"env." + name, v})
	}
	for name, v := range b.SSHKeys {
		out = append(out, entry{"ssh_keys." + name, v})
	}
	slices.SortFunc(out, func(x, y entry) int { return strings.Compare(x.key, y.key) })
	return out
}

// put stores a text under a key without a check. It returns false if there is
// no such key.
func (b *Bundle) put(key, text string) bool {
	for prefix, m := range map[string]*map[string]string{"env.": &b.Env, "ssh_keys.": &b.SSHKeys} {
		if name, ok := strings.CutPrefix(key, prefix); ok {
			if *m == nil {
				*m = map[string]string{}
			}
			(*m)[name] = text
			return true
		}
	}
	p, ok := b.fixedKeys()[key]
	if ok {
		*p = text
	}
	return ok
}

// selectKeys returns the part of b whose keys want selects; nil selects all.
func (b *Bundle) selectKeys(want func(key string) bool) Bundle {
	var out Bundle
	for _, e := range b.entries() {
		if want == nil || want(e.key) {
			out.put(e.key, e.value)
		}
	}
	return out
}

// marshal writes a bundle as YAML and checks it by reading it. Multi-line
// values are written as blocks if that preserves the text, because users edit
// them. All others are written as JSON strings, which every YAML parser reads
// in the same way.
func (b *Bundle) marshal() ([]byte, error) {
	for _, form := range []func(indent, s string) string{readable, func(_, s string) string { return quote(s) }} {
		text := b.write(form)
		if again, err := parseBundle(text); err == nil && slices.Equal(again.entries(), b.entries()) {
			return text, nil
		}
	}
	return nil, agentlab.Errorf(agentlab.CodeInvalid, "a value is not text in UTF-8 and cannot be stored")
}

func (b *Bundle) write(form func(indent, s string) string) []byte {
	var out bytes.Buffer
	section := ""
	for _, e := range b.entries() {
		top, name, nested := strings.Cut(e.key, ".")
		if !nested {
			fmt.Fprintf(&out, "%s: %s\n", top, form("  ", e.value))
			continue
		}
		if top != section {
			section = top
			fmt.Fprintf(&out, "%s:\n", top)
		}
		fmt.Fprintf(&out, "  %s: %s\n", quote(name), form("    ", e.value))
	}
	return out.Bytes()
}

// readable writes multi-line plain text as a block.
func readable(indent, s string) string {
	lines := strings.Split(strings.TrimSuffix(s, "\n"), "\n")
	if len(lines) < 2 || strings.HasPrefix(lines[0], " ") || strings.ContainsAny(s, "\r\t\u0085\u2028\u2029") {
		return quote(s)
	}
	header := "|-"
	if strings.HasSuffix(s, "\n") {
		header = "|"
	}
	return header + "\n" + indent + strings.Join(lines, "\n"+indent)
}

func quote(s string) string {
	var b strings.Builder
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	_ = e.Encode(s) // cannot fail for a string
	return strings.TrimSuffix(b.String(), "\n")
}

// Keys returns the names of the values in b, sorted: "env.NAME" for an
// environment variable, "ssh_keys.HOST" for a key, else a name such as
// "git.token".
func (b *Bundle) Keys() []string {
	keys := []string{}
	for _, e := range b.entries() {
		keys = append(keys, e.key)
	}
	return keys
}

// Values returns the values that must never be shown: every non-empty value
// except URLs, git's username and the known hosts, which are not secret. For
// Claude's settings these are also the texts below "env", and for variables with
// a JSON document its secrets, because a leak would contain them separately.
func (b *Bundle) Values() []string {
	var out []string
	for _, e := range b.entries() {
		if e.value != "" && !slices.Contains(open, e.key) {
			out = append(out, e.value)
		}
		if strings.HasPrefix(e.key, "env.") {
			out = append(out, redact.SettingsSecrets(e.value)...)
		}
	}
	var settings struct {
		Env map[string]any `json:"env"`
	}
	if json.Unmarshal([]byte(b.ClaudeSettingsJSON), &settings) == nil {
		for _, v := range settings.Env {
			if s, ok := v.(string); ok && s != "" {
				out = append(out, s)
			}
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

var (
	envName  = lazyre.New(`^[A-Za-z_][A-Za-z0-9_]{0,127}$`)
	hostName = lazyre.New(`^[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?$`)
)

// checkKey returns an error for text that is not a key of a bundle.
func checkKey(key string) error {
	if name, ok := strings.CutPrefix(key, "env."); ok {
		return checkEnvName(name)
	}
	if host, ok := strings.CutPrefix(key, "ssh_keys."); ok {
		if !hostName.MatchString(host) {
			return agentlab.Errorf(agentlab.CodeInvalid, "%q is not the name of a host", host).WithField(key).
				WithHint("store an SSH key under the name of its host, such as ssh_keys.example.com")
		}
		return nil
	}
	if _, ok := new(Bundle).fixedKeys()[key]; !ok {
		return unknownKey(key)
	}
	return nil
}

func checkEnvName(name string) error {
	if !envName.MatchString(name) {
		return agentlab.Errorf(agentlab.CodeInvalid, "%q is not the name of an environment variable", name).WithField("env." + name)
	}
	switch name {
	case "PATH", "HOME", "USER", "SHELL", "LD_PRELOAD", "LD_LIBRARY_PATH", "BASH_ENV", "ENV", "IFS":
		return agentlab.Errorf(agentlab.CodeInvalid, "%s is not a secret and would break the agent's environment", name).WithField("env." + name)
	}
	return nil
}

// unset removes the value under key; not_found if there is none.
func (b *Bundle) unset(key string) error {
	if err := checkKey(key); err != nil {
		return err
	}
	for prefix, m := range map[string]map[string]string{"env.": b.Env, "ssh_keys.": b.SSHKeys} {
		if name, ok := strings.CutPrefix(key, prefix); ok {
			if _, there := m[name]; !there {
				return notSet(key)
			}
			delete(m, name)
			return nil
		}
	}
	p := b.fixedKeys()[key]
	if *p == "" {
		return notSet(key)
	}
	*p = ""
	return nil
}

func notSet(key string) error {
	return agentlab.Errorf(agentlab.CodeNotFound, "%s is not set", key).WithHint("see 'agentlab secrets show'")
}

func unknownKey(key string) error {
	known := slices.Sorted(maps.Keys(new(Bundle).fixedKeys()))
	e := agentlab.Errorf(agentlab.CodeInvalid, "unknown key %q", key).WithField("key")
	if near := strictyaml.Nearest(key, known); near != "" {
		return e.WithHint("did you mean %q?", near)
	}
	if envName.MatchString(key) {
		return e.WithHint("for an environment variable, use env.%s", key)
	}
	return e.WithHint("use env.NAME, ssh_keys.HOST, or one of %s", strings.Join(known, ", "))
}

// normalize normalises a value: it removes one newline at the end, which files and
// answers have, but SSH texts always end in one.
func normalize(key, text string) string {
	text = strings.TrimSuffix(strings.TrimSuffix(text, "\n"), "\r")
	if text != "" && (strings.HasPrefix(key, "git.ssh_") || strings.HasPrefix(key, "ssh_keys.")) {
		text = strings.TrimRight(text, "\r\n") + "\n"
	}
	return text
}

// checkStored checks the stored value of a key.
func checkStored(key, text string) error {
	if _, ok := parseReference(text); ok {
		return checkReference(key, text)
	}
	return checkValue(key, literal(text))
}

// checkValue checks a plain value.
func checkValue(key, value string) error {
	bad := func(why string) error { return agentlab.Errorf(agentlab.CodeInvalid, "%s", why).WithField(key) }
	oneLine := key == "git.token" || key == "git.username" || key == "git.url" || strings.HasPrefix(key, "artifact.")
	switch {
	case value == "":
		return agentlab.Errorf(agentlab.CodeInvalid, "the value is empty").WithField(key).WithHint("to remove it: agentlab secrets unset %s", key)
	case len(value) > MaxValueBytes:
		return agentlab.Errorf(agentlab.CodeInvalid, "the value has %d bytes, more than %d", len(value), MaxValueBytes).WithField(key)
	case strings.ContainsRune(value, 0):
		return bad("the value contains a NUL byte")
	case key == "claude_settings_json" && !isJSONObject(value):
		return bad("the value is not a JSON object")
	case (key == "git.ssh_private_key" || strings.HasPrefix(key, "ssh_keys.")) && !strings.Contains(value, "PRIVATE KEY-----"):
		return bad("the value is not an SSH private key")
	case oneLine && strings.ContainsAny(value, "\r\n"):
		return bad("the value has more than one line")
	case key == "git.url":
		if e, ok := errors.AsType[*agentlab.Error](agentlab.ValidateRepoURL(value)); ok {
			return e.WithField(key).WithHint("give the remote's URL without a credential, such as https://git.example.com/; the credential goes into git.token")
		}
	case key == "artifact.endpoint":
		u, err := url.Parse(value)
		if err != nil || u.Scheme != "https" && u.Scheme != "http" || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
			return bad("the value is not an http or https URL without user, query and fragment")
		}
	}
	return nil
}

func isJSONObject(s string) bool {
	var v map[string]json.RawMessage
	return json.Unmarshal([]byte(s), &v) == nil && v != nil
}

// Package secret keeps secrets bundles at rest, encrypted with age, and makes
// and compares the tokens with which sandboxes fetch them.
//
// No function takes a secret from a command line or the environment, and no
// error holds one.
package secret

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/strictyaml"
)

// MaxValueBytes is the length of the longest value.
const MaxValueBytes = 128 << 10

// Bundle is what one profile's sandboxes get (seed 000 §9.1). The zero Bundle
// is an empty one.
type Bundle struct {
	Git                Git               `yaml:"git"`
	Env                map[string]string `yaml:"env"` // environment of the agent
	ClaudeSettingsJSON string            `yaml:"claude_settings_json"`
}

// Git is the credential for the job's remote.
type Git struct {
	URL           string `yaml:"url"` // the credential is used only for this URL's scheme and host
	Token         string `yaml:"token"`
	Username      string `yaml:"username"`
	SSHPrivateKey string `yaml:"ssh_private_key"`
	SSHKnownHosts string `yaml:"ssh_known_hosts"`
}

func parseBundle(data []byte) (Bundle, error) {
	var b Bundle
	if err := strictyaml.Decode(data, &b); err != nil {
		return Bundle{}, err
	}
	for name := range b.Env {
		if err := checkEnvName(name); err != nil {
			return Bundle{}, err
		}
	}
	return b, nil
}

// marshal writes every value as a JSON string, the one form of YAML text that
// is the same for every reader whatever it holds, and proves it by reading it.
func (b Bundle) marshal() ([]byte, error) {
	var out bytes.Buffer
	line := func(indent, key, value string) {
		if value != "" {
			fmt.Fprintf(&out, "%s%s: %s\n", indent, quote(key), quote(value))
		}
	}
	if b.Git != (Git{}) {
		out.WriteString("git:\n")
		line("  ", "url", b.Git.URL)
		line("  ", "token", b.Git.Token)
		line("  ", "username", b.Git.Username)
		line("  ", "ssh_private_key", b.Git.SSHPrivateKey)
		line("  ", "ssh_known_hosts", b.Git.SSHKnownHosts)
	}
	if len(b.Env) > 0 {
		out.WriteString("env:\n")
		for _, name := range slices.Sorted(maps.Keys(b.Env)) {
			fmt.Fprintf(&out, "  %s: %s\n", quote(name), quote(b.Env[name]))
		}
	}
	line("", "claude_settings_json", b.ClaudeSettingsJSON)
	again, err := parseBundle(out.Bytes())
	if err != nil || !again.equal(b) {
		return nil, agentlab.Errorf(agentlab.CodeInvalid, "a value holds what cannot be kept; it must be text in UTF-8")
	}
	return out.Bytes(), nil
}

func quote(s string) string {
	var b strings.Builder
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	_ = e.Encode(s) // of a string, into memory
	return strings.TrimSuffix(b.String(), "\n")
}

func (b Bundle) equal(o Bundle) bool {
	if b.Git != o.Git || b.ClaudeSettingsJSON != o.ClaudeSettingsJSON || len(b.Env) != len(o.Env) {
		return false
	}
	for k, v := range b.Env {
		if w, ok := o.Env[k]; !ok || v != w {
			return false
		}
	}
	return true
}

// fixedKeys are the keys that are no environment variables, and the places of
// their values.
func (b *Bundle) fixedKeys() map[string]*string {
	return map[string]*string{
		"git.url":              &b.Git.URL,
		"git.token":            &b.Git.Token,
		"git.username":         &b.Git.Username,
		"git.ssh_private_key":  &b.Git.SSHPrivateKey,
		"git.ssh_known_hosts":  &b.Git.SSHKnownHosts,
		"claude_settings_json": &b.ClaudeSettingsJSON,
	}
}

// Keys returns the names of the values in b, sorted: "env.NAME" for an
// environment variable, else a name such as "git.token".
func (b Bundle) Keys() []string {
	keys := []string{}
	for name, v := range b.fixedKeys() {
		if *v != "" {
			keys = append(keys, name)
		}
	}
	for name := range b.Env {
		keys = append(keys, "env."+name)
	}
	slices.Sort(keys)
	return keys
}

// Values returns what must never be shown: every value but git's URL and
// username and the known hosts, which are no secrets, and none that is empty.
// Of Claude's settings it is every text in them, because that is how a leak
// would look.
func (b Bundle) Values() []string {
	out := []string{b.Git.Token, b.Git.SSHPrivateKey}
	for _, v := range b.Env {
		out = append(out, v)
	}
	if b.ClaudeSettingsJSON != "" {
		out = append(out, b.ClaudeSettingsJSON)
		var v any
		if json.Unmarshal([]byte(b.ClaudeSettingsJSON), &v) == nil {
			out = appendTexts(out, v)
		}
	}
	slices.Sort(out)
	out = slices.Compact(out)
	if len(out) > 0 && out[0] == "" {
		out = out[1:]
	}
	return out
}

// appendTexts collects the strings under the key env of settings, the only
// place that is meant for credentials; other settings are words like "allow".
func appendTexts(out []string, v any) []string {
	settings, _ := v.(map[string]any)
	env, _ := settings["env"].(map[string]any)
	for _, e := range env {
		if s, ok := e.(string); ok {
			out = append(out, s)
		}
	}
	return out
}

var envName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,127}$`)

func checkEnvName(name string) error {
	if !envName.MatchString(name) {
		return agentlab.Errorf(agentlab.CodeInvalid, "%q is not the name of an environment variable", name).WithField("env." + name)
	}
	switch name {
	case "PATH", "HOME", "USER", "SHELL", "LD_PRELOAD", "LD_LIBRARY_PATH", "BASH_ENV", "ENV", "IFS":
		return agentlab.Errorf(agentlab.CodeInvalid, "%s is no secret and would break the agent's environment", name).WithField("env." + name)
	}
	return nil
}

// set stores value under key.
func (b *Bundle) set(key, value string) error {
	if err := checkValue(key, value); err != nil {
		return err
	}
	if name, ok := strings.CutPrefix(key, "env."); ok {
		if err := checkEnvName(name); err != nil {
			return err
		}
		if b.Env == nil {
			b.Env = map[string]string{}
		}
		b.Env[name] = value
		return nil
	}
	p, ok := b.fixedKeys()[key]
	if !ok {
		return b.unknownKey(key)
	}
	*p = value
	return nil
}

// unset removes the value under key, not_found when there is none.
func (b *Bundle) unset(key string) error {
	if name, ok := strings.CutPrefix(key, "env."); ok {
		if _, there := b.Env[name]; !there {
			return notSet(key)
		}
		delete(b.Env, name)
		return nil
	}
	p, ok := b.fixedKeys()[key]
	switch {
	case !ok:
		return b.unknownKey(key)
	case *p == "":
		return notSet(key)
	}
	*p = ""
	return nil
}

func notSet(key string) error {
	return agentlab.Errorf(agentlab.CodeNotFound, "%s is not set", key).WithHint("see 'agentlab secrets list'")
}

func (b *Bundle) unknownKey(key string) error {
	var known []string
	for name := range b.fixedKeys() {
		known = append(known, name)
	}
	slices.Sort(known)
	e := agentlab.Errorf(agentlab.CodeInvalid, "unknown key %q", key).WithField("key")
	if near := strictyaml.Nearest(key, known); near != "" {
		return e.WithHint("did you mean %q?", near)
	}
	if envName.MatchString(key) {
		return e.WithHint("for an environment variable, use env.%s", key)
	}
	return e.WithHint("use env.NAME, or one of %s", strings.Join(known, ", "))
}

func checkValue(key, value string) error {
	switch {
	case value == "":
		return agentlab.Errorf(agentlab.CodeInvalid, "the value is empty").WithField(key).WithHint("to remove it: agentlab secrets unset %s", key)
	case len(value) > MaxValueBytes:
		return agentlab.Errorf(agentlab.CodeInvalid, "the value has %d bytes, more than %d", len(value), MaxValueBytes).WithField(key)
	case strings.ContainsRune(value, 0):
		return agentlab.Errorf(agentlab.CodeInvalid, "the value holds a NUL byte").WithField(key)
	case key == "claude_settings_json" && !isJSONObject(value):
		return agentlab.Errorf(agentlab.CodeInvalid, "the value is not a JSON object").WithField(key)
	case key == "git.ssh_private_key" && !strings.Contains(value, "PRIVATE KEY-----"):
		return agentlab.Errorf(agentlab.CodeInvalid, "the value is not an SSH private key").WithField(key)
	case (key == "git.token" || key == "git.username" || key == "git.url") && strings.ContainsAny(value, "\r\n"):
		return agentlab.Errorf(agentlab.CodeInvalid, "the value has more than one line").WithField(key)
	}
	if key == "git.url" {
		return agentlab.ValidateRepoURL(value)
	}
	return nil
}

func isJSONObject(s string) bool {
	var v map[string]json.RawMessage
	return json.Unmarshal([]byte(s), &v) == nil && v != nil
}

package job

import (
	"encoding/json"
	"maps"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/secret"
)

// provider is a model API that an agent can use, and the environment variables
// by which the agent finds it.
type provider struct {
	keys []string // a credential is in one of these
	base []string // the endpoint's URL is in one of these, else it is def
	def  string
}

var (
	anthropic = provider{[]string{"ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "CLAUDE_CODE_OAUTH_TOKEN"}, []string{"ANTHROPIC_BASE_URL"}, "https://api.anthropic.com"}
	openAI    = provider{[]string{"OPENAI_API_KEY", "CODEX_API_KEY"}, []string{"OPENAI_BASE_URL"}, "https://api.openai.com"}
	gemini    = provider{[]string{"GEMINI_API_KEY", "GOOGLE_API_KEY"}, []string{"GOOGLE_GEMINI_BASE_URL"}, "https://generativelanguage.googleapis.com"}
)

// agentModel says which model APIs an agent can use.
type agentModel struct {
	providers []provider
	// anyway says that the agent may have a model without any of the keys, for
	// instance by a configuration file of the repository.
	anyway bool
	// elsewhere are variables that choose a model whose endpoint is not known.
	elsewhere []string
}

// agentModels has no entry for an agent without a model.
var agentModels = map[string]agentModel{
	"claude": {providers: []provider{anthropic}, elsewhere: []string{"CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX", "CLAUDE_CODE_USE_FOUNDRY"}},
	"codex":  {providers: []provider{openAI}},
	"gemini": {providers: []provider{gemini}, elsewhere: []string{"GOOGLE_GENAI_USE_VERTEXAI", "GOOGLE_GENAI_USE_GCA", "GOOGLE_APPLICATION_CREDENTIALS"}},
	"opencode": {anyway: true, elsewhere: []string{"OPENCODE_CONFIG", "OPENCODE_CONFIG_CONTENT"}, providers: []provider{
		anthropic, openAI, gemini,
		{keys: []string{"OPENROUTER_API_KEY"}, def: "https://openrouter.ai"},
		{keys: []string{"OPENCODE_API_KEY"}, def: "https://opencode.ai"},
	}},
}

// modelNeeds is what an agent needs to reach its model.
type modelNeeds struct {
	known bool     // keys are all that the agent takes: without one of them it cannot work
	keys  []string // environment variables that may hold its credential
	found bool     // one of them is set
	hosts []string // endpoints, "host:port"; nil when they are not known
	local string   // an endpoint on the loopback of the sandbox, "host:port"; usually ""
}

// agentEnv is the environment that a secrets bundle gives an agent. Of a
// reference that is not resolved only the name is known.
type agentEnv struct {
	values map[string]string
	refs   map[string]bool
	opaque bool // part of the environment is not known, not even by name
	helper bool // a program of the settings makes the credential
}

func envOf(agent string, b secret.Bundle, references []string) agentEnv {
	e := agentEnv{values: map[string]string{}, refs: map[string]bool{}}
	for _, key := range references {
		if name, ok := strings.CutPrefix(key, "env."); ok {
			e.refs[name] = true
		}
	}
	if agent == "claude" {
		e.opaque = slices.Contains(references, "claude_settings_json")
		var settings struct {
			Env          map[string]any `json:"env"`
			APIKeyHelper string         `json:"apiKeyHelper"`
		}
		_ = json.Unmarshal([]byte(b.ClaudeSettingsJSON), &settings) // was checked when it was stored
		for name, v := range settings.Env {
			if s, ok := v.(string); ok {
				e.values[name] = s
			}
		}
		e.helper = settings.APIKeyHelper != ""
	}
	maps.Copy(e.values, b.Env)
	return e
}

func (e agentEnv) has(name string) bool { return e.values[name] != "" || e.refs[name] }

// needsOf returns what an agent with that environment needs of its model, and
// the name of a variable that should hold an http or https URL and does not.
func needsOf(agent string, e agentEnv) (n modelNeeds, bad string) {
	m, ok := agentModels[agent]
	if !ok || e.opaque || slices.ContainsFunc(m.elsewhere, e.has) {
		return modelNeeds{}, ""
	}
	n.known = !m.anyway
	n.found = e.helper
	for _, p := range m.providers {
		n.keys = append(n.keys, p.keys...)
		if slices.ContainsFunc(p.keys, e.has) {
			n.found = true
		} else if m.anyway {
			continue // without a key it is not this one that the agent uses
		}
		host, unset := "", true
		for _, name := range p.base {
			if !e.has(name) {
				continue
			}
			unset = false
			if e.refs[name] {
				return modelNeeds{known: n.known, keys: n.keys, found: n.found}, ""
			}
			if host, ok = hostOfURL(e.values[name]); !ok {
				bad = name
			}
		}
		if unset {
			host, _ = hostOfURL(p.def)
		}
		switch {
		case onLoopback(host):
			n.local = host
		case host != "":
			n.hosts = append(n.hosts, host)
		}
	}
	return n, bad
}

// hostOfURL returns the "host:port" of an http, https or ssh URL.
func hostOfURL(text string) (host string, ok bool) {
	u, err := url.Parse(strings.TrimSpace(text))
	if err != nil || u.Hostname() == "" {
		return "", false
	}
	port, known := map[string]string{"http": "80", "https": "443", "ssh": "22"}[u.Scheme]
	if !known {
		return "", false
	}
	if p := u.Port(); p != "" {
		port = p
	}
	name := strings.TrimSuffix(strings.ToLower(u.Hostname()), ".")
	return net.JoinHostPort(name, port), true
}

// onLoopback reports whether a connection from a sandbox to host ("host:port")
// stays in the sandbox.
func onLoopback(host string) bool {
	name, _, err := net.SplitHostPort(host)
	if err != nil {
		return false
	}
	a, err := netip.ParseAddr(name)
	return name == "localhost" || strings.HasSuffix(name, ".localhost") || err == nil && (a.Unmap().IsLoopback() || a.IsUnspecified())
}

// forgeOf returns the "host:port" that a job's repository is cloned from and
// pushed to; "" when it has none.
func forgeOf(repoURL string) string {
	if repoURL == "" {
		return ""
	}
	if !strings.Contains(repoURL, "://") { // user@host:path
		host, _, _ := strings.Cut(repoURL, ":")
		repoURL = "ssh://" + host
	}
	host, _ := hostOfURL(repoURL)
	if onLoopback(host) {
		return ""
	}
	return host
}

// ModelHosts returns the endpoints of the model that a job's agent uses
// with the secrets that it gets.
func ModelHosts(j agentlab.Job, b secret.Bundle) []string {
	n, _ := needsOf(j.Agent, envOf(j.Agent, b, nil))
	return n.hosts
}

package job

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strings"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/egress"
	"github.com/agentlab-vm/agentlab/internal/secret"
)

// provider is a model API that an agent can use, and the environment variables
// by which the agent finds it.
type provider struct {
	keys []string // one of these has the credential
	base []string // one of these has the endpoint's URL; default def
	def  string
	// onlyWithKey means that the agent does not use the provider without its key.
	onlyWithKey bool
}

var (
	anthropic = provider{keys: []string{"ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "CLAUDE_CODE_OAUTH_TOKEN"}, base: []string{"ANTHROPIC_BASE_URL"}, def: "https://api.anthropic.com"}
	openAI    = provider{keys: []string{"OPENAI_API_KEY", "CODEX_API_KEY"}, base: []string{"OPENAI_BASE_URL"}, def: "https://api.openai.com"}
	chatGPT   = provider{keys: []string{"CODEX_AUTH_JSON"}, def: "https://chatgpt.com", onlyWithKey: true}
	gemini    = provider{keys: []string{"GEMINI_API_KEY", "GOOGLE_API_KEY"}, base: []string{"GOOGLE_GEMINI_BASE_URL"}, def: "https://generativelanguage.googleapis.com"}
)

// agentModel lists the model APIs that an agent can use.
type agentModel struct {
	providers []provider
	// worksWithoutKey means that the agent may have a model without any of the keys,
	// for example from a configuration file of the repository.
	worksWithoutKey bool
	// otherModelEnv are variables that select a model whose endpoint is not known.
	otherModelEnv []string
}

// agentModels has no entry for an agent without a model.
var agentModels = map[string]agentModel{
	"claude": {providers: []provider{anthropic}, otherModelEnv: []string{"CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX", "CLAUDE_CODE_USE_FOUNDRY"}},
	"codex":  {providers: []provider{openAI, chatGPT}},
	"gemini": {providers: []provider{gemini}, otherModelEnv: []string{"GOOGLE_GENAI_USE_VERTEXAI", "GOOGLE_GENAI_USE_GCA", "GOOGLE_APPLICATION_CREDENTIALS"}},
	"opencode": {worksWithoutKey: true, otherModelEnv: []string{"OPENCODE_CONFIG", "OPENCODE_CONFIG_CONTENT"}, providers: []provider{
		anthropic, openAI, gemini,
		{keys: []string{"OPENROUTER_API_KEY"}, def: "https://openrouter.ai"},
		{keys: []string{"OPENCODE_API_KEY"}, def: "https://opencode.ai"},
	}},
}

// modelNeeds is what an agent needs to reach its model.
type modelNeeds struct {
	known        bool     // keys is complete: without one of them the agent cannot work
	keys         []string // environment variables that may hold its credential
	found        bool     // one of them is set
	hosts        []string // endpoints, "host:port"; nil when they are not known
	loopbackHost string   // an endpoint on the loopback of the sandbox, "host:port"; usually ""
}

// agentEnv is the environment that an agent gets from a secrets bundle. For an
// unresolved reference only the name is known.
type agentEnv struct {
	values     map[string]string
	refs       map[string]bool
	unknownEnv bool // part of the environment is not known, not even by name
	helper     bool // a program in the settings returns the credential
}

func envOf(agent string, b secret.Bundle, references []string) agentEnv {
	e := agentEnv{values: map[string]string{}, refs: map[string]bool{}}
	for _, key := range references {
		if name, ok := strings.CutPrefix(key, "env."); ok {
			e.refs[name] = true
		}
	}
	if agent == "claude" {
		e.unknownEnv = slices.Contains(references, "claude_settings_json")
		var settings struct {
			Env          map[string]any `json:"env"`
			APIKeyHelper string         `json:"apiKeyHelper"`
		}
		_ = json.Unmarshal([]byte(b.ClaudeSettingsJSON), &settings) // checked when it was stored
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
	if !ok || e.unknownEnv || slices.ContainsFunc(m.otherModelEnv, e.has) {
		return modelNeeds{}, ""
	}
	n.known = !m.worksWithoutKey
	n.found = e.helper
	keyed := slices.ContainsFunc(m.providers, func(p provider) bool { return slices.ContainsFunc(p.keys, e.has) })
	for _, p := range m.providers {
		n.keys = append(n.keys, p.keys...)
		if slices.ContainsFunc(p.keys, e.has) {
			n.found = true
		} else if m.worksWithoutKey || p.onlyWithKey || keyed {
			continue // without a key the agent does not use this provider
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
			n.loopbackHost = host
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

// preflight checks that a job's agent has a key and that its profile's policy
// allows its model. Without either the job would only run until its time
// limit. References are not resolved; only their names are checked. Codes:
// preflight; for an unreadable secrets bundle, those of Secrets.
func (s *Service) preflight(ctx context.Context, j agentlab.Job, prof agentlab.Profile, skip bool) error {
	var plain secret.Bundle
	var references []string
	var err error
	if prof.SecretsBundle != "" {
		if plain, references, err = s.cfg.Secrets.Outline(ctx, prof.SecretsBundle); err != nil {
			return err
		}
	}
	if skip {
		return nil
	}
	n, bad := needsOf(j.Agent, envOf(j.Agent, plain, references))
	if bad != "" {
		return preflightError(prof, "env."+bad+" of secrets bundle "+prof.SecretsBundle+" is not an http or https URL").
			WithHint("set it again: %s", setSecret(prof, bad))
	}
	if n.known && !n.found {
		return missingKeyError(j, prof, n.keys)
	}
	if n.loopbackHost != "" && len(n.hosts) == 0 {
		return loopbackModelError(j, prof, n.loopbackHost)
	}
	return checkModelAllowed(j, prof, n.hosts, s.cfg.Profiles.Usable())
}

// rejectedKey names the keys of a job's agent, which its model rejects, and the command
// that replaces them.
func (s *Service) rejectedKey(ctx context.Context, j agentlab.Job) string {
	const what = "the model rejects the key of the agent"
	prof, err := s.cfg.Profiles.Use(j.Profile)
	if err != nil || prof.SecretsBundle == "" {
		return what
	}
	plain, references, err := s.cfg.Secrets.Outline(ctx, prof.SecretsBundle)
	if err != nil {
		return what
	}
	e, keys := envOf(j.Agent, plain, references), []string(nil)
	for _, p := range agentModels[j.Agent].providers {
		for _, key := range p.keys {
			if e.has(key) {
				keys = append(keys, "env."+key)
			}
		}
	}
	if len(keys) == 0 { // of a program in the settings, or of a file
		return what
	}
	return fmt.Sprintf("the model rejects %s of secrets bundle %s: store another key with '%s'", strings.Join(keys, " or "), prof.SecretsBundle, login(j.Agent, prof))
}

func preflightError(prof agentlab.Profile, what string) *agentlab.Error {
	return agentlab.Errorf(agentlab.CodePreflight, "profile %s: %s", prof.Name, what)
}

// anywayHint is the end of the hints of errors that a user may want to ignore.
const anywayHint = "; --no-preflight starts the job without this check"

func setSecret(prof agentlab.Profile, name string) string {
	return "agentlab secrets set " + bundleFlag(prof) + "env." + name
}

// login returns the command that stores a credential of an agent that cannot work
// without one. All of these have a login of their name.
func login(agent string, prof agentlab.Profile) string {
	return "agentlab login " + bundleFlag(prof) + agent
}

func bundleFlag(prof agentlab.Profile) string {
	if prof.SecretsBundle == secret.DefaultBundle {
		return ""
	}
	return "--bundle " + prof.SecretsBundle + " "
}

func missingKeyError(j agentlab.Job, prof agentlab.Profile, keys []string) error {
	if prof.SecretsBundle == "" {
		return preflightError(prof, "agent "+j.Agent+" has no key for its model: the profile names no secrets bundle").
			WithHint("add secrets_bundle to the profile, or choose another with --profile%s", anywayHint)
	}
	return preflightError(prof, "agent "+j.Agent+" has no key for its model: secrets bundle "+prof.SecretsBundle+" has none of "+strings.Join(keys, ", ")).
		WithHint("%s, or %s%s", login(j.Agent, prof), setSecret(prof, keys[0]), anywayHint)
}

// loopbackModelError rejects a job whose model is at a loopback address. For the agent
// that is its own sandbox, in which no model runs unless the image contains one.
func loopbackModelError(j agentlab.Job, prof agentlab.Profile, loopbackHost string) error {
	e := preflightError(prof, "agent "+j.Agent+" cannot reach its model: "+loopbackHost+" is the sandbox itself, not this host")
	port := loopbackHost[strings.LastIndexByte(loopbackHost, ':')+1:]
	here := net.JoinHostPort(egress.HostName, port)
	t, err := egress.ParseTarget(here)
	if err != nil {
		return e.WithHint("%s%s", agentlab.HintOf(err), anywayHint)
	}
	if p, err := egress.New(prof.Network); err == nil && p.Explain(t).Allow {
		return e.WithHint("the profile opens that port of this host: write %s into the URL%s", here, anywayHint)
	}
	return e.WithHint("%s%s", cmp.Or(openHint(egress.Explanation{Target: t, Rule: egress.RuleLoopback}), "choose another port"), anywayHint)
}

// checkModelAllowed rejects a job if its profile's policy denies every endpoint of
// its model. The hint names those of all profiles that allow it.
func checkModelAllowed(j agentlab.Job, prof agentlab.Profile, hosts []string, all []agentlab.Profile) error {
	p, err := egress.New(prof.Network)
	if err != nil || len(hosts) == 0 {
		return err
	}
	var denied egress.Explanation
	for _, host := range hosts {
		t, err := egress.ParseTarget(host)
		if err != nil {
			return preflightError(prof, "agent "+j.Agent+" cannot reach its model: "+err.Error()).WithHint("%s", agentlab.HintOf(err))
		}
		e := p.Explain(t)
		if e.Allow {
			return nil
		}
		denied = e
	}
	e := preflightError(prof, "agent "+j.Agent+" cannot reach its model: "+denied.Target.String()+" is denied by rule "+denied.Rule+" ("+egress.Means(denied.Rule)+")")
	choose := "choose another profile with --profile"
	if names := allowing(denied.Target, prof.SecretsBundle, all); len(names) > 0 {
		choose = "choose a profile that allows it with --profile: " + strings.Join(names, ", ")
	}
	if denied.Rule == egress.RuleAllowlist {
		return e.WithHint("add %s to network.allow of the profile, or %s%s", denied.Target, choose, anywayHint)
	}
	if hint := openHint(denied); hint != "" {
		return e.WithHint("%s, or %s%s", hint, choose, anywayHint)
	}
	return e.WithHint("%s, or change its network; see 'agentlab policy explain %s --profile %s'%s", choose, denied.Target, prof.Name, anywayHint)
}

// maxAllowing is how many profiles a hint names.
const maxAllowing = 5

// allowing returns the names of profiles with a secrets bundle whose policy allows a target.
func allowing(t egress.Target, bundle string, all []agentlab.Profile) (names []string) {
	for _, prof := range all {
		if prof.SecretsBundle != bundle {
			continue
		}
		if p, err := egress.New(prof.Network); err == nil && p.Explain(t).Allow && len(names) < maxAllowing {
			names = append(names, prof.Name)
		}
	}
	return names
}

// openHint returns a hint on how the operator can allow a private model
// endpoint; "" if the denied target cannot be allowed.
func openHint(denied egress.Explanation) string {
	t := denied.Target
	host := strings.TrimSuffix(t.Name, ".")
	switch denied.Rule {
	case egress.RuleLoopback:
		host = egress.HostName
	case egress.RulePrivate, egress.RuleCGNAT, egress.RuleULA, egress.RuleTailnet:
		if host == "" {
			host = t.Addr.String()
		}
	default:
		return ""
	}
	if _, err := egress.ParsePrivate(agentlab.PrivateTarget{Host: host, Port: int(t.Port), Reason: "-"}); err != nil || t.Proto != egress.TCP {
		return ""
	}
	hint := fmt.Sprintf("if it is yours, open it in the profile, network.private: {host: %s, port: %d, reason: our model gateway}", host, t.Port)
	if host == egress.HostName {
		hint = "a sandbox calls this host " + host + ": write that into the URL, and " + hint
	}
	return hint
}

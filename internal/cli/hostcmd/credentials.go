package hostcmd

import (
	"encoding/json"
	"strings"

	"github.com/agentlab-vm/agentlab"

	"github.com/agentlab-vm/agentlab/internal/work"
)

// vendor is an issuer of credentials that 'agentlab login' stores.
type vendor struct {
	name  string
	title string
	// shapes are the credentials that it issues, by what they begin with. The first
	// that matches is used.
	shapes []credential
	// gateway is the variable for a credential of another endpoint, and baseURL and
	// model are the variables for that endpoint. Empty if there are none.
	gateway, baseURL, model string
	own                     *ownLogin
	steps                   string // how to get a credential
}

// ownLogin is a program of the vendor that issues a credential.
type ownLogin struct {
	command []string
	explain string // what it does, for the question whether to run it
	// prints reports that the program prints the credential for the user, who then
	// enters it. Otherwise it is its output, or the file of env.
	prints bool
	env    string // variable with a directory for the program's files
	file   string // in that directory
	config map[string]string
}

// credential is a kind of credential.
type credential struct {
	prefix string
	key    string // of the bundle; "" if it must not be stored
	kind   string
	scope  string // what its holder can do
	revoke string // where to revoke it
}

const (
	envCodexAuth   = "env.CODEX_AUTH_JSON"
	keyGitURL      = "git.url"
	keyGitToken    = "git.token"
	keyGitHubToken = "env.GH_TOKEN" //nolint:gosec // a name
	keyOpenCode    = "env.OPENCODE_CONFIG_CONTENT"
	anthropicKeys  = "https://platform.claude.com/settings/keys"
	githubFine     = "https://github.com/settings/personal-access-tokens"
)

var vendors = []vendor{
	{
		name: "claude", title: "Claude Code",
		gateway: "env.ANTHROPIC_AUTH_TOKEN", baseURL: "env.ANTHROPIC_BASE_URL", model: "env.ANTHROPIC_MODEL",
		steps: `A token of your Claude subscription: run 'claude setup-token' where Claude Code is
installed, for example in a sandbox: agentlab exec -t -i SANDBOX claude setup-token
An API key: create one with a spending limit at ` + anthropicKeys,
		own: &ownLogin{command: []string{"claude", "setup-token"}, prints: true, explain: "it opens your browser and prints a token"},
		shapes: []credential{
			{"sk-ant-oat", "env.CLAUDE_CODE_OAUTH_TOKEN", "subscription token", "uses models with your Claude subscription, for one year; it cannot read or change your account", "the settings of your account at https://claude.ai (Claude Code)"},
			{"sk-ant-api", "env.ANTHROPIC_API_KEY", "API key", "uses models and files of its workspace, at the cost of your API account", anthropicKeys},
			{"sk-ant-admin", "", "admin key", "manages your organization", anthropicKeys},
			{"sk-ant-ort", "", "refresh token", "renews itself and other tokens", ""},
		},
	},
	{
		name: "codex", title: "Codex",
		gateway: "env.OPENAI_API_KEY", baseURL: "env.OPENAI_BASE_URL", model: "env.OPENAI_MODEL",
		steps: `A ChatGPT subscription: 'codex login --device-auth', if Codex is installed here.
An API key: create one with a budget at https://platform.openai.com/api-keys`,
		own: &ownLogin{
			command: []string{"codex", "login", "--device-auth"}, env: "CODEX_HOME", file: "auth.json",
			config:  map[string]string{"config.toml": "cli_auth_credentials_store = \"file\"\n"},
			explain: "it prints an address and a code for your browser, and signs in to ChatGPT for sandboxes only; your own sign-in here is not read",
		},
		shapes: []credential{
			{"{", envCodexAuth, "ChatGPT sign-in", "uses Codex with your ChatGPT plan, and renews itself", "'Log out of all devices' in the security settings of https://chatgpt.com"},
			{"sk-admin-", "", "admin key", "manages your organization", "https://platform.openai.com/settings/organization/admin-keys"},
			{"sk-", "env.OPENAI_API_KEY", "API key", "uses the API of its project, as far as its permissions allow, at the cost of your API account", "https://platform.openai.com/api-keys"},
		},
	},
	{
		name: "gemini", title: "Gemini CLI",
		gateway: "env.GEMINI_API_KEY", baseURL: "env.GOOGLE_GEMINI_BASE_URL", model: "env.GEMINI_MODEL",
		steps: `An API key: create one at https://aistudio.google.com/apikey`,
		shapes: []credential{
			{"AIza", "env.GEMINI_API_KEY", "API key", "uses the Google APIs that the key allows; restrict it to the Generative Language API", "https://aistudio.google.com/apikey"},
			{"AQ.", "env.GEMINI_API_KEY", "API key", "uses the Gemini API of its project", "https://aistudio.google.com/apikey"},
		},
	},
	{
		name: "opencode", title: "OpenCode with a model of your own", gateway: keyOpenCode, baseURL: keyOpenCode, model: keyOpenCode,
		steps: `OpenCode uses the credentials of claude, codex and gemini. For a gateway or a local
model with the OpenAI API, use --base-url and --model.`,
	},
	{
		name: "github", title: "GitHub",
		steps: `A fine-grained token: create one at ` + githubFine + `
for only the repositories that agents work on, with 'Contents: read and write', and
an expiry. It cannot delete or administer a repository.`,
		own: &ownLogin{command: []string{"gh", "auth", "token"}, explain: "it prints the token of your own sign-in of gh, which can change and may delete everything that you can; a fine-grained token is safer"},
		shapes: []credential{
			{"github_pat_", keyGitToken, "fine-grained token", "does what you allowed for the repositories that you selected, until it expires", githubFine},
			{"ghp_", keyGitToken, "classic token", "reads and writes every repository that you can, as far as its scopes allow; a fine-grained token is safer", "https://github.com/settings/tokens"},
			{"gho_", keyGitToken, "token of gh", "reads and writes every repository that you can, with the scopes of 'gh auth status'; a fine-grained token is safer", "https://github.com/settings/applications (GitHub CLI)"},
			{"ghs_", keyGitToken, "token of an app", "does what the app may, for at most an hour", "it expires"},
			{"ghu_", keyGitToken, "user token of an app", "does what the app may for you, for at most 8 hours", "https://github.com/settings/apps/authorizations"},
			{"ghr_", "", "refresh token", "renews itself and other tokens", ""},
		},
	},
}

// keys returns the keys of a bundle that login can set for the vendor.
func (v vendor) keys() (all []string) {
	seen := map[string]bool{"": true}
	add := func(keys ...string) {
		for _, key := range keys {
			if !seen[key] {
				seen[key] = true
				all = append(all, key)
			}
		}
	}
	for _, s := range v.shapes {
		add(s.key)
	}
	add(v.gateway, v.baseURL, v.model)
	if v.name == "github" {
		add(keyGitURL, keyGitHubToken)
	}
	return all
}

// secretKeys returns the keys of credentials.
func (v vendor) secretKeys() (all []string) {
	for _, key := range v.keys() {
		if key != v.baseURL && key != v.model && key != keyGitURL || key == keyOpenCode {
			all = append(all, key)
		}
	}
	return all
}

func findVendor(name string) (vendor, error) {
	for _, v := range vendors {
		if v.name == name {
			return v, nil
		}
	}
	return vendor{}, work.UsageErrorf("unknown service %q", name).WithHint("use one of %s", strings.Join(vendorNames(), ", "))
}

func vendorNames() (names []string) {
	for _, v := range vendors {
		names = append(names, v.name)
	}
	return names
}

// maxCredential limits a credential that is not a file, in bytes.
const maxCredential = 4096

// classify returns what kind of credential a value is. The value of another endpoint
// can have any shape. Errors do not contain the value.
func (v vendor) classify(value string, otherEndpoint bool) (credential, error) {
	bad := func(format string, args ...any) error {
		return agentlab.Errorf(agentlab.CodeInvalid, format, args...).WithHint("see how to get one with 'agentlab login %s --help'", v.name)
	}
	isFile := strings.HasPrefix(value, "{") && v.own != nil && v.own.file != ""
	switch {
	case value == "":
		return credential{}, bad("the credential is empty")
	case isFile && !otherEndpoint:
		if err := checkCodexAuth(value); err != nil {
			return credential{}, bad("%w", err)
		}
	case len(value) > maxCredential:
		return credential{}, bad("the credential has %d bytes, more than %d", len(value), maxCredential)
	case strings.ContainsFunc(value, func(r rune) bool { return r <= ' ' || r > '~' }):
		return credential{}, bad("the credential contains a blank, a line break or another character that none has: it was not copied correctly")
	}
	if otherEndpoint {
		return credential{key: v.gateway, kind: "credential of a gateway", scope: "does what the gateway allows", revoke: "your gateway"}, nil
	}
	issuer, s := findShape(value, v)
	const shortest = 20
	switch {
	case s.prefix == "" && v.baseURL != "":
		return credential{}, bad("this is not a credential of %s; for a gateway, use --base-url", v.title)
	case s.prefix == "":
		return credential{}, bad("this is not a credential of %s", v.title)
	case s.key == "":
		return credential{}, agentlab.Errorf(agentlab.CodeDenied, "this is a %s, which %s: an agent must not have it", s.kind, s.scope).
			WithHint("see which credential it needs with 'agentlab login %s --help'", v.name)
	case issuer.name != v.name:
		return credential{}, agentlab.Errorf(agentlab.CodeInvalid, "this is not a credential of %s, but the %s of %s", v.title, s.kind, issuer.title).
			WithHint("agentlab login %s", issuer.name)
	case len(value) < shortest:
		return credential{}, bad("the %s is too short: it was not copied completely", s.kind)
	}
	return s, nil
}

// findShape returns the shape with the longest prefix of a value, and its issuer. Files
// are those of v.
func findShape(value string, v vendor) (issuer vendor, best credential) {
	for _, other := range vendors {
		for _, s := range other.shapes {
			isFile := s.prefix == "{"
			if strings.HasPrefix(value, s.prefix) && len(s.prefix) > len(best.prefix) && (!isFile || other.name == v.name) {
				issuer, best = other, s
			}
		}
	}
	return issuer, best
}

// checkCodexAuth checks the file auth.json of Codex.
func checkCodexAuth(text string) error {
	var auth struct {
		Tokens struct {
			ID      string `json:"id_token"`
			Access  string `json:"access_token"`
			Refresh string `json:"refresh_token"`
		} `json:"tokens"`
	}
	if len(text) > maxSecretBytes || json.Unmarshal([]byte(text), &auth) != nil || auth.Tokens.Access == "" || auth.Tokens.ID == "" || auth.Tokens.Refresh == "" {
		return agentlab.Errorf(agentlab.CodeInvalid, "this is not the file auth.json of a ChatGPT sign-in of Codex")
	}
	return nil
}

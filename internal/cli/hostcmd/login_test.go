package hostcmd

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/creack/pty"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/cli"
)

// A credential that an agent must not have, that is of another service or that was not
// copied correctly is refused, and no error contains it.
func TestClassifyCredential(t *testing.T) {
	long := strings.Repeat("x", 40)
	auth := `{"tokens":{"id_token":"a","access_token":"b","refresh_token":"c"}}`
	for name, tc := range map[string]struct {
		service, value string
		other          bool
		key            string // of the bundle
		want           string // in the error
	}{
		"subscription":          {"claude", "sk-ant-oat01-" + long, false, "env.CLAUDE_CODE_OAUTH_TOKEN", ""},
		"console key":           {"claude", "sk-ant-api03-" + long, false, "env.ANTHROPIC_API_KEY", ""},
		"admin key":             {"claude", "sk-ant-admin01-" + long, false, "", "an agent must not have it"},
		"refresh token":         {"claude", "sk-ant-ort01-" + long, false, "", "an agent must not have it"},
		"gateway":               {"claude", "sk-litellm", true, "env.ANTHROPIC_AUTH_TOKEN", ""},
		"unknown":               {"claude", long, false, "", "for a gateway, use --base-url"},
		"cut off":               {"claude", "sk-ant-oat01-x", false, "", "too short"},
		"two lines":             {"claude", "sk-ant-oat01-" + long + "\n" + long, false, "", "not copied correctly"},
		"two lines, gateway":    {"claude", "sk-\n" + long, true, "", "not copied correctly"},
		"not ASCII":             {"claude", "sk-ant-api03-…" + long, false, "", "not copied correctly"},
		"huge":                  {"claude", "sk-ant-api03-" + strings.Repeat("x", maxCredential), false, "", "more than"},
		"empty":                 {"claude", "", false, "", "empty"},
		"key of another agent":  {"codex", "sk-ant-api03-" + long, false, "", "the API key of Claude Code"},
		"token of a forge":      {"claude", "ghp_" + long, false, "", "the classic token of GitHub"},
		"project key":           {"codex", "sk-proj-" + long, false, "env.OPENAI_API_KEY", ""},
		"admin key of OpenAI":   {"codex", "sk-admin-" + long, false, "", "an agent must not have it"},
		"ChatGPT":               {"codex", auth, false, "env.CODEX_AUTH_JSON", ""},
		"other JSON":            {"codex", `{"tokens":{}}`, false, "", "not the file auth.json"},
		"API key in auth.json":  {"codex", `{"OPENAI_API_KEY":"sk-` + long + `"}`, false, "", "not the file auth.json"},
		"Gemini":                {"gemini", "AIza" + long, false, "env.GEMINI_API_KEY", ""},
		"newer Gemini":          {"gemini", "AQ." + long, false, "env.GEMINI_API_KEY", ""},
		"JSON for Gemini":       {"gemini", `{"type":"service_account"}`, false, "", "not a credential"},
		"fine-grained":          {"github", "github_pat_" + long, false, "git.token", ""},
		"classic":               {"github", "ghp_" + long, false, "git.token", ""},
		"of gh":                 {"github", "gho_" + long, false, "git.token", ""},
		"refresh token, GitHub": {"github", "ghr_" + long, false, "", "an agent must not have it"},
		"OpenCode":              {"opencode", "none", true, "env.OPENCODE_CONFIG_CONTENT", ""},
	} {
		v, err := findVendor(tc.service)
		if err != nil {
			t.Fatal(err)
		}
		cred, err := v.classify(tc.value, tc.other)
		switch {
		case tc.want == "" && (err != nil || cred.key != tc.key || cred.kind == "" || cred.scope == "" || cred.revoke == ""):
			t.Errorf("%s: %+v, %v", name, cred, err)
		case tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)):
			t.Errorf("%s: %v does not contain %q", name, err, tc.want)
		case err != nil && strings.Contains(err.Error()+agentlab.HintOf(err), "xxxx"):
			t.Errorf("%s: the error contains the credential: %v", name, err)
		}
	}
}

// Every vendor's keys can be listed and removed, and what login stores is among them.
func TestVendorKeys(t *testing.T) {
	for _, v := range vendors {
		keys := v.keys()
		for _, key := range v.secretKeys() {
			if !slices.Contains(keys, key) {
				t.Errorf("%s: %s", v.name, key)
			}
		}
		if len(v.secretKeys()) == 0 {
			t.Errorf("%s has no key", v.name)
		}
		for _, s := range v.shapes {
			cred := s
			for _, kv := range v.values(cred, "x", loginOptions{baseURL: "http://x", model: "m", gh: true}) {
				if kv.key != "" && !slices.Contains(append(keys, keyGitHubToken), kv.key) {
					t.Errorf("%s stores %s, which logout does not remove", v.name, kv.key)
				}
			}
		}
	}
}

func TestLoginEndpoints(t *testing.T) {
	for name, tc := range map[string]struct {
		service string
		opt     loginOptions
		want    string // the URL, or a part of the error
	}{
		"gateway":            {"claude", loginOptions{baseURL: "http://10.1.2.3:4000"}, "http://10.1.2.3:4000"},
		"with a slash":       {"claude", loginOptions{baseURL: "https://gw.corp/"}, "https://gw.corp"},
		"with a version":     {"claude", loginOptions{baseURL: "http://10.1.2.3:4000/v1/"}, "http://10.1.2.3:4000"},
		"below a path":       {"claude", loginOptions{baseURL: "http://10.1.2.3/anthropic"}, "http://10.1.2.3/anthropic"},
		"without a version":  {"codex", loginOptions{baseURL: "http://10.1.2.3:4000"}, "http://10.1.2.3:4000/v1"},
		"codex":              {"codex", loginOptions{baseURL: "http://10.1.2.3:4000/openai/v1"}, "http://10.1.2.3:4000/openai/v1"},
		"gemini":             {"gemini", loginOptions{baseURL: "http://10.1.2.3:4000/v1beta"}, "http://10.1.2.3:4000"},
		"opencode":           {"opencode", loginOptions{baseURL: "http://host.agentlab.internal:11434", model: "qwen3"}, "http://host.agentlab.internal:11434/v1"},
		"opencode, no model": {"opencode", loginOptions{baseURL: "http://host.agentlab.internal:11434"}, "requires --base-url and --model"},
		"loopback":           {"codex", loginOptions{baseURL: "http://127.0.0.1:11434/v1"}, "127.0.0.1 is the sandbox itself"},
		"IPv6 loopback":      {"codex", loginOptions{baseURL: "http://[::1]:11434/v1"}, "::1 is the sandbox itself"},
		"localhost":          {"codex", loginOptions{baseURL: "http://localhost:11434/v1"}, "localhost is the sandbox itself"},
		"password":           {"claude", loginOptions{baseURL: "http://me:hunter2@gw.corp"}, "not an http or https URL"},
		"query":              {"claude", loginOptions{baseURL: "http://gw.corp/?key=x"}, "not an http or https URL"},
		"scheme":             {"claude", loginOptions{baseURL: "ftp://gw.corp"}, "not an http or https URL"},
		"no URL":             {"claude", loginOptions{baseURL: "gw.corp:4000"}, "not an http or https URL"},
		"forge":              {"github", loginOptions{baseURL: "https://ghe.corp"}, "for agents"},
		"gh for an agent":    {"claude", loginOptions{gh: true}, "--gh is for github"},
		"no program":         {"gemini", loginOptions{withCLI: true}, "no program"},
		"own and gateway":    {"claude", loginOptions{withCLI: true, baseURL: "http://gw.corp"}, "cannot be used together"},
	} {
		v, err := findVendor(tc.service)
		if err != nil {
			t.Fatal(err)
		}
		_, err = v.checkFlags(&tc.opt)
		if got := tc.opt.baseURL; err == nil && got != tc.want {
			t.Errorf("%s: %s, not %s", name, got, tc.want)
		}
		if err != nil && (!strings.Contains(err.Error(), tc.want) || strings.Contains(err.Error(), "hunter2")) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestOpenCodeConfig(t *testing.T) {
	var config struct {
		Model    string
		Provider map[string]struct {
			Options struct{ BaseURL, APIKey string }
			Models  map[string]struct{ Name string }
		}
	}
	if err := json.Unmarshal([]byte(openCodeConfig("http://h/v1", `a"b`, "k")), &config); err != nil {
		t.Fatal(err)
	}
	p := config.Provider["agentlab"]
	if config.Model != `agentlab/a"b` || p.Options.BaseURL != "http://h/v1" || p.Options.APIKey != "k" || p.Models[`a"b`].Name != `a"b` {
		t.Errorf("%+v", config)
	}
}

// program puts a shell script into a directory that is first in PATH.
func program(t *testing.T, name, script string) {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+script), 0o700); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
}

// The program of a service runs only when the user agrees, and its files never touch the
// user's own.
func TestOwnLogin(t *testing.T) {
	home := t.TempDir()
	t.Setenv("CODEX_HOME", home)
	program(t, "codex", `[ "$1 $2" = "login --device-auth" ] && grep -q file "$CODEX_HOME/config.toml" || exit 3
echo "Open https://auth.example/ and enter AB-CD"
printf '{"tokens":{}}' > "$CODEX_HOME/auth.json"
echo "$CODEX_HOME" > "`+home+`/used"`)
	var stderr bytes.Buffer
	a := cli.App{Stdin: strings.NewReader(""), Stdout: &bytes.Buffer{}, Stderr: &stderr}
	v, err := findVendor("codex")
	if err != nil {
		t.Fatal(err)
	}
	if _, remove, err := privateMemory(); err != nil {
		t.Skip(err)
	} else {
		remove()
	}
	value, err := readOwnLogin(t.Context(), &a, v.own)
	if err != nil || value != `{"tokens":{}}` || !strings.Contains(stderr.String(), "AB-CD") {
		t.Errorf("%q, %v, %s", value, err, stderr.String())
	}
	used, err := os.ReadFile(filepath.Join(home, "used"))
	if err != nil || strings.TrimSpace(string(used)) == home {
		t.Fatalf("%s, %v", used, err)
	}
	if _, err := os.Stat(strings.TrimSpace(string(used))); !os.IsNotExist(err) {
		t.Errorf("the files of the sign-in are left: %v", err)
	}
	if _, err := os.Stat(filepath.Join(home, "auth.json")); !os.IsNotExist(err) {
		t.Errorf("the user's own sign-in was changed: %v", err)
	}
	program(t, "codex", "exit 1")
	if _, err := readOwnLogin(t.Context(), &a, v.own); agentlab.CodeOf(err) != agentlab.CodeUnavailable {
		t.Error(err)
	}
}

// At a terminal, the value is not shown, and the token of gh is read only after a yes.
func TestCredentialPrompt(t *testing.T) {
	program(t, "gh", "echo gho_own; touch "+filepath.Join(t.TempDir(), "ran"))
	v, err := findVendor("github")
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		typed, want string
		opt         loginOptions
	}{
		"no":       {"n\ngithub_pat_typed\n", "github_pat_typed", loginOptions{}},
		"yes":      {"y\n", "gho_own", loginOptions{}},
		"with cli": {"", "gho_own", loginOptions{withCLI: true}},
	} {
		ptmx, tty, err := pty.Open()
		if err != nil {
			t.Fatal(err)
		}
		typed := strings.SplitAfter(tc.typed, "\n")
		var stderr answering
		stderr.when = map[string]string{"[y/N] ": typed[0]}
		if len(typed) > 1 {
			stderr.when["): "] = typed[1]
		}
		stderr.send = func(s string) { _, _ = ptmx.WriteString(s) }
		a := cli.App{Stdin: tty, Stdout: &bytes.Buffer{}, Stderr: &stderr}
		value, err := readCredential(t.Context(), &a, v, tc.opt)
		if err != nil || value != tc.want {
			t.Errorf("%s: %q, %v", name, value, err)
		}
		if text := stderr.buf.String(); strings.Contains(text, "gho_own") || strings.Contains(text, "github_pat_typed") || !strings.Contains(text, "cannot delete or administer") {
			t.Errorf("%s: prints %s", name, text)
		}
		_, _ = ptmx.Close(), tty.Close()
	}
	a := cli.App{Stdin: strings.NewReader(" github_pat_piped\n"), Stderr: &bytes.Buffer{}}
	if value, err := readCredential(t.Context(), &a, v, loginOptions{}); err != nil || value != "github_pat_piped" {
		t.Errorf("%q, %v", value, err)
	}
}

// answering is a terminal's output whose reader answers prompts, each once.
type answering struct {
	buf  bytes.Buffer
	when map[string]string
	send func(string)
}

func (w *answering) Write(p []byte) (int, error) {
	w.buf.Write(p)
	for prompt, answer := range w.when {
		if strings.HasSuffix(w.buf.String(), prompt) {
			delete(w.when, prompt)
			w.send(answer)
		}
	}
	return len(p), nil
}

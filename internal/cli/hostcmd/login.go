package hostcmd

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/bounded"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/work"
)

// loginOptions are the flags of login.
type loginOptions struct {
	bundle, baseURL, model string
	withCLI, gh, status    bool
}

// signIn is the result of login.
type signIn struct {
	Service string   `json:"service"`
	Bundle  string   `json:"bundle"`
	Kind    string   `json:"kind"`
	Keys    []string `json:"keys"` // of the bundle, that were set
	Scope   string   `json:"scope"`
	Revoke  string   `json:"revoke"`
	BaseURL string   `json:"base_url,omitempty"`
	Model   string   `json:"model,omitempty"`
	Allowed []string `json:"allowed_by,omitempty"` // profiles that allow the endpoint
}

// signedIn is a line of login --status.
type signedIn struct {
	Service  string   `json:"service"`
	Bundle   string   `json:"bundle"`
	SignedIn bool     `json:"signed_in"`
	Keys     []string `json:"keys"`
}

func loginCmd(a *cli.App) *cobra.Command {
	var opt loginOptions
	cmd := &cobra.Command{
		Use: "login SERVICE", Short: "Store a credential for agents: claude, codex, gemini, opencode, github", Args: cobra.MaximumNArgs(1),
		Long: `Store a credential of a service in an encrypted bundle. Sandboxes whose profile has
this bundle receive it. The value is read from a prompt without echo, or from standard
input; never from the command line. Earlier credentials of the service in the bundle
are removed. Credentials that this machine has for itself are not read, unless you
confirm it or use --with-cli.

` + vendorHelp() + `
With --base-url and --model, the agent uses a gateway of your company or a model on
your own machines. Without a credential on standard input, or with an empty one, none
is used. A private address must also be opened in a profile:
  network: {private: [{host: 10.1.2.3, port: 4000, reason: LiteLLM}]}
A sandbox calls this machine ` + hostName + `.`,
		Example: `  agentlab login claude
  agentlab login codex --with-cli                       # ChatGPT, in your browser
  agentlab login github < token.txt
  agentlab login claude --base-url http://10.1.2.3:4000 --model claude-sonnet
  agentlab login opencode --base-url http://` + hostName + `:11434 --model qwen3-coder < /dev/null
  agentlab login --status`,
		ValidArgs: vendorNames(),
	}
	flags := cmd.Flags()
	flags.StringVar(&opt.bundle, "bundle", "default", "name of the bundle")
	flags.StringVar(&opt.baseURL, "base-url", "", "URL of a gateway or of your own model")
	flags.StringVar(&opt.model, "model", "", "model that the agent uses")
	flags.BoolVar(&opt.withCLI, "with-cli", false, "run the program of the service on this machine without asking: 'claude setup-token', 'codex login' or 'gh auth token'")
	flags.BoolVar(&opt.gh, "gh", false, "github: also for the program gh in sandboxes, as GH_TOKEN")
	flags.BoolVar(&opt.status, "status", false, "print which services have a credential")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		if opt.status {
			return loginStatus(ctx, a, c, opt.bundle, args)
		}
		if len(args) == 0 {
			return work.UsageErrorf("SERVICE is missing").WithHint("use one of %s, or --status", strings.Join(vendorNames(), ", "))
		}
		v, err := findVendor(args[0])
		if err != nil {
			return err
		}
		return login(ctx, a, c, v, opt)
	})
	return cmd
}

// vendorHelp is the part of the help about the services.
func vendorHelp() string {
	var b strings.Builder
	for _, v := range vendors {
		fmt.Fprintf(&b, "%s (%s)\n  %s\n", v.name, v.title, strings.ReplaceAll(v.steps, "\n", "\n  "))
	}
	return b.String()
}

// hostName is the name by which sandboxes reach ports of this machine that a profile
// opens.
const hostName = "host.agentlab.internal"

// noCredential is sent to an endpoint that needs none: agents require a value.
const noCredential = "none"

func login(ctx context.Context, a *cli.App, c *client.Client, v vendor, opt loginOptions) error {
	base, err := v.checkFlags(&opt)
	if err != nil {
		return err
	}
	value, err := readCredential(ctx, a, v, opt)
	if err != nil {
		return err
	}
	if value == "" && base != nil {
		value = noCredential
	}
	cred, err := v.classify(value, base != nil)
	if err != nil {
		return err
	}
	res := signIn{Service: v.name, Bundle: opt.bundle, Kind: cred.kind, Scope: cred.scope, Revoke: cred.revoke, BaseURL: opt.baseURL, Model: opt.model}
	set := v.values(cred, value, opt)
	for _, kv := range set {
		res.Keys = append(res.Keys, kv.key)
	}
	if err := replaceCredentials(ctx, a, c, v, opt.bundle, set); err != nil {
		return err
	}
	if base != nil {
		if res.Allowed, err = allowedBy(ctx, c, hostPort(base)); err != nil {
			return err
		}
	}
	return a.Emit(res, func() error { describeLogin(a, v, res, base); return nil })
}

// checkFlags checks and completes the URL of another endpoint, nil if there is none.
func (v vendor) checkFlags(opt *loginOptions) (*url.URL, error) {
	switch {
	case opt.gh && v.name != "github":
		return nil, work.UsageErrorf("--gh is for github")
	case opt.withCLI && v.own == nil:
		return nil, work.UsageErrorf("%s has no program that issues a credential", v.title)
	case opt.withCLI && opt.baseURL != "":
		return nil, work.UsageErrorf("--with-cli and --base-url cannot be used together")
	case (opt.baseURL != "" || opt.model != "") && v.baseURL == "":
		return nil, work.UsageErrorf("--base-url and --model are for agents")
	case v.name == "opencode" && (opt.baseURL == "" || opt.model == ""):
		return nil, work.UsageErrorf("opencode requires --base-url and --model").WithHint("for a model of a vendor: agentlab login claude, codex or gemini")
	case opt.baseURL == "":
		return nil, nil
	}
	u, err := url.Parse(opt.baseURL)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		return nil, work.UsageErrorf("--base-url is not an http or https URL without user, query and fragment").WithHint("for example http://10.1.2.3:4000")
	}
	if ip := net.ParseIP(u.Hostname()); u.Hostname() == "localhost" || ip != nil && (ip.IsLoopback() || ip.IsUnspecified()) {
		return nil, work.UsageErrorf("in a sandbox, %s is the sandbox itself", u.Hostname()).
			WithHint("this machine is %s there: --base-url %s://%s:%s%s", hostName, u.Scheme, hostName, portOf(u), u.Path)
	}
	// Claude Code and Gemini CLI add the version of the API, the others do not.
	at := strings.TrimRight(u.Path, "/")
	switch versioned := v.name == "codex" || v.name == "opencode"; {
	case versioned && at == "":
		at = "/v1"
	case !versioned:
		at = strings.TrimSuffix(strings.TrimSuffix(at, "/v1beta"), "/v1")
	}
	u.Path = at
	opt.baseURL = u.String()
	return u, nil
}

func portOf(u *url.URL) string {
	if u.Scheme == "https" {
		return cmp.Or(u.Port(), "443")
	}
	return cmp.Or(u.Port(), "80")
}

func hostPort(u *url.URL) string { return net.JoinHostPort(u.Hostname(), portOf(u)) }

// readCredential gets a credential from the service's own program, if the user agrees,
// or else from a prompt or standard input.
func readCredential(ctx context.Context, a *cli.App, v vendor, opt loginOptions) (string, error) {
	in, tty := work.TerminalOf(a.Stdin)
	run := opt.withCLI
	if tty && !a.NoInput {
		fmt.Fprintf(a.Stderr, "%s\n\n", v.steps)
		if v.own != nil && !run && opt.baseURL == "" {
			if _, err := exec.LookPath(v.own.command[0]); err == nil {
				run = a.Confirm(fmt.Sprintf("Run '%s' now? It is on this machine; %s.", strings.Join(v.own.command, " "), v.own.explain))
			}
		}
	}
	if run {
		value, err := readOwnLogin(ctx, a, v.own)
		if err != nil || !v.own.prints {
			return value, err
		}
	}
	if !tty {
		value, err := cli.ReadLimited(a.Stdin, "standard input", maxSecretBytes)
		return strings.TrimSpace(value), err
	}
	if a.NoInput {
		return "", work.UsageErrorf("--no-input requires the credential on standard input").WithHint("run: agentlab login %s < FILE", v.name)
	}
	hint := ""
	if opt.baseURL != "" {
		hint = "; empty for none"
	}
	fmt.Fprintf(a.Stderr, "credential for %s (not shown%s): ", v.title, hint)
	value, err := term.ReadPassword(int(in.Fd()))
	fmt.Fprintln(a.Stderr)
	return strings.TrimSpace(string(value)), err
}

// readOwnLogin runs a program of a service. What it prints or stores is the result, unless
// the user has to enter it.
func readOwnLogin(ctx context.Context, a *cli.App, own *ownLogin) (string, error) {
	name := strings.Join(own.command, " ")
	out := &bounded.Head{Max: maxSecretBytes}
	cmd := exec.CommandContext(ctx, own.command[0], own.command[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = a.Stdin, a.Stderr, a.Stderr
	file := ""
	switch {
	case own.env != "":
		dir, remove, err := privateMemory()
		if err != nil {
			return "", err
		}
		defer remove()
		for base, text := range own.config {
			if err := os.WriteFile(filepath.Join(dir, base), []byte(text), 0o600); err != nil {
				return "", err
			}
		}
		cmd.Env, file = append(os.Environ(), own.env+"="+dir), filepath.Join(dir, own.file)
	case !own.prints:
		cmd.Stdout = out
	}
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			return "", ctx.Err()
		}
		e := agentlab.Errorf(agentlab.CodeUnavailable, "'%s' failed, nothing was stored: %w", name, err)
		if errors.Is(err, exec.ErrNotFound) {
			return "", e.WithHint("install it, or enter a credential: the steps are in 'agentlab login --help'")
		}
		return "", e
	}
	if file == "" {
		return strings.TrimSpace(out.String()), nil
	}
	text, err := cli.ReadFile(file, maxSecretBytes)
	if err != nil {
		return "", agentlab.Errorf(agentlab.CodeUnavailable, "'%s' stored no credential: %w", name, err)
	}
	return strings.TrimSpace(text), nil
}

// secretValue is an entry of a bundle.
type secretValue struct{ key, value string }

// values returns the entries for a credential, the credential last.
func (v vendor) values(cred credential, value string, opt loginOptions) (set []secretValue) {
	if v.name == "opencode" {
		return []secretValue{{keyOpenCode, openCodeConfig(opt.baseURL, opt.model, value)}}
	}
	if opt.baseURL != "" {
		set = append(set, secretValue{v.baseURL, opt.baseURL})
	}
	if opt.model != "" {
		set = append(set, secretValue{v.model, opt.model})
	}
	if cred.key == keyGitToken {
		set = append(set, secretValue{keyGitURL, "https://github.com/"})
	}
	if opt.gh {
		set = append(set, secretValue{keyGitHubToken, value})
	}
	return append(set, secretValue{cred.key, value})
}

// openCodeConfig returns the configuration of OpenCode for an endpoint with the OpenAI
// API.
func openCodeConfig(base, model, key string) string {
	type object map[string]any
	text, _ := json.Marshal(object{ // of strings
		"model": "agentlab/" + model,
		"provider": object{"agentlab": object{
			"npm": "@ai-sdk/openai-compatible", "name": "AgentLab",
			"options": object{"baseURL": base, "apiKey": key},
			"models":  object{model: object{"name": model}},
		}},
	})
	return string(text)
}

// replaceCredentials removes what a bundle has of a service and sets its new entries.
// The old ones are removed first, so that no credential is ever sent to an endpoint
// that it is not for, even if the command is killed.
func replaceCredentials(ctx context.Context, a *cli.App, c *client.Client, v vendor, bundle string, set []secretValue) error {
	have, err := keysOf(ctx, c, bundle)
	if err != nil {
		return err
	}
	if v.name == "github" && slices.Contains(have, keyGitURL) {
		if err := onlyGitHub(ctx, c, bundle); err != nil {
			return err
		}
	}
	for _, key := range v.keys() {
		if slices.Contains(have, key) {
			if err := c.UnsetSecret(ctx, bundle, key); err != nil {
				return err
			}
		}
	}
	for _, kv := range set {
		if err := c.SetSecret(ctx, bundle, kv.key, kv.value, false); err != nil {
			a.Progressf("note: bundle %s has no complete credential for %s now; run the command again", bundle, v.title)
			return err
		}
	}
	return nil
}

// onlyGitHub returns an error if the git credential of a bundle is for another server.
func onlyGitHub(ctx context.Context, c *client.Client, bundle string) error {
	all, err := c.ShowSecrets(ctx, bundle, true)
	if err != nil {
		return err
	}
	for _, e := range all.Items {
		u, err := url.Parse(e.Value)
		if e.Key == keyGitURL && (e.Reference != "" || err != nil || u.Host != "github.com") {
			return agentlab.Errorf(agentlab.CodeConflict, "bundle %s has the git credential of another server", bundle).
				WithHint("use another bundle: agentlab login github --bundle NAME; or remove it: agentlab secrets unset --bundle %s git.url", bundle)
		}
	}
	return nil
}

// keysOf returns the keys of a bundle; none if it does not exist.
func keysOf(ctx context.Context, c *client.Client, bundle string) ([]string, error) {
	all, err := c.SecretKeys(ctx, bundle)
	if agentlab.CodeOf(err) == agentlab.CodeNotFound {
		return nil, nil
	}
	return all.Items, err
}

// allowedBy returns the profiles whose network policy allows a target.
func allowedBy(ctx context.Context, c *client.Client, target string) ([]string, error) {
	profiles, err := c.Profiles(ctx)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, p := range profiles.Items {
		check, err := c.CheckProfilePolicy(ctx, p.Name, target)
		if err == nil && check.Allow {
			names = append(names, p.Name)
		}
	}
	return names, nil
}

// describeLogin prints what was stored, and what it can do.
func describeLogin(a *cli.App, v vendor, r signIn, base *url.URL) {
	a.Progressf("%s: %s stored in bundle %s (%s)", v.title, r.Kind, r.Bundle, strings.Join(r.Keys, " "))
	a.Progressf("  an agent that has it %s\n  revoke it at %s", r.Scope, r.Revoke)
	a.Progressf("  a session that runs gets it at its next start\n  → agentlab stop && agentlab start")
	switch {
	case base == nil:
	case len(r.Allowed) > 0:
		a.Progressf("  profiles that allow %s: %s", hostPort(base), strings.Join(r.Allowed, ", "))
	default:
		a.Progressf("note: no profile allows %s yet; if it is yours, open it in a profile of your own:\n  network: {private: [{host: %s, port: %s, reason: our models}]}", hostPort(base), base.Hostname(), portOf(base))
	}
}

// loginStatus prints which services have a credential in a bundle. For one service, the
// exit code is 1 if it has none.
func loginStatus(ctx context.Context, a *cli.App, c *client.Client, bundle string, args []string) error {
	have, err := keysOf(ctx, c, bundle)
	if err != nil {
		return err
	}
	all := api.List[signedIn]{Items: []signedIn{}}
	for _, v := range vendors {
		if len(args) > 0 && args[0] != v.name {
			continue
		}
		s := signedIn{Service: v.name, Bundle: bundle, Keys: []string{}}
		for _, key := range v.keys() {
			if slices.Contains(have, key) {
				s.Keys = append(s.Keys, key)
				s.SignedIn = s.SignedIn || slices.Contains(v.secretKeys(), key)
			}
		}
		all.Items = append(all.Items, s)
	}
	if len(all.Items) == 0 {
		_, err := findVendor(args[0])
		return err
	}
	err = a.Emit(all, func() error {
		t := cli.NewTable(a.Stdout, "SERVICE", "STATE", "BUNDLE", "KEYS")
		for _, s := range all.Items {
			state := "none"
			if s.SignedIn {
				state = "stored"
			}
			t.Row(s.Service, state, s.Bundle, cli.OrDash(strings.Join(s.Keys, " ")))
		}
		return t.Flush()
	})
	if err == nil && len(args) > 0 && !all.Items[0].SignedIn {
		return work.ExitStatus(cli.ExitFailure)
	}
	return err
}

func logoutCmd(a *cli.App) *cobra.Command {
	var bundle string
	cmd := &cobra.Command{
		Use: "logout SERVICE", Short: "Remove the credential of a service from a bundle", Args: cli.ExactArgs("SERVICE"),
		Long: `Remove what 'agentlab login' has stored for a service. Sandboxes that run keep what
they have received. The credential itself stays valid: revoke it at the service.`,
		Example:   "  agentlab logout claude",
		ValidArgs: vendorNames(),
	}
	cmd.Flags().StringVar(&bundle, "bundle", "default", "name of the bundle")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		v, err := findVendor(args[0])
		if err != nil {
			return err
		}
		have, err := keysOf(ctx, c, bundle)
		if err != nil {
			return err
		}
		if v.name == "github" && slices.Contains(have, keyGitURL) {
			if err := onlyGitHub(ctx, c, bundle); err != nil {
				return err
			}
		}
		removed := signedIn{Service: v.name, Bundle: bundle, Keys: []string{}}
		revoke := map[string]bool{}
		for _, key := range slices.Backward(v.keys()) { // settings after credentials in keys
			if !slices.Contains(have, key) {
				continue
			}
			if err := c.UnsetSecret(ctx, bundle, key); err != nil {
				return err
			}
			removed.Keys = append(removed.Keys, key)
			for _, s := range v.shapes {
				if s.key == key {
					revoke[s.revoke] = true
				}
			}
		}
		if len(removed.Keys) == 0 {
			return agentlab.Errorf(agentlab.CodeNotFound, "bundle %s has no credential for %s", bundle, v.title).WithHint("agentlab login --status --bundle %s", bundle)
		}
		return a.Emit(removed, func() error {
			a.Progressf("%s: removed %s from bundle %s", v.title, strings.Join(removed.Keys, " "), bundle)
			for _, s := range v.shapes {
				if revoke[s.revoke] {
					delete(revoke, s.revoke)
					a.Progressf("  the %s is still valid; revoke it at %s", s.kind, s.revoke)
				}
			}
			return nil
		})
	})
	return cmd
}

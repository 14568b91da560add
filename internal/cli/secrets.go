package cli

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
)

// maxSecretBytes bounds one secret value.
const maxSecretBytes = 256 << 10

func (a *App) secretsCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use: "secrets", Short: "Keep the secrets that jobs get: keys of models, git credentials",
		Long: `Keep the secrets that jobs get. They lie in encrypted bundles; a profile names
its bundle, and a job gets of that bundle what it has a use for, once, in
memory.

KEY is env.NAME for an environment variable of the agent, ssh_keys.HOST for an
SSH key of the agent, or one of git.url, git.token, git.username,
git.ssh_private_key, git.ssh_known_hosts, claude_settings_json,
artifact.endpoint and artifact.token. Values are read from standard input, a
file or a prompt, never from the command line.

Instead of a value a bundle may hold a reference, which is resolved when a job
gets it: op://VAULT/ITEM/FIELD (1Password), env:NAME (the daemon's
environment), file:/PATH (a private file), cmd:PROGRAM ARG… (what it prints).`,
		Example: `  agentlab secrets set env.ANTHROPIC_API_KEY          # asks
  agentlab secrets set git.token < token.txt
  agentlab secrets set env.OPENAI_API_KEY --ref "op://agents/openai/key"
  agentlab secrets list`,
	}
	var bundle string
	for _, c := range []*cobra.Command{
		a.secretsShowCmd(&bundle), a.secretsSetCmd(&bundle), a.secretsUnsetCmd(&bundle), a.secretsEditCmd(&bundle), a.secretsValidateCmd(&bundle),
	} {
		c.Flags().StringVar(&bundle, "bundle", "default", "bundle")
		cmd.AddCommand(c)
	}
	cmd.AddCommand(a.secretsInitCmd(), a.secretsCreateCmd(), a.secretsListCmd(), a.secretsRotateCmd())
	return cmd
}

func (a *App) secretsInitCmd() *cobra.Command {
	return &cobra.Command{
		Use: "init", Short: "Make the key to which bundles are encrypted, and tell who can open them", Args: exactArgs(),
		RunE: a.run(func(ctx context.Context, c *client.Client, _ []string) error {
			v, err := c.InitSecrets(ctx)
			if err != nil {
				return err
			}
			return a.printVault(v)
		}),
	}
}

// printVault tells who can open the bundles.
func (a *App) printVault(v api.SecretVault) error {
	if a.json {
		return a.printJSON(v)
	}
	fmt.Fprintf(a.Stdout, "public key: %s\n", plain(v.PublicKey))
	for _, r := range v.Recipients {
		fmt.Fprintf(a.Stdout, "recipient:  %s\n", plain(r))
	}
	return nil
}

func (a *App) secretsCreateCmd() *cobra.Command {
	return &cobra.Command{
		Use: "create NAME", Short: "Make an empty bundle", Args: exactArgs("NAME"),
		RunE: a.run(func(ctx context.Context, c *client.Client, args []string) error {
			if err := c.CreateSecrets(ctx, args[0]); err != nil {
				return err
			}
			a.progressf("bundle %s is made; a profile uses it by 'secrets_bundle: %s'", args[0], args[0])
			return nil
		}),
	}
}

func (a *App) secretsListCmd() *cobra.Command {
	return &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List the bundles and their keys, never the values", Args: exactArgs(),
		RunE: a.run(func(ctx context.Context, c *client.Client, _ []string) error {
			all, err := c.Secrets(ctx)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(all)
			}
			t := newTable(a.Stdout, "BUNDLE", "FORMAT", "KEYS", "PROBLEM")
			for _, b := range all.Items {
				t.row(b.Name, b.Format, dash(strings.Join(b.Keys, " ")), dash(b.Problem))
			}
			return t.flush()
		}),
	}
}

func (a *App) secretsShowCmd(bundle *string) *cobra.Command {
	var reveal bool
	cmd := &cobra.Command{
		Use: "show", Short: "Show what a bundle holds; without --reveal no values", Args: exactArgs(),
		RunE: a.run(func(ctx context.Context, c *client.Client, _ []string) error {
			all, err := c.ShowSecrets(ctx, *bundle, reveal)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(all)
			}
			for _, e := range all.Items {
				switch {
				case e.Reference != "":
					fmt.Fprintf(a.Stdout, "%s from %s\n", plain(e.Key), plain(e.Reference))
				case reveal:
					fmt.Fprintf(a.Stdout, "%s = %s\n", plain(e.Key), inQuotes(e.Value))
				default:
					fmt.Fprintf(a.Stdout, "%s is set\n", plain(e.Key))
				}
			}
			return nil
		}),
	}
	cmd.Flags().BoolVar(&reveal, "reveal", false, "with the values; references are not resolved")
	return cmd
}

// inQuotes writes a value as one line that drives no terminal.
func inQuotes(s string) string {
	text, _ := json.Marshal(s) // of a string
	return plain(string(text))
}

func (a *App) secretsSetCmd(bundle *string) *cobra.Command {
	var ref, file string
	cmd := &cobra.Command{
		Use: "set KEY", Short: "Set one value, read from standard input, a file or a prompt", Args: exactArgs("KEY"),
		Long: `Set one value. It is read from standard input, from --file, or asked for without
echo on a terminal; one newline at its end is dropped. Whatever it looks like,
it is kept as it is: only --ref sets a reference.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			value := ref
			if ref == "" {
				var err error
				if value, err = a.readSecret(args[0], file); err != nil {
					return err
				}
			}
			return a.run(func(ctx context.Context, c *client.Client, args []string) error {
				_, known := c.SecretKeys(ctx, *bundle)
				if err := c.SetSecret(ctx, *bundle, args[0], value, ref != ""); err != nil {
					return err
				}
				if agentlab.CodeOf(known) == agentlab.CodeNotFound {
					a.progressf("bundle %s is made", *bundle)
				}
				a.progressf("%s is set in bundle %s", args[0], *bundle)
				return nil
			})(cmd, args)
		},
	}
	cmd.Flags().StringVar(&ref, "ref", "", "where to get the value from when it is delivered: op://…, env:…, file:… or cmd:…")
	cmd.Flags().StringVar(&file, "file", "", "file that holds the value")
	cmd.MarkFlagsMutuallyExclusive("ref", "file")
	return cmd
}

func (a *App) secretsUnsetCmd(bundle *string) *cobra.Command {
	return &cobra.Command{
		Use: "unset KEY", Short: "Remove one value", Args: exactArgs("KEY"),
		RunE: a.run(func(ctx context.Context, c *client.Client, args []string) error {
			if err := c.UnsetSecret(ctx, *bundle, args[0]); err != nil {
				return err
			}
			a.progressf("%s is removed from bundle %s", args[0], *bundle)
			return nil
		}),
	}
}

func (a *App) secretsRotateCmd() *cobra.Command {
	var r api.SecretRotate
	cmd := &cobra.Command{
		Use: "rotate", Short: "Make a new key and encrypt every bundle again", Args: exactArgs(),
		Long: `Make a new key, change who else can open the bundles, and encrypt every bundle
again. Nothing has to stop meanwhile: until all are done the older key stays
valid. Interrupted, it is to be run again. Copies that were made of a bundle
before can still be opened with the older key: change the secrets themselves
if that has leaked.`,
		RunE: a.run(func(ctx context.Context, c *client.Client, _ []string) error {
			v, err := c.RotateSecrets(ctx, r)
			if err != nil {
				return err
			}
			a.progressf("%d bundles are encrypted again", len(v.Bundles))
			if len(v.Kept) > 0 {
				a.progressf("%d older keys stay, because sops bundles are encrypted to them: run 'sops updatekeys' on those, then rotate again", len(v.Kept))
			}
			return a.printVault(v)
		}),
	}
	cmd.Flags().StringArrayVar(&r.Add, "add-recipient", nil, "public key that can open the bundles, too: age1…, ssh-ed25519 … or ssh-rsa …")
	cmd.Flags().StringArrayVar(&r.Remove, "remove-recipient", nil, "public key that shall not open them any more")
	return cmd
}

func (a *App) secretsValidateCmd(bundle *string) *cobra.Command {
	var v api.SecretValidate
	cmd := &cobra.Command{
		Use: "validate", Short: "Check file modes, keys and bundles, and with --resolve the references", Args: exactArgs(),
		Long: `Check that the folder of secrets and its files are private, that every bundle
(or the one of --bundle) can be opened, and that what it holds is well formed.
With --resolve every reference is asked for its value, which is dropped.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if cmd.Flags().Changed("bundle") {
				v.Bundle = *bundle
			}
			return a.run(func(ctx context.Context, c *client.Client, _ []string) error {
				check, err := c.ValidateSecrets(ctx, v)
				if err != nil {
					return err
				}
				return a.printCheck(check)
			})(cmd, args)
		},
	}
	cmd.Flags().BoolVar(&v.Resolve, "resolve", false, "ask every reference for its value")
	return cmd
}

// printCheck tells what is wrong with bundles; then the exit code is 1.
func (a *App) printCheck(check api.SecretCheck) error {
	if a.json {
		if err := a.printJSON(check); err != nil {
			return err
		}
	} else {
		for _, f := range check.Findings {
			where := strings.Trim(f.Bundle+" "+f.Key, " ")
			if where != "" {
				where += ": "
			}
			fmt.Fprintln(a.Stdout, plain(where+f.Problem))
			if f.Hint != "" {
				fmt.Fprintln(a.Stdout, plain("  → "+f.Hint))
			}
		}
		a.progressf("%d bundles checked, %d problems", len(check.Checked), len(check.Findings))
	}
	if len(check.Findings) > 0 {
		return statusError(exitFailure)
	}
	return nil
}

// readSecret reads a file, else asks on a terminal without echo, else reads
// all of standard input; less one trailing newline.
func (a *App) readSecret(key, file string) (string, error) {
	f, tty := terminal(a.Stdin)
	if file != "" || !tty {
		if file == "" {
			file = "-"
		}
		v, err := a.readLimited(file, maxSecretBytes)
		if err == nil && len(v) > maxSecretBytes {
			err = agentlab.Errorf(agentlab.CodeInvalid, "the value is longer than %d bytes", maxSecretBytes)
		}
		return strings.TrimSuffix(v, "\n"), err
	}
	if a.noInput {
		return "", usageErrorf("the value must come from standard input under --no-input").WithHint("agentlab secrets set %s < FILE", key)
	}
	fmt.Fprintf(a.Stderr, "%s: ", key)
	v, err := term.ReadPassword(int(f.Fd())) //nolint:gosec // a file descriptor fits an int
	fmt.Fprintln(a.Stderr)
	return string(v), err
}

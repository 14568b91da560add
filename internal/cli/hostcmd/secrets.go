package hostcmd

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
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/work"
)

// maxSecretBytes limits one secret value.
const maxSecretBytes = 256 << 10

func secretsCmd(a *cli.App) *cobra.Command {
	cmd := &cobra.Command{
		Use: "secrets", Short: "Manage secrets for jobs: API keys, git credentials",
		Long: `Manage secrets for jobs. Secrets are stored in encrypted bundles. A profile sets
its bundle, and a job receives the secrets of that bundle that it needs, once and
in memory only.

KEY is env.NAME for an environment variable of the agent, ssh_keys.HOST for an
SSH key of the agent, or one of git.url, git.token, git.username,
git.ssh_private_key, git.ssh_known_hosts, claude_settings_json,
artifact.endpoint and artifact.token. Values are read from standard input, a
file or a prompt, never from the command line.

A bundle can contain a reference instead of a value. It is resolved when a job
receives it: op://VAULT/ITEM/FIELD (1Password), env:NAME (environment of the
daemon), file:/PATH (a private file), cmd:PROGRAM ARG… (output of a command).`,
		Example: `  agentlab secrets set env.ANTHROPIC_API_KEY          # prompts
  agentlab secrets set git.token < token.txt
  agentlab secrets set env.OPENAI_API_KEY --ref "op://agents/openai/key"
  agentlab secrets list`,
	}
	var bundle string
	for _, c := range []*cobra.Command{
		secretsShowCmd(a, &bundle), secretsSetCmd(a, &bundle), secretsUnsetCmd(a, &bundle), secretsEditCmd(a, &bundle), secretsValidateCmd(a, &bundle),
	} {
		c.Flags().StringVar(&bundle, "bundle", "default", "name of the bundle")
		cmd.AddCommand(c)
	}
	cmd.AddCommand(secretsInitCmd(a), secretsCreateCmd(a), secretsListCmd(a), secretsRotateCmd(a))
	return cmd
}

func secretsInitCmd(a *cli.App) *cobra.Command {
	return cli.Query(a, "init", "Create the encryption key of bundles, and show who can open them", cli.ExactArgs(), cli.All((*client.Client).InitSecrets), func(v api.SecretVault) error { return printVault(a, v) })
}

// printVault prints who can open the bundles.
func printVault(a *cli.App, v api.SecretVault) error {
	fmt.Fprintf(a.Stdout, "public key: %s\n", agentlab.WithoutControls(v.PublicKey))
	for _, r := range v.Recipients {
		fmt.Fprintf(a.Stdout, "recipient:  %s\n", agentlab.WithoutControls(r))
	}
	return nil
}

func secretsCreateCmd(a *cli.App) *cobra.Command {
	return &cobra.Command{
		Use: "create NAME", Short: "Create an empty bundle", Args: cli.ExactArgs("NAME"),
		RunE: a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
			if err := c.CreateSecrets(ctx, args[0]); err != nil {
				return err
			}
			a.Progressf("bundle %s created; to use it, add 'secrets_bundle: %s' to a profile", args[0], args[0])
			return nil
		}),
	}
}

func secretsListCmd(a *cli.App) *cobra.Command {
	return cli.Query(a, "list", "List the bundles and their keys, without values", cli.ExactArgs(), cli.All((*client.Client).Secrets), func(all api.List[api.SecretBundle]) error {
		t := cli.NewTable(a.Stdout, "BUNDLE", "FORMAT", "KEYS", "PROBLEM")
		for _, b := range all.Items {
			t.Row(b.Name, b.Format, cli.OrDash(strings.Join(b.Keys, " ")), cli.OrDash(b.Problem))
		}
		return t.Flush()
	})
}

func secretsShowCmd(a *cli.App, bundle *string) *cobra.Command {
	var reveal bool
	cmd := cli.Query(a, "show", "Show the entries of a bundle, without values", cli.ExactArgs(),
		func(ctx context.Context, c *client.Client, _ []string) (api.List[api.SecretEntry], error) {
			return c.ShowSecrets(ctx, *bundle, reveal)
		}, func(all api.List[api.SecretEntry]) error {
			for _, e := range all.Items {
				switch {
				case e.Reference != "":
					fmt.Fprintf(a.Stdout, "%s from %s\n", agentlab.WithoutControls(e.Key), agentlab.WithoutControls(e.Reference))
				case reveal:
					fmt.Fprintf(a.Stdout, "%s = %s\n", agentlab.WithoutControls(e.Key), inQuotes(e.Value))
				default:
					fmt.Fprintf(a.Stdout, "%s is set\n", agentlab.WithoutControls(e.Key))
				}
			}
			return nil
		})
	cmd.Flags().BoolVar(&reveal, "reveal", false, "print values; references are not resolved")
	return cmd
}

// inQuotes formats a value as one line without control characters.
func inQuotes(s string) string {
	text, _ := json.Marshal(s) // of a string
	return agentlab.WithoutControls(string(text))
}

func secretsSetCmd(a *cli.App, bundle *string) *cobra.Command {
	var ref, file string
	cmd := &cobra.Command{
		Use: "set KEY", Short: "Set one value, read from standard input, a file or a prompt", Args: cli.ExactArgs("KEY"),
		Long: `Set one value. It is read from standard input, from --file, or from a prompt
without echo; a newline at its end is removed. The value is stored literally,
even if it looks like a reference: only --ref sets a reference.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			value := ref
			if ref == "" {
				var err error
				if value, err = readSecret(a, args[0], file); err != nil {
					return err
				}
			}
			return a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
				_, known := c.SecretKeys(ctx, *bundle)
				if err := c.SetSecret(ctx, *bundle, args[0], value, ref != ""); err != nil {
					return err
				}
				if agentlab.CodeOf(known) == agentlab.CodeNotFound {
					a.Progressf("bundle %s created", *bundle)
				}
				a.Progressf("%s set in bundle %s", args[0], *bundle)
				return nil
			})(cmd, args)
		},
	}
	cmd.Flags().StringVar(&ref, "ref", "", "reference that is resolved when a job receives it: op://…, env:…, file:… or cmd:…")
	cmd.Flags().StringVar(&file, "file", "", "read the value from this file")
	cmd.MarkFlagsMutuallyExclusive("ref", "file")
	return cmd
}

func secretsUnsetCmd(a *cli.App, bundle *string) *cobra.Command {
	return &cobra.Command{
		Use: "unset KEY", Short: "Remove one value", Args: cli.ExactArgs("KEY"),
		RunE: a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
			if err := c.UnsetSecret(ctx, *bundle, args[0]); err != nil {
				return err
			}
			a.Progressf("%s removed from bundle %s", args[0], *bundle)
			return nil
		}),
	}
}

func secretsRotateCmd(a *cli.App) *cobra.Command {
	var r api.SecretRotate
	cmd := &cobra.Command{
		Use: "rotate", Short: "Create a new key and re-encrypt every bundle", Args: cli.ExactArgs(),
		Long: `Create a new key, change who else can open the bundles, and re-encrypt every
bundle. Nothing has to be stopped: the old key remains valid until all bundles
are re-encrypted. If interrupted, run the command again. The old key can still
open earlier copies of a bundle: if it has leaked, change the secrets themselves.`,
		RunE: a.RunE(func(ctx context.Context, c *client.Client, _ []string) error {
			v, err := c.RotateSecrets(ctx, r)
			if err != nil {
				return err
			}
			a.Progressf("%s re-encrypted", agentlab.Plural(len(v.Bundles), "bundle"))
			if len(v.Kept) > 0 {
				a.Progressf("%s kept, because sops bundles are encrypted to them: run 'sops updatekeys' on those, then rotate again", agentlab.Plural(len(v.Kept), "old key"))
			}
			return a.Emit(v, func() error { return printVault(a, v) })
		}),
	}
	cmd.Flags().StringArrayVar(&r.Add, "add-recipient", nil, "additional public key that can open the bundles: age1…, ssh-ed25519 … or ssh-rsa …")
	cmd.Flags().StringArrayVar(&r.Remove, "remove-recipient", nil, "public key that can no longer open the bundles")
	return cmd
}

func secretsValidateCmd(a *cli.App, bundle *string) *cobra.Command {
	var v api.SecretValidate
	cmd := &cobra.Command{
		Use: "validate", Short: "Check bundles and file modes, with --resolve also references", Args: cli.ExactArgs(),
		Long: `Check that the secrets directory and its files are private, that every bundle
(or that of --bundle) can be opened, and that its content is valid. With
--resolve, resolve every reference and discard the value.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if cmd.Flags().Changed("bundle") {
				v.Bundle = *bundle
			}
			return a.RunE(func(ctx context.Context, c *client.Client, _ []string) error {
				check, err := c.ValidateSecrets(ctx, v)
				if err != nil {
					return err
				}
				return printCheck(a, check)
			})(cmd, args)
		},
	}
	cmd.Flags().BoolVar(&v.Resolve, "resolve", false, "resolve every reference")
	return cmd
}

// printCheck prints the problems of bundles. If there are any, the exit code is 1.
func printCheck(a *cli.App, check api.SecretCheck) error {
	err := a.Emit(check, func() error {
		for _, f := range check.Findings {
			where := strings.Trim(f.Bundle+" "+f.Key, " ")
			if where != "" {
				where += ": "
			}
			fmt.Fprintln(a.Stdout, agentlab.WithoutControls(where+f.Problem))
			if f.Hint != "" {
				fmt.Fprintln(a.Stdout, agentlab.WithoutControls("  → "+f.Hint))
			}
		}
		a.Progressf("%s checked, %s", agentlab.Plural(len(check.Checked), "bundle"), agentlab.Plural(len(check.Findings), "problem"))
		return nil
	})
	if err != nil {
		return err
	}
	if len(check.Findings) > 0 {
		return work.ExitStatus(cli.ExitFailure)
	}
	return nil
}

// readSecret reads a file, or a prompt on a terminal without echo, or standard
// input. It removes one newline at the end.
func readSecret(a *cli.App, key, file string) (string, error) {
	f, tty := work.TerminalOf(a.Stdin)
	if file != "" || !tty {
		if file == "" {
			file = "-"
		}
		v, err := a.ReadInput(file, maxSecretBytes)
		return strings.TrimSuffix(v, "\n"), err
	}
	if a.NoInput {
		return "", work.UsageErrorf("--no-input requires the value on standard input").WithHint("run: agentlab secrets set %s < FILE", key)
	}
	fmt.Fprintf(a.Stderr, "%s: ", key)
	v, err := term.ReadPassword(int(f.Fd()))
	fmt.Fprintln(a.Stderr)
	return string(v), err
}

package cli

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/client"
)

// maxSecretBytes bounds one secret value.
const maxSecretBytes = 256 << 10

func (a *App) secretsCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use: "secrets", Short: "Keep the secrets that jobs get: keys of models, git credentials",
		Long: `Keep the secrets that jobs get. They lie in encrypted bundles; a profile names
its bundle, and a job gets that bundle alone, once, in memory.

KEY is env.NAME for an environment variable of the agent, or one of git.url,
git.token, git.username, git.ssh_private_key, git.ssh_known_hosts and
claude_settings_json. Values are read from standard input, never from the
command line.`,
		Example: `  agentlab secrets set env.ANTHROPIC_API_KEY          # asks
  agentlab secrets set git.token < token.txt
  agentlab secrets list`,
	}
	var bundle string
	cmd.PersistentFlags().StringVar(&bundle, "bundle", "default", "bundle")
	list := &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List the keys in a bundle, never the values", Args: exactArgs(),
		RunE: a.run(func(ctx context.Context, c *client.Client, _ []string) error {
			keys, err := c.SecretKeys(ctx, bundle)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(keys)
			}
			for _, k := range keys.Items {
				fmt.Fprintln(a.Stdout, plain(k))
			}
			return nil
		}),
	}
	set := &cobra.Command{
		Use: "set KEY", Short: "Set one value, read from standard input", Args: exactArgs("KEY"),
		RunE: func(cmd *cobra.Command, args []string) error {
			value, err := a.readSecret(args[0])
			if err != nil {
				return err
			}
			return a.run(func(ctx context.Context, c *client.Client, args []string) error {
				if err := c.SetSecret(ctx, bundle, args[0], value); err != nil {
					return err
				}
				a.progressf("%s is set in bundle %s", args[0], bundle)
				return nil
			})(cmd, args)
		},
	}
	unset := &cobra.Command{
		Use: "unset KEY", Short: "Remove one value", Args: exactArgs("KEY"),
		RunE: a.run(func(ctx context.Context, c *client.Client, args []string) error {
			if err := c.UnsetSecret(ctx, bundle, args[0]); err != nil {
				return err
			}
			a.progressf("%s is removed from bundle %s", args[0], bundle)
			return nil
		}),
	}
	cmd.AddCommand(list, set, unset)
	return cmd
}

// readSecret asks on a terminal without echo, else reads all of standard
// input less one trailing newline.
func (a *App) readSecret(key string) (string, error) {
	f, tty := terminal(a.Stdin)
	if !tty {
		v, err := a.readLimited("-", maxSecretBytes)
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

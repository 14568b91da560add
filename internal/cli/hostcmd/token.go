package hostcmd

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
)

// defaultTokenTTL is the default of --ttl.
const defaultTokenTTL = 30 * 24 * time.Hour

func tokenCmd(a *cli.App) *cobra.Command {
	cmd := &cobra.Command{
		Use: "token", Short: "Manage API tokens",
		Long: `Manage API tokens. A token lets other users and machines use the daemon, also
over TCP. It has a role (read, write or admin), can be restricted to verbs and
sandboxes, and always expires. See docs/access.md for the permissions.

Only root and the daemon's own user can manage tokens, on the daemon's machine.`,
		Example: `  agentlab token create ci --role write --ttl 7d --out ci.token
  agentlab token create shell --role write --sandbox play --verb sandbox.exec
  agentlab token revoke ci
  AGENTLAB_TOKEN_FILE=ci.token agentlab --host https://lab:8843 job list`,
	}
	cmd.AddCommand(tokenCreateCmd(a), tokenListCmd(a), tokenRevokeCmd(a))
	return cmd
}

func tokenCreateCmd(a *cli.App) *cobra.Command {
	var req api.TokenCreate
	var out string
	ttl := defaultTokenTTL
	cmd := &cobra.Command{
		Use: "create NAME", Short: "Create a token and print it; it cannot be printed again", Args: cli.ExactArgs("NAME"),
		RunE: a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
			req.Name, req.TTLMinutes = args[0], int(ttl/time.Minute)
			made, err := c.CreateToken(ctx, req)
			if err != nil {
				return err
			}
			if out != "" {
				if err := cli.WritePrivate(out, made.Secret+"\n"); err != nil {
					_, rerr := c.RevokeToken(ctx, made.Token.ID) // its secret is lost
					if rerr != nil {
						a.Progressf("note: token %s was created; revoke it: agentlab token revoke %s", made.Token.ID, made.Token.ID)
					}
					return err
				}
				made.Secret = ""
			}
			a.Progressf("token %s (%s, %s) expires %s", made.Token.Name, made.Token.ID, made.Token.Role, made.Token.ExpiresAt.Local().Format(time.DateTime))
			return a.Emit(made, func() error {
				if out != "" {
					return nil
				}
				_, err := fmt.Fprintln(a.Stdout, made.Secret)
				return err
			})
		}),
	}
	f := cmd.Flags()
	req.Role = string(agentlab.RoleRead)
	cli.Choice(f, &req.Role, "role", agentlab.Roles, "role: read, write or admin")
	f.StringSliceVar(&req.Verbs, "verb", nil, "allow only calls with this verb, e.g. sandbox.exec; can be repeated (default: all of the role)")
	f.StringSliceVar(&req.Sandboxes, "sandbox", nil, "allow only calls about this sandbox and its jobs; can be repeated (default: all sandboxes)")
	f.Var(cli.DurationFlag(&ttl, agentlab.MaxTokenTTL), "ttl", "lifetime, e.g. 12h, 30d; at most 365d")
	f.StringVar(&out, "out", "", "write the token to this new file (mode 0600) instead of standard output")
	return cmd
}

func tokenListCmd(a *cli.App) *cobra.Command {
	return cli.Query(a, "list", "List tokens, without their secrets", cli.ExactArgs(), cli.All((*client.Client).Tokens), func(list api.List[api.Token]) error {
		t := cli.NewTable(a.Stdout, "NAME", "ID", "ROLE", "VERBS", "SANDBOXES", "EXPIRES", "USED")
		for _, k := range list.Items {
			var boxes []string
			for _, s := range k.Sandboxes {
				boxes = append(boxes, fmt.Sprintf("%d(%s)", s.VMID, s.Name))
			}
			used := "never"
			if k.LastUsedAt != nil {
				used = a.Age(*k.LastUsedAt) + " ago"
			}
			t.Row(k.Name, k.ID, k.Role, orAny(k.Verbs), orAny(boxes), a.Until(k.ExpiresAt), used)
		}
		return t.Flush()
	})
}

func orAny(list []string) string {
	if len(list) == 0 {
		return "any"
	}
	return strings.Join(list, ",")
}

func tokenRevokeCmd(a *cli.App) *cobra.Command {
	return &cobra.Command{
		Use: "revoke NAME|ID...", Short: "Revoke tokens and end the calls that use them", Args: cobra.MinimumNArgs(1),
		RunE: a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
			gone := api.List[api.Token]{Items: []api.Token{}}
			for _, name := range args {
				t, err := c.RevokeToken(ctx, name)
				if err != nil {
					return err
				}
				a.Progressf("token %s (%s) revoked", t.Name, t.ID)
				gone.Items = append(gone.Items, t)
			}
			return a.Emit(gone, cli.Silent)
		}),
	}
}

package cli

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
)

// defaultTokenTTL is how long a token lives when nothing is said.
const defaultTokenTTL = 30 * 24 * time.Hour

func (a *App) tokenCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use: "token", Short: "Keep the tokens with which others may use the daemon, also over TCP",
		Long: `Keep the tokens with which others may use the daemon, also over TCP. A token
has a role (read, write or admin), may be bound to verbs and sandboxes, and
always expires. Who may do what is in docs/access.md.

Only root and the daemon's own user can keep tokens, on the daemon's machine.`,
		Example: `  agentlab token create ci --role write --ttl 7d --out ci.token
  agentlab token create helper --role write --sandbox play --verb sandbox.exec
  agentlab token revoke ci
  AGENTLAB_TOKEN_FILE=ci.token agentlab --host https://lab:8843 job list`,
	}
	cmd.AddCommand(a.tokenCreateCmd(), a.tokenListCmd(), a.tokenRevokeCmd())
	return cmd
}

func (a *App) tokenCreateCmd() *cobra.Command {
	var req api.TokenCreate
	var out string
	ttl := defaultTokenTTL
	cmd := &cobra.Command{
		Use: "create NAME", Short: "Make a token and print it, this once", Args: exactArgs("NAME"),
		RunE: a.run(func(ctx context.Context, c *client.Client, args []string) error {
			req.Name, req.TTLMinutes = args[0], int(ttl/time.Minute)
			made, err := c.CreateToken(ctx, req)
			if err != nil {
				return usageOf(err, "verbs")
			}
			if out != "" {
				if err := writePrivate(out, made.Secret+"\n"); err != nil {
					_, rerr := c.RevokeToken(ctx, made.Token.ID) // nobody has it
					if rerr != nil {
						a.progressf("note: token %s was made; revoke it: agentlab token revoke %s", made.Token.ID, made.Token.ID)
					}
					return err
				}
				made.Secret = ""
			}
			a.progressf("token %s (%s, %s) expires %s", made.Token.Name, made.Token.ID, made.Token.Role, made.Token.ExpiresAt.Local().Format(time.DateTime))
			switch {
			case a.json:
				return a.printJSON(made)
			case out != "":
				return nil
			}
			_, err = fmt.Fprintln(a.Stdout, made.Secret)
			return err
		}),
	}
	f := cmd.Flags()
	req.Role = string(agentlab.RoleRead)
	choice(f, &req.Role, "role", agentlab.Roles, "the most that it may do: read, write or admin")
	f.StringSliceVar(&req.Verbs, "verb", nil, "only calls with this verb, e.g. sandbox.exec; may be repeated (default: all of the role)")
	f.StringSliceVar(&req.Sandboxes, "sandbox", nil, "only calls about this sandbox and its jobs; may be repeated (default: no such bound)")
	f.Var(tokenTTLFlag{&ttl}, "ttl", "how long it lives, e.g. 12h, 30d; at most 365d")
	f.StringVar(&out, "out", "", "write it into this new file (mode 0600) instead of printing it")
	return cmd
}

// tokenTTLFlag is a ttlFlag with the bounds of tokens.
type tokenTTLFlag struct{ d *time.Duration }

func (f tokenTTLFlag) String() string {
	if f.d == nil {
		return ""
	}
	return shortTTL(*f.d)
}

func (tokenTTLFlag) Type() string { return "duration" }

func (f tokenTTLFlag) Set(s string) error {
	d, err := parseDays(s)
	switch {
	case err != nil:
		return err
	case d < time.Minute || d > agentlab.MaxTokenTTL || d%time.Minute != 0:
		return fmt.Errorf("%q is not between 1m and 365d, in whole minutes", s)
	}
	*f.d = d
	return nil
}

func shortTTL(d time.Duration) string {
	if day := 24 * time.Hour; d%day == 0 {
		return fmt.Sprintf("%dd", d/day)
	}
	return d.String()
}

func (a *App) tokenListCmd() *cobra.Command {
	return &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List tokens, never their secrets", Args: exactArgs(),
		RunE: a.run(func(ctx context.Context, c *client.Client, _ []string) error {
			list, err := c.Tokens(ctx)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(list)
			}
			t := newTable(a.Stdout, "NAME", "ID", "ROLE", "VERBS", "SANDBOXES", "EXPIRES", "USED")
			for _, k := range list.Items {
				var boxes []string
				for _, s := range k.Sandboxes {
					boxes = append(boxes, fmt.Sprintf("%d(%s)", s.VMID, s.Name))
				}
				used := "never"
				if k.LastUsedAt != nil {
					used = a.age(*k.LastUsedAt) + " ago"
				}
				t.row(k.Name, k.ID, k.Role, orAny(k.Verbs), orAny(boxes), a.until(k.ExpiresAt), used)
			}
			return t.flush()
		}),
	}
}

func orAny(list []string) string {
	if len(list) == 0 {
		return "any"
	}
	return strings.Join(list, ",")
}

func (a *App) tokenRevokeCmd() *cobra.Command {
	return &cobra.Command{
		Use: "revoke NAME|ID...", Short: "End tokens, and what is being done with them", Args: cobra.MinimumNArgs(1),
		RunE: a.run(func(ctx context.Context, c *client.Client, args []string) error {
			gone := api.List[api.Token]{Items: []api.Token{}}
			for _, name := range args {
				t, err := c.RevokeToken(ctx, name)
				if err != nil {
					return err
				}
				a.progressf("token %s (%s) is revoked", t.Name, t.ID)
				gone.Items = append(gone.Items, t)
			}
			if a.json {
				return a.printJSON(gone)
			}
			return nil
		}),
	}
}

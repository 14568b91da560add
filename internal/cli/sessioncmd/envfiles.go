package sessioncmd

import (
	"context"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/work/session"
	"github.com/agentlab-vm/agentlab/internal/work/transfer"
)

func syncEnvCmd(a *cli.App) *cobra.Command {
	var repo, dir string
	cmd := &cobra.Command{
		Use: "sync-env SANDBOX|SESSION", Short: "Send the .env files of a repository to a sandbox", Args: cli.ExactArgs("SANDBOX|SESSION"),
		Long: `Send the files .env, .env.* and .envrc of a repository to the same places below a
directory of a sandbox. Files that git tracks are not sent: they arrive with the
commits. Directories that git ignores as a whole, other repositories, and what the file
.agentlabignore names are left out; it has the syntax of .gitignore.

Files in the sandbox are replaced, and none is removed. In /workspace of a session, git
ignores them: they do not count as work of the agent. The agent can read them, and
AgentLab does not know their values: it does not redact them in logs.`,
		Example: `  agentlab sync-env play
  agentlab sync-env play --repo ~/src/project --dir /workspace`,
	}
	cmd.Flags().StringVar(&repo, "repo", ".", "path of the repository")
	cmd.Flags().StringVar(&dir, "dir", "/workspace", "directory in the sandbox")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		sandbox := args[0]
		sent, err := transfer.SendEnvFiles(ctx, c, sandbox, repo, dir)
		if err != nil {
			return err
		}
		if len(sent.Files) == 0 { // nothing else has checked the sandbox
			if _, err := c.Sandbox(ctx, sandbox); agentlab.CodeOf(err) == agentlab.CodeNotFound {
				return err
			}
		}
		if err := session.ExcludeSent(ctx, c, sent); err != nil {
			return err
		}
		if len(sent.Files) == 0 {
			return a.Done(sent, "no .env files to send")
		}
		return a.Done(sent, "sent %s to %s: %s", agentlab.Plural(len(sent.Files), "file"), args[0], agentlab.WithoutControls(strings.Join(sent.Files, " ")))
	})
	return cmd
}

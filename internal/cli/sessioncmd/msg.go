package sessioncmd

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/work"
)

func msgCmd(a *cli.App) *cobra.Command {
	cmd := &cobra.Command{Use: "msg", Short: "Post and read messages"}
	cmd.AddCommand(msgPostCmd(a), msgTailCmd(a), msgExportCmd(a), msgImportCmd(a))
	return cmd
}

// messageScopeFlags adds the flags that select whose messages; exactly one is
// required.
func messageScopeFlags(cmd *cobra.Command, to *client.MessageScope) {
	flags := cmd.Flags()
	flags.StringVar(&to.Job, "job", "", "the messages of this job and its attempts")
	flags.StringVar(&to.Workspace, "workspace", "", "the messages of this workspace")
	flags.StringVar(&to.Session, "session", "", "the messages of this session")
	names := []string{"job", "workspace", "session"}
	cmd.MarkFlagsOneRequired(names...)
	cmd.MarkFlagsMutuallyExclusive(names...)
}

func msgPostCmd(a *cli.App) *cobra.Command {
	var to client.MessageScope
	var data string
	var m api.MessagePost
	cmd := &cobra.Command{
		Use: "post --job JOB|--workspace WORKSPACE|--session SESSION", Short: "Post a message", Args: cli.ExactArgs(),
		Long: `Post a message for a job, a workspace or a session. Messages cannot be changed; retention deletes them with old
events. The daemon sets the author.`,
		Example: `  agentlab msg post --job job-abc --text "please rerun the tests"
  agentlab msg post --workspace data --kind claim --data '{"file": "main.go"}'`,
	}
	messageScopeFlags(cmd, &to)
	cmd.Flags().StringVar(&m.Kind, "kind", "note", "a word that says what it is about")
	cmd.Flags().StringVar(&m.Text, "text", "", "the text")
	cmd.Flags().StringVar(&data, "data", "", "a JSON object for programs")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, _ []string) error {
		if data != "" {
			if err := json.Unmarshal([]byte(data), &m.JSON); err != nil {
				return work.UsageErrorf("--data is not a JSON object: %v", err).WithHint(`for example --data '{"pr": 7}'`)
			}
		}
		posted, err := c.PostMessage(ctx, to, m)
		if err != nil {
			return err
		}
		return a.Done(posted, "message %d posted", posted.ID)
	})
	return cmd
}

func msgTailCmd(a *cli.App) *cobra.Command {
	var follow bool
	var q client.MessageQuery
	cmd := &cobra.Command{
		Use: "tail --job JOB|--workspace WORKSPACE|--session SESSION", Short: "Show messages", Args: cli.ExactArgs(),
		Example: "  agentlab msg tail --job job-abc --follow",
	}
	messageScopeFlags(cmd, &q.MessageScope)
	flags := cmd.Flags()
	flags.BoolVarP(&follow, "follow", "f", false, "print new messages as they are posted")
	flags.Int64Var(&q.After, "after", 0, "only messages with a larger ID")
	q.Limit = 100
	cli.Between(flags, &q.Limit, "limit", 1, 1000, "print at most this many: the newest, or the first ones after --after")
	cmd.MarkFlagsMutuallyExclusive("limit", "follow")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, _ []string) error {
		if follow {
			return cli.Each(c.FollowMessages(ctx, q), func(m api.Message) error { return printMessage(a, m) })
		}
		list, err := c.Messages(ctx, q)
		if err != nil {
			return err
		}
		for _, m := range list.Items {
			if err := printMessage(a, m); err != nil {
				return err
			}
		}
		return nil
	})
	return cmd
}

func printMessage(a *cli.App, m api.Message) error {
	if a.JSON {
		return a.PrintJSONLine(m)
	}
	text := m.Text
	if len(m.JSON) > 0 {
		data, err := json.Marshal(m.JSON)
		if err != nil {
			return err
		}
		text += " " + string(data)
	}
	_, err := fmt.Fprintf(a.Stdout, "%d  %s  %s  %s  %s\n", m.ID, work.LocalTime(m.Time), agentlab.WithoutControls(m.Author), agentlab.WithoutControls(m.Kind), agentlab.WithoutControls(text))
	return err
}

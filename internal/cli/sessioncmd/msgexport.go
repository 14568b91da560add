package sessioncmd

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/work"
)

// maxMessageLine limits a line of an export: a text and data of the maximum size, in which
// each character may be an escape sequence.
const maxMessageLine = 6*(agentlab.MaxMessageText+agentlab.MaxMessageData) + 4<<10

// importedKey is the key in the data of an imported message for where it comes from.
const importedKey = "imported"

// importRetry is the delay after which an import that posts too fast tries again, and
// importPatience how long it does so.
const (
	importRetry    = 2 * time.Second
	importPatience = 3 * time.Minute
)

func msgExportCmd(a *cli.App) *cobra.Command {
	var scope client.MessageScope
	cmd := &cobra.Command{
		Use: "export --job JOB|--workspace WORKSPACE|--session SESSION", Short: "Write all messages as lines of JSON", Args: cli.ExactArgs(),
		Long:    `Write all messages of a job, a workspace or a session to standard output, one JSON object per line, the oldest first.`,
		Example: "  agentlab msg export --session fix > messages.jsonl",
	}
	messageScopeFlags(cmd, &scope)
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, _ []string) error {
		newest, err := c.Messages(ctx, client.MessageQuery{MessageScope: scope, Limit: 1})
		if err != nil || len(newest.Items) == 0 {
			return err
		}
		last := newest.Items[0].ID
		for m, err := range c.FollowMessages(ctx, client.MessageQuery{MessageScope: scope}) {
			if err != nil {
				return err
			}
			if m.ID > last {
				break
			}
			if err := a.PrintJSONLine(m); err != nil || m.ID == last {
				return err
			}
		}
		return ctx.Err()
	})
	return cmd
}

// imported is the output of 'msg import' under --json.
type imported struct {
	Messages int   `json:"messages"`
	Last     int64 `json:"last"` // ID in the file of the last one
}

func msgImportCmd(a *cli.App) *cobra.Command {
	var scope client.MessageScope
	var after int64
	cmd := &cobra.Command{
		Use: "import --job JOB|--workspace WORKSPACE|--session SESSION FILE", Short: "Post the messages of an export", Args: cli.ExactArgs("FILE"),
		Long: `Post the messages of a file of 'agentlab msg export'; - means standard input. The
daemon sets the author and the time: those of the original are in the data of each
message, under "imported". The limits on messages apply. The command waits when it
posts too fast.`,
		Example: "  agentlab msg import --session other messages.jsonl",
	}
	messageScopeFlags(cmd, &scope)
	cmd.Flags().Int64Var(&after, "after", 0, "only messages with a larger ID in the file, to continue an import")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		in := a.Stdin
		if args[0] != "-" {
			f, err := os.Open(args[0])
			if err != nil {
				return work.UsageErrorf("cannot read the messages: %v", err)
			}
			defer func() { _ = f.Close() }()
			in = f
		}
		done, err := importMessages(ctx, a, c, scope, in, after)
		if err != nil {
			if done.Messages > 0 {
				a.Progressf("%s imported\n  → continue with --after %d", agentlab.Plural(done.Messages, "message"), done.Last)
			}
			return err
		}
		return a.Done(done, "%s imported", agentlab.Plural(done.Messages, "message"))
	})
	return cmd
}

func importMessages(ctx context.Context, a *cli.App, c *client.Client, scope client.MessageScope, in io.Reader, after int64) (done imported, err error) {
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, maxMessageLine)
	for n := 1; lines.Scan(); n++ {
		var m api.Message
		if err := json.Unmarshal(lines.Bytes(), &m); err != nil {
			return done, agentlab.Errorf(agentlab.CodeInvalid, "line %d is not a message: %w", n, err).WithHint("use a file of 'agentlab msg export'")
		}
		if m.ID <= after {
			continue
		}
		post := api.MessagePost{Kind: m.Kind, Text: m.Text, JSON: api.Object{importedKey: map[string]any{"id": m.ID, "time": m.Time, "author": m.Author}}}
		for key, value := range m.JSON {
			if key != importedKey { // of an earlier import
				post.JSON[key] = value
			}
		}
		if err := postPatiently(ctx, a, c, scope, post); err != nil {
			return done, agentlab.Errorf(agentlab.CodeOf(err), "message %d, line %d: %w", m.ID, n, err).WithHint("%s", agentlab.HintOf(err))
		}
		done.Messages, done.Last = done.Messages+1, m.ID
	}
	if err := lines.Err(); err != nil {
		return done, agentlab.Errorf(agentlab.CodeInvalid, "cannot read the messages: %w", err)
	}
	return done, nil
}

// postPatiently posts a message, and waits while the author has posted too many.
func postPatiently(ctx context.Context, a *cli.App, c *client.Client, scope client.MessageScope, m api.MessagePost) error {
	for began, told := a.Now(), false; ; told = true {
		_, err := c.PostMessage(ctx, scope, m)
		if agentlab.CodeOf(err) != agentlab.CodeLimit || a.Now().Sub(began) > importPatience {
			return err
		}
		if !told {
			a.Progressf("waiting: %s", agentlab.WithoutControls(err.Error()))
		}
		if err := work.SleepOr(ctx, importRetry); err != nil {
			return err
		}
	}
}

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
// each character may be an escape sequence. The line of a session is shorter, because its
// history is limited.
const maxMessageLine = 6*(agentlab.MaxMessageText+agentlab.MaxMessageData) + 4<<10

// importedKey is the key in the data of an imported message for where it comes from.
const importedKey = "imported"

// importRetry is the delay after which an import that posts too fast tries again, and
// importPatience how long it does so.
const (
	importRetry    = 2 * time.Second
	importPatience = 3 * time.Minute
)

// exportedSession is the first line of the export of a session.
type exportedSession struct {
	Session *api.Session `json:"session"`
}

func msgExportCmd(a *cli.App) *cobra.Command {
	var scope client.MessageScope
	cmd := &cobra.Command{
		Use: "export --job JOB|--workspace WORKSPACE|--session SESSION", Short: "Write all messages as lines of JSON", Args: cli.ExactArgs(),
		Long: `Write all messages of a job, a workspace or a session to standard output, one JSON
object per line, the oldest first. The first line of a session describes the session: its
profile, image, branch and sandboxes.`,
		Example: "  agentlab msg export --session fix > fix.jsonl",
	}
	messageScopeFlags(cmd, &scope)
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, _ []string) error {
		if scope.Session != "" {
			s, err := c.Session(ctx, scope.Session)
			if err == nil {
				err = a.PrintJSONLine(exportedSession{&s})
			}
			if err != nil {
				return err
			}
		}
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
	Messages int          `json:"messages"`
	Last     int64        `json:"last"`              // ID in the file of the last one
	Session  *api.Session `json:"session,omitempty"` // with --create
}

// messageImport posts the messages of an export.
type messageImport struct {
	*cli.App
	client *client.Client
	scope  client.MessageScope
	create bool  // the session, if it does not exist
	after  int64 // ID in the file of the last message that was posted before
	done   imported
}

func msgImportCmd(a *cli.App) *cobra.Command {
	var m messageImport
	cmd := &cobra.Command{
		Use: "import --job JOB|--workspace WORKSPACE|--session SESSION FILE", Short: "Post the messages of an export", Args: cli.ExactArgs("FILE"),
		Long: `Post the messages of a file of 'agentlab msg export'; - means standard input. The
daemon sets the author and the time: those of the original are in the data of each
message, under "imported". The limits on messages apply. The command waits when it
posts too fast.

With --create, a session that does not exist is created with the profile, image and branch
that the file has. It gets the workspace with the name of the session, or a new one.`,
		Example: `  agentlab msg import --session other messages.jsonl
  agentlab msg import --session fix --create fix.jsonl`,
	}
	messageScopeFlags(cmd, &m.scope)
	cmd.Flags().Int64Var(&m.after, "after", 0, "only messages with a larger ID in the file, to continue an import")
	cmd.Flags().BoolVar(&m.create, "create", false, "create the session as the file describes it, if it does not exist")
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		if m.create && m.scope.Session == "" {
			return work.UsageErrorf("--create is for --session")
		}
		in := a.Stdin
		if args[0] != "-" {
			f, err := os.Open(args[0])
			if err != nil {
				return work.UsageErrorf("cannot read the messages: %v", err)
			}
			defer func() { _ = f.Close() }()
			in = f
		}
		m.App, m.client = a, c
		if err := m.read(ctx, in); err != nil {
			if m.done.Messages > 0 {
				a.Progressf("%s imported\n  → continue with --after %d", agentlab.Plural(m.done.Messages, "message"), m.done.Last)
			}
			return err
		}
		return a.Done(m.done, "%s imported", agentlab.Plural(m.done.Messages, "message"))
	})
	return cmd
}

// importLine is a line of an export: a message, or the session.
type importLine struct {
	api.Message
	exportedSession
}

func (m *messageImport) read(ctx context.Context, in io.Reader) error {
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, maxMessageLine)
	for n := 1; lines.Scan(); n++ {
		var l importLine
		if err := json.Unmarshal(lines.Bytes(), &l); err != nil {
			return agentlab.Errorf(agentlab.CodeInvalid, "line %d is not a message: %w", n, err).WithHint("use a file of 'agentlab msg export'")
		}
		if n == 1 && m.create {
			if err := m.createSession(ctx, l.Session); err != nil {
				return err
			}
		}
		if l.Session != nil || l.ID <= m.after {
			continue
		}
		if err := m.post(ctx, l.Message); err != nil {
			return agentlab.Errorf(agentlab.CodeOf(err), "message %d, line %d: %w", l.ID, n, err).WithHint("%s", agentlab.HintOf(err))
		}
		m.done.Messages, m.done.Last = m.done.Messages+1, l.ID
	}
	if err := lines.Err(); err != nil {
		return agentlab.Errorf(agentlab.CodeInvalid, "cannot read the messages: %w", err)
	}
	return nil
}

// createSession creates the session of the import as from describes it, unless it exists.
func (m *messageImport) createSession(ctx context.Context, from *api.Session) error {
	if from == nil {
		return agentlab.Errorf(agentlab.CodeInvalid, "the file does not describe a session").WithHint("export it with 'agentlab msg export --session SESSION', or create the session first: agentlab session create %s", m.scope.Session)
	}
	r := api.SessionCreate{Name: m.scope.Session, Profile: from.Profile, Image: from.Image, Branch: from.Branch, IfMissing: true}
	r.WorkspaceSelection = api.WorkspaceSelection{Workspace: r.Name, WorkspaceCreate: &api.WorkspaceNew{IfMissing: true}}
	s, err := m.client.CreateSession(ctx, r)
	if err == nil {
		err = sessionWorkspace(ctx, m.App, m.client, s)
	}
	m.done.Session = &s
	return err
}

// post posts a message of the file, and waits while the author has posted too many.
func (m *messageImport) post(ctx context.Context, from api.Message) error {
	message := api.MessagePost{Kind: from.Kind, Text: from.Text, JSON: api.Object{importedKey: map[string]any{"id": from.ID, "time": from.Time, "author": from.Author}}}
	for key, value := range from.JSON {
		if key != importedKey { // of an earlier import
			message.JSON[key] = value
		}
	}
	for began, told := m.Now(), false; ; told = true {
		_, err := m.client.PostMessage(ctx, m.scope, message)
		if agentlab.CodeOf(err) != agentlab.CodeLimit || m.Now().Sub(began) > importPatience {
			return err
		}
		if !told {
			m.Progressf("waiting: %s", agentlab.WithoutControls(err.Error()))
		}
		if err := work.SleepOr(ctx, importRetry); err != nil {
			return err
		}
	}
}

// Package mcpclient calls tools of 'agentlab mcp' in tests, as agents do.
package mcpclient

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os/exec"

	"github.com/modelcontextprotocol/go-sdk/mcp"
)

// Session is a connection to a server that was started for it.
type Session struct{ *mcp.ClientSession }

// Start starts a server. progress gets the messages of progress, and may be nil.
func Start(ctx context.Context, server *exec.Cmd, progress io.Writer) (Session, error) {
	if progress == nil {
		progress = io.Discard
	}
	c := mcp.NewClient(&mcp.Implementation{Name: "test"}, &mcp.ClientOptions{
		ProgressNotificationHandler: func(_ context.Context, r *mcp.ProgressNotificationClientRequest) {
			fmt.Fprintln(progress, r.Params.Message)
		},
	})
	s, err := c.Connect(ctx, &mcp.CommandTransport{Command: server}, nil)
	return Session{s}, err
}

// Call calls a tool with a JSON object of arguments.
func (s Session) Call(ctx context.Context, tool, args string) (*mcp.CallToolResult, error) {
	p := &mcp.CallToolParams{Name: tool, Arguments: json.RawMessage(args)}
	p.SetProgressToken(tool)
	return s.CallTool(ctx, p)
}

// Text returns the text of a result.
func Text(r *mcp.CallToolResult) string {
	text := ""
	for _, c := range r.Content {
		if t, ok := c.(*mcp.TextContent); ok {
			text += t.Text + "\n"
		}
	}
	return text
}

package sessioncmd

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/work/attach"
)

func multiplexerFlag(cmd *cobra.Command, name *string) {
	cmd.Flags().StringVar(name, "terminal", "", "what keeps the terminals of the session running: tmux or zellij; the session remembers it (default: behavior.terminal of the profile, or tmux)")
}

// openTerminalWeb prints the URL of a terminal of a session with the token for the login.
func openTerminalWeb(ctx context.Context, a *cli.App, c *client.Client, s api.Session, sandbox string, open guestapi.ExecRequest) error {
	got, err := attach.StartWeb(ctx, c, s, sandbox, open)
	if err != nil {
		return err
	}
	return a.Emit(got, func() error {
		a.Progressf("log in with the token; it is not shown again, and every call makes a new one")
		_, err := fmt.Fprintf(a.Stdout, "%s\ntoken: %s\n", got.URL, got.Token)
		return err
	})
}

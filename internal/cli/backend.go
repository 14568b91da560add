package cli

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
)

func (a *App) backendCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use: "backend", Short: "Show and check the backends of the daemon",
		Long: `Show and check the backends of the daemon: where its sandboxes and workspaces are.
docs/config.md describes how to configure several.`,
	}
	cmd.AddCommand(
		query(a, "list", "List the backends, the default first", exactArgs(), all((*client.Client).Backends), func(list api.List[api.Backend]) error {
			t := newTable(a.Stdout, "NAME", "DRIVER", "DEFAULT", "UP", "PROBLEM")
			for _, b := range list.Items {
				t.row(b.Name, b.Driver, yesNo(b.Default), yesNo(b.Up), orDash(b.Problem))
			}
			return t.flush()
		}),
		a.backendCheckCmd(),
	)
	return cmd
}

func (a *App) backendCheckCmd() *cobra.Command {
	return &cobra.Command{
		Use: "check BACKEND", Short: "Check a backend now, and print all findings", Args: exactArgs("BACKEND"),
		Long: "Check a backend now, and print all findings. The exit code is 1 if one of them is an error.",
		RunE: a.run(func(ctx context.Context, c *client.Client, args []string) error {
			checks, err := c.CheckBackend(ctx, args[0])
			if err != nil {
				return err
			}
			return a.emitChecks(checks)
		}),
	}
}

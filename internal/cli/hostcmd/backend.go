package cli

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
)

func (a *App) backendCmd() *cobra.Command {
	cmd := &cobra.Command{
		Use: "backend", Short: "Show, check and drain the backends of the daemon",
		Long: `Show, check and drain the backends of the daemon: where its sandboxes and workspaces are.
docs/config.md describes how to configure several.`,
	}
	cmd.AddCommand(
		query(a, "list", "List the backends, the default first", exactArgs(), all((*client.Client).Backends), func(list api.List[api.Backend]) error {
			t := newTable(a.Stdout, "NAME", "DRIVER", "DEFAULT", "UP", "DRAINED", "PROBLEM")
			for _, b := range list.Items {
				t.row(b.Name, b.Driver, yesNo(b.Default), yesNo(b.Up), yesNo(b.Drained), orDash(b.Problem))
			}
			return t.flush()
		}),
		a.backendCheckCmd(),
		a.backendDrainCmd("drain", "Make no new sandboxes and workspaces on a backend", `Make no new sandboxes and workspaces on a backend, until 'agentlab backend undrain'.
What is there stays and can be used, also after a restart of the daemon. Jobs that need a
new sandbox on it wait.`, (*client.Client).DrainBackend),
		a.backendDrainCmd("undrain", "Make sandboxes and workspaces on a drained backend again", "", (*client.Client).UndrainBackend),
	)
	return cmd
}

func (a *App) backendDrainCmd(name, short, long string, call func(*client.Client, context.Context, string) (api.Backend, error)) *cobra.Command {
	return &cobra.Command{
		Use: name + " BACKEND", Short: short, Long: long, Args: exactArgs("BACKEND"),
		RunE: a.run(func(ctx context.Context, c *client.Client, args []string) error {
			b, err := call(c, ctx, args[0])
			if err != nil {
				return err
			}
			return a.done(b, "backend %s is %s", b.Name, map[bool]string{true: "drained", false: "no longer drained"}[b.Drained])
		}),
	}
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

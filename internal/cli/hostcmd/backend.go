package hostcmd

import (
	"context"
	"strings"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
)

func backendCmd(a *cli.App) *cobra.Command {
	cmd := &cobra.Command{
		Use: "backend", Short: "Show, check and drain the backends of the daemon",
		Long: `Show, check and drain the backends of the daemon: where its sandboxes and workspaces are.
docs/config.md describes how to configure several.`,
	}
	cmd.AddCommand(
		cli.Query(a, "list", "List the backends, the default first", cli.ExactArgs(), cli.All((*client.Client).Backends), func(list api.List[api.Backend]) error {
			t := cli.NewTable(a.Stdout, "NAME", "DRIVER", "DEFAULT", "UP", "DRAINED", "PROBLEM")
			for _, b := range list.Items {
				t.Row(b.Name, b.Driver, cli.YesNo(b.Default), cli.YesNo(b.Up), cli.YesNo(b.Drained), cli.OrDash(b.Problem))
			}
			return t.Flush()
		}),
		backendShowCmd(a),
		backendCheckCmd(a),
		backendDrainCmd(a, "drain", "Make no new sandboxes and workspaces on a backend", `Make no new sandboxes and workspaces on a backend, until 'agentlab backend undrain'.
What is there stays and can be used, also after a restart of the daemon. Jobs that need a
new sandbox on it wait.`, (*client.Client).DrainBackend),
		backendDrainCmd(a, "undrain", "Make sandboxes and workspaces on a drained backend again", "", (*client.Client).UndrainBackend),
	)
	return cmd
}

func backendDrainCmd(a *cli.App, name, short, long string, call func(*client.Client, context.Context, string) (api.Backend, error)) *cobra.Command {
	return &cobra.Command{
		Use: name + " BACKEND", Short: short, Long: long, Args: cli.ExactArgs("BACKEND"),
		RunE: a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
			b, err := call(c, ctx, args[0])
			if err != nil {
				return err
			}
			return a.Done(b, "backend %s is %s", b.Name, map[bool]string{true: "drained", false: "no longer drained"}[b.Drained])
		}),
	}
}

func backendShowCmd(a *cli.App) *cobra.Command {
	fetch := func(ctx context.Context, c *client.Client, args []string) (b api.Backend, err error) {
		list, err := c.Backends(ctx)
		if err != nil {
			return b, err
		}
		var names []string
		for _, b := range list.Items {
			if b.Name == args[0] {
				return b, nil
			}
			names = append(names, b.Name)
		}
		return b, agentlab.Errorf(agentlab.CodeNotFound, "there is no backend %q", args[0]).WithHint("use one of %s", strings.Join(names, ", "))
	}
	return cli.Query(a, "show BACKEND", "Show a backend and what it supports", cli.ExactArgs("BACKEND"), fetch, func(b api.Backend) error {
		t := cli.NewTable(a.Stdout, "Backend:", b.Name)
		t.Row("Driver:", b.Driver)
		t.Row("Default:", cli.YesNo(b.Default))
		t.Row("Up:", cli.YesNo(b.Up))
		t.Row("Drained:", cli.YesNo(b.Drained))
		t.Row("Problem:", cli.OrDash(agentlab.WithoutControls(b.Problem)))
		t.Row("Supports:", cli.OrDash(strings.Join(b.Supports, ", ")))
		return t.Flush()
	})
}

func backendCheckCmd(a *cli.App) *cobra.Command {
	return &cobra.Command{
		Use: "check BACKEND", Short: "Check a backend now, and print all findings", Args: cli.ExactArgs("BACKEND"),
		Long: "Check a backend now, and print all findings. The exit code is 1 if one of them is an error.",
		RunE: a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
			checks, err := c.CheckBackend(ctx, args[0])
			if err != nil {
				return err
			}
			return emitChecks(a, checks)
		}),
	}
}

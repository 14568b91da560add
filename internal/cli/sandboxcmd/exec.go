package sandboxcmd

import (
	"context"
	"errors"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/guestapi"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/work"
	"github.com/agentlab-vm/agentlab/internal/work/attach"
)

func execCmd(a *cli.App) *cobra.Command {
	var req guestapi.ExecRequest
	var env []string
	var interactive bool
	cmd := &cobra.Command{
		Use:   "exec SANDBOX|SESSION [flags] [--] COMMAND [ARG...]",
		Short: "Run a command in a sandbox and exit with its code",
		Long: `Run a command in a sandbox, or in that of a session, and exit with its code. Flags of
exec precede COMMAND; all words after COMMAND are its arguments.`,
		Example: `  agentlab exec play uname -a
  agentlab exec play --user root -- apt-get install -y make
  tar c src | agentlab exec -i play tar x -C /tmp
  agentlab exec -t -i play bash`,
		DisableFlagParsing: true, // flags after COMMAND belong to the command
	}
	flags := cmd.Flags()
	flags.StringVarP(&req.User, "user", "u", "", "user (default agent)")
	flags.StringVarP(&req.Dir, "dir", "C", "", "working directory (default: the user's home)")
	flags.StringArrayVarP(&env, "env", "e", nil, "NAME=VALUE, or NAME for the value on this machine; can be repeated")
	flags.BoolVarP(&req.TTY, "tty", "t", false, "allocate a terminal")
	flags.BoolVarP(&interactive, "stdin", "i", false, "forward standard input")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		sandbox, command, err := splitExec(cmd, args)
		if errors.Is(err, pflag.ErrHelp) {
			return cmd.Help()
		}
		if err != nil {
			return err
		}
		req.Command = command
		if req.Env, err = envFlag(env); err != nil {
			return err
		}
		return a.RunE(func(ctx context.Context, c *client.Client, _ []string) error {
			return execute(ctx, a, c, sandbox, req, interactive)
		})(cmd, nil)
	}
	return cmd
}

// splitExec parses flags before and directly after SANDBOX, but not after COMMAND.
func splitExec(cmd *cobra.Command, args []string) (sandbox string, command []string, err error) {
	flags := cmd.Flags()
	flags.AddFlagSet(cmd.InheritedFlags())
	if flags.Lookup("help") == nil {
		flags.BoolP("help", "h", false, "print this help")
	}
	flags.SetInterspersed(false)
	for range 2 {
		if err := flags.Parse(args); err != nil {
			if errors.Is(err, pflag.ErrHelp) {
				return "", nil, err
			}
			return "", nil, cli.FlagError(cmd, err)
		}
		if help, _ := flags.GetBool("help"); help {
			return "", nil, pflag.ErrHelp
		}
		args = flags.Args()
		if sandbox != "" || len(args) == 0 {
			break
		}
		sandbox, args = args[0], args[1:]
	}
	if sandbox == "" || len(args) == 0 {
		return "", nil, work.UsageErrorf("SANDBOX and COMMAND are required").WithHint("usage: %s", cmd.UseLine())
	}
	return sandbox, args, nil
}

func envFlag(list []string) (map[string]string, error) {
	env := map[string]string{}
	for _, kv := range list {
		k, v, ok := strings.Cut(kv, "=")
		if k == "" {
			return nil, work.UsageErrorf("%q is not NAME=VALUE", kv)
		}
		if !ok {
			v = os.Getenv(k)
		}
		env[k] = v
	}
	return env, nil
}

func execute(ctx context.Context, a *cli.App, c *client.Client, sandbox string, req guestapi.ExecRequest, interactive bool) error {
	if req.TTY {
		if _, tty := work.TerminalOf(a.Stdin); !tty && interactive {
			return work.UsageErrorf("--tty requires a terminal as standard input").WithHint("remove -t")
		}
		req.Rows, req.Cols, req.Term = a.Attached().Size()
	}
	conn, err := c.Exec(ctx, sandbox, req)
	if err != nil {
		return err
	}
	if req.TTY {
		defer attach.NoticeLease(ctx, c, sandbox, a.Stderr)()
	}
	var in io.Reader
	if interactive {
		in = a.Stdin
	}
	return a.Attached().Run(ctx, conn, in, req.TTY)
}

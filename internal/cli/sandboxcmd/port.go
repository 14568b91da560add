package sandboxcmd

import (
	"context"
	"fmt"
	"net"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/api"
	"github.com/agentlab-vm/agentlab/client"
	"github.com/agentlab-vm/agentlab/internal/cli"
	"github.com/agentlab-vm/agentlab/internal/connlimit"
	"github.com/agentlab-vm/agentlab/internal/stream"
	"github.com/agentlab-vm/agentlab/internal/work"
)

func portCmd(a *cli.App) *cobra.Command {
	cmd := &cobra.Command{
		Use: "port", Short: "Show and forward the TCP ports of sandboxes",
		Long: `Show and forward the TCP ports of sandboxes. A port on which a process of a sandbox
listens is available in a browser on this machine without any set-up, as
http://PROJECT.sandbox.localhost:PORT. PROJECT is the name of the session, or of a
sandbox without one. See docs/devservers.md.`,
		Example: `  agentlab port list
  agentlab port forward play 5432
  agentlab open play`,
	}
	cmd.AddCommand(portListCmd(a), portForwardCmd(a))
	return cmd
}

func portListCmd(a *cli.App) *cobra.Command {
	cmd := cli.Query(a, "list [SANDBOX|SESSION]", "List the ports on which processes of sandboxes listen", cli.OptionalArg("SANDBOX|SESSION"), portsOf, func(list api.List[api.Port]) error {
		t := cli.NewTable(a.Stdout, "SANDBOX", "PORT", "WORKTREE", "PROGRAM", "URL", "NOTE")
		for _, p := range list.Items {
			t.Row(p.Sandbox, strconv.Itoa(p.Port), cli.OrDash(agentlab.WithoutControls(p.Worktree)), cli.OrDash(agentlab.WithoutControls(p.Program)), cli.OrDash(p.URL), cli.OrDash(agentlab.WithoutControls(p.Problem)))
		}
		return t.Flush()
	})
	cmd.Aliases = []string{"ls"}
	return cmd
}

// portsOf lists the ports of the sandbox or session in args, or of all sandboxes.
func portsOf(ctx context.Context, c *client.Client, args []string) (api.List[api.Port], error) {
	return c.Ports(ctx, cli.FirstOf(args))
}

// forwarding is one port to forward.
type forwarding struct{ local, remote uint16 }

// parseForwarding reads [LOCAL:]REMOTE. A local port of 0 is a free one.
func parseForwarding(text string) (f forwarding, err error) {
	local, remote, two := strings.Cut(text, ":")
	if !two {
		local, remote = text, text
	}
	l, lerr := strconv.ParseUint(local, 10, 16)
	r, rerr := strconv.ParseUint(remote, 10, 16)
	if lerr != nil || rerr != nil || r == 0 {
		return f, work.UsageErrorf("%q is not [LOCAL:]REMOTE with two ports", text).WithHint("for example 5432, or 15432:5432; a LOCAL of 0 is a free port")
	}
	return forwarding{uint16(l), uint16(r)}, nil
}

// maxForwarded is the maximum number of connections to one forwarded port.
const maxForwarded = 256

func portForwardCmd(a *cli.App) *cobra.Command {
	cmd := &cobra.Command{
		Use: "forward SANDBOX|SESSION [LOCAL:]REMOTE...", Short: "Forward local TCP ports to ports of a sandbox",
		Long: `Forward TCP ports of this machine's loopback to ports of a sandbox, through the
daemon, until the command is interrupted. LOCAL is the port of this machine; it is the
same as REMOTE if it is not given, and a free one if it is 0. REMOTE may be bound to the
loopback of the sandbox only.`,
		Example: `  agentlab port forward play 5432
  agentlab port forward play 15432:5432 0:6379`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) < 2 {
				return cli.ExactArgs("SANDBOX|SESSION", "[LOCAL:]REMOTE")(cmd, args)
			}
			return nil
		},
	}
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		var list []forwarding
		for _, text := range args[1:] {
			f, err := parseForwarding(text)
			if err != nil {
				return err
			}
			list = append(list, f)
		}
		sb, err := c.Sandbox(ctx, args[0])
		if err != nil {
			return err
		}
		return forward(ctx, a, c, sb, list)
	})
	return cmd
}

// forward forwards ports until ctx ends.
func forward(ctx context.Context, a *cli.App, c *client.Client, sb api.Sandbox, list []forwarding) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var listeners []net.Listener
	type address struct {
		Address string `json:"address"`
		Port    int    `json:"port"`
	}
	shown := []address{}
	defer func() {
		for _, l := range listeners {
			_ = l.Close()
		}
	}()
	for _, f := range list {
		var lc net.ListenConfig
		l, err := lc.Listen(ctx, "tcp4", fmt.Sprintf("127.0.0.1:%d", f.local))
		if err != nil {
			return agentlab.Errorf(agentlab.CodeUnavailable, "cannot listen on port %d: %w", f.local, err).
				WithHint("choose another local port: agentlab port forward %s 0:%d", sb.Name, f.remote)
		}
		listeners = append(listeners, connlimit.New(l, maxForwarded, maxForwarded))
		shown = append(shown, address{l.Addr().String(), int(f.remote)})
	}
	err := a.Emit(map[string]any{"sandbox": sb.Name, "forwarded": shown}, func() error {
		for _, s := range shown {
			a.Progressf("%s is port %d of sandbox %s", s.Address, s.Port, sb.Name)
		}
		return nil
	})
	if err != nil {
		return err
	}
	for i, l := range listeners {
		wg.Go(func() { acceptForwarded(ctx, a, c, l, strconv.Itoa(sb.VMID), list[i].remote) })
	}
	<-ctx.Done()
	return context.Canceled
}

// acceptForwarded serves the connections of one port until ctx ends, and closes l then.
func acceptForwarded(ctx context.Context, a *cli.App, c *client.Client, l net.Listener, sandbox string, port uint16) {
	var wg sync.WaitGroup
	defer wg.Wait()
	defer context.AfterFunc(ctx, func() { _ = l.Close() })()
	for {
		near, err := l.Accept()
		if err != nil {
			if work.SleepOr(ctx, 100*time.Millisecond) != nil { // no file descriptor is free, or ctx has ended
				return
			}
			continue
		}
		wg.Go(func() {
			far, err := c.Dial(ctx, sandbox, port)
			if err != nil {
				_ = near.Close()
				if ctx.Err() == nil {
					a.Progressf("port %d: %s", port, agentlab.WithoutControls(err.Error()))
				}
				return
			}
			defer context.AfterFunc(ctx, func() {
				_ = near.Close()
				_ = far.Close()
			})()
			stream.Splice(near, far)
		})
	}
}

func openCmd(a *cli.App) *cobra.Command {
	var port int
	var show bool
	cmd := &cobra.Command{
		Use: "open [SANDBOX|SESSION]", Short: "Open a sandbox's server in the browser, or its files in an editor",
		Long: `Open a port on which a process of a sandbox listens in the browser. Without --port and
with several ports, it is the only one of the main checkout, or an error lists them.

The commands below open the repository of a session in an editor of this machine
instead. A sandbox with the name of an editor is opened by its VMID.`,
		Example: `  agentlab open play
  agentlab open play --port 5173 --print
  agentlab open vscode`,
		Args: cli.OptionalArg("SANDBOX|SESSION"),
	}
	cmd.Flags().IntVar(&port, "port", 0, "port in the sandbox")
	cmd.Flags().BoolVar(&show, "print", false, "print the URL instead of opening it")
	for _, e := range editors {
		cmd.AddCommand(openEditorCmd(a, e))
	}
	cmd.RunE = a.RunE(func(ctx context.Context, c *client.Client, args []string) error {
		list, err := portsOf(ctx, c, args)
		if err != nil {
			return err
		}
		p, err := choosePort(list.Items, port)
		if err != nil {
			return err
		}
		if show || a.JSON {
			return a.Emit(p, func() error { _, err := fmt.Fprintln(a.Stdout, p.URL); return err })
		}
		return openBrowser(ctx, p.URL)
	})
	return cmd
}

// choosePort returns the only served port, or the only one of the main checkouts. A port
// of 0 means any.
func choosePort(list []api.Port, port int) (api.Port, error) {
	var all, main []api.Port
	var urls []string
	for _, p := range list {
		if p.URL == "" || port != 0 && p.Port != port {
			continue
		}
		all, urls = append(all, p), append(urls, p.URL)
		if p.Worktree == "" {
			main = append(main, p)
		}
	}
	switch {
	case len(all) == 1:
		return all[0], nil
	case len(main) == 1:
		return main[0], nil
	case len(all) == 0:
		return api.Port{}, agentlab.Errorf(agentlab.CodeNotFound, "no process listens on a port").WithHint("start a server in the sandbox; see 'agentlab port list'")
	}
	return api.Port{}, agentlab.Errorf(agentlab.CodeConflict, "there are %d ports: %s", len(all), strings.Join(urls, " ")).WithHint("name the sandbox, and the port with --port")
}

// desktopOpener is the program that opens a URL with the desktop's program for it.
func desktopOpener() string {
	if runtime.GOOS == "darwin" {
		return "open"
	}
	return "xdg-open"
}

// openBrowser starts the browser of the desktop.
func openBrowser(ctx context.Context, url string) error {
	program := desktopOpener()
	err := exec.CommandContext(ctx, program, url).Run()
	if err != nil {
		return agentlab.Errorf(agentlab.CodeUnavailable, "%s did not open the browser: %w", program, err).WithHint("open %s", url)
	}
	return nil
}

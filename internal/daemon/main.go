package daemon

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"slices"
	"syscall"

	"golang.org/x/term"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend/registry"
	"github.com/agentlab-vm/agentlab/internal/backends"
	"github.com/agentlab-vm/agentlab/internal/config"
	"github.com/agentlab-vm/agentlab/internal/hostnet"
	"github.com/agentlab-vm/agentlab/internal/recovery"
	"github.com/agentlab-vm/agentlab/internal/version"
)

const usage = `agentlabd is the daemon of AgentLab. 'agentlab' starts it when it is needed.

Usage:
  agentlabd run [--home DIR | --system]   run the daemon in the foreground
  agentlabd network render|apply|remove|status|settings
                                          manage the firewall of a bridge for
                                          sandboxes, without a daemon
  agentlabd db list|restore|rebuild       repair the database while no daemon
                                          runs
  agentlabd image stage                   prepare the disk of a template
  agentlabd --version                     print version, commit and date
  agentlabd --help                        print this

  --home DIR   keep configuration, state, cache and runtime files under DIR,
               as AGENTLAB_HOME=DIR does
  --system     serve the whole machine: /etc/agentlab, /var/lib/agentlab,
               /run/agentlab; for root, from a systemd unit

SIGTERM and SIGINT stop the daemon. VMs keep running; the next daemon manages
them.
`

// Main runs agentlabd with the given arguments and backends; none means
// backends.All. It returns the exit code: 0 ok, 2 usage, else config.ExitCode.
func Main(args []string, known ...registry.Backend) int {
	if len(known) == 0 {
		known = backends.All
	}
	// The first SIGTERM or SIGINT ends the context, the second one kills.
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	context.AfterFunc(ctx, stop)
	err := command(ctx, args, known)
	if u, ok := errors.AsType[config.Usage](err); ok && asksForHelp(args) {
		fmt.Fprint(os.Stdout, u)
		return 0
	}
	return printError(os.Stderr, err)
}

// asksForHelp reports whether the usage that a command returns was requested.
func asksForHelp(args []string) bool {
	isHelp := func(arg string) bool { return arg == "-h" || arg == "-help" || arg == "--help" }
	return slices.ContainsFunc(args, isHelp) || slices.Equal(args, []string{"help"})
}

func command(ctx context.Context, args []string, known registry.List) error {
	if len(args) == 0 {
		return config.Usage(usage)
	}
	switch verb, rest := args[0], args[1:]; {
	case len(rest) == 0 && (verb == "--version" || verb == "version"):
		_, err := fmt.Fprintln(os.Stdout, "agentlabd", version.String())
		return err
	case verb == "run":
		return run(ctx, rest, known)
	case verb == "network":
		return hostnet.Command(ctx, rest, known.Load, os.Stdout, os.Stderr)
	case verb == "db":
		return recovery.Command(ctx, rest, known, os.Stdout)
	case verb == "image":
		return imageCommand(ctx, rest, os.Stdout)
	case (verb == "vmm" || verb == "helper") && len(rest) > 0: // only drivers and their programs start them
		return known.Process(ctx, verb, rest)
	}
	return config.Usage(usage)
}

// printError prints an error and its hint in the format that the command line
// expects, and returns the exit code.
func printError(w io.Writer, err error) int {
	if err == nil {
		return 0
	}
	if u, ok := errors.AsType[config.Usage](err); ok {
		fmt.Fprint(w, u)
		return 2
	}
	if j, ok := errors.AsType[config.JSONError](err); ok {
		fmt.Fprint(w, j.JSON())
		return 1
	}
	fmt.Fprintf(w, "agentlabd: %v\n", err)
	if hint := agentlab.HintOf(err); hint != "" {
		fmt.Fprintf(w, "  %s\n", hint)
	}
	return config.ExitCode(err)
}

// gcPercent is how much the heap may grow until the next garbage collection. What is
// in use is small also with thousands of sandboxes, and a request for a page of a
// list needs a few megabytes, so that collections are cheap. A busy host finishes a
// collection late, and the heap grows beyond this in the meantime.
const gcPercent = 25

// run is 'agentlabd run'.
func run(ctx context.Context, args []string, known registry.List) error {
	fs := flag.NewFlagSet("agentlabd run", flag.ContinueOnError)
	home, err := config.ParseHome(fs, args)
	if errors.Is(err, flag.ErrHelp) {
		return config.Usage(usage)
	}
	if err == nil && fs.NArg() > 0 {
		err = fmt.Errorf("unknown argument %q", fs.Arg(0))
	}
	if err != nil {
		return config.Usage(fmt.Sprintf("agentlabd: %v\n  see agentlabd --help\n", err))
	}
	paths, err := home.Paths()
	if err != nil {
		return err
	}
	cfg := Config{Paths: paths, Getenv: home.Getenv, Backends: known}
	// In the background standard error is a file without a size limit;
	// everything is in the log.
	if home.System || term.IsTerminal(int(os.Stderr.Fd())) {
		cfg.Stderr = os.Stderr
	}
	if home.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
	d, err := New(ctx, cfg)
	if err != nil {
		return err
	}
	return errors.Join(d.Run(ctx), d.Close())
}

package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"golang.org/x/term"

	"github.com/agentlab-vm/agentlab"
	"github.com/agentlab-vm/agentlab/internal/backend/registry"
	"github.com/agentlab-vm/agentlab/internal/backends"
	"github.com/agentlab-vm/agentlab/internal/config"
	"github.com/agentlab-vm/agentlab/internal/supervisor"
	"github.com/agentlab-vm/agentlab/internal/version"
)

const usage = `agentlabd is the daemon of AgentLab. 'agentlab' starts it when it is needed.

Usage:
  agentlabd run [--home DIR | --system]   run the daemon in the foreground
  agentlabd network render|apply|remove|status|settings
                                          keep the firewall of a bridge with
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

SIGTERM and SIGINT end the daemon. Virtual machines go on, and the next daemon
finds them.
`

// Main runs agentlabd with the given arguments and backends; none means
// backends.All. It returns the exit code: 0 ok, 1 failure, 2 usage.
func Main(args []string, known ...registry.Backend) int {
	if len(known) == 0 {
		known = backends.All
	}
	switch {
	case len(args) == 1 && (args[0] == "--version" || args[0] == "version"):
		fmt.Fprintln(os.Stdout, "agentlabd", version.String())
		return 0
	case len(args) == 1 && (args[0] == "--help" || args[0] == "-h" || args[0] == "help"):
		fmt.Fprint(os.Stdout, usage)
		return 0
	case len(args) >= 1 && args[0] == "run":
		o, err := parseRun(args[1:])
		if err != nil {
			return printError(os.Stderr, err, 2)
		}
		o.backends = known
		return printError(os.Stderr, o.run(), 1)
	case len(args) >= 1 && args[0] == "network":
		return networkCommand(args[1:], known, os.Stdout, os.Stderr)
	case len(args) >= 1 && args[0] == "db":
		return dbCommand(args[1:], known, os.Stdout, os.Stderr)
	case len(args) >= 1 && args[0] == "image":
		return imageCommand(args[1:], os.Stdout, os.Stderr)
	case len(args) == 2 && args[0] == "vmm": // a VM's supervisor; only drivers start it
		return printError(os.Stderr, untilSignal(func(ctx context.Context) error {
			return supervisor.Run(ctx, args[1], registry.List(known).VM, supervisor.Options{})
		}), 1)
	}
	fmt.Fprint(os.Stderr, usage)
	return 2
}

// printError prints an error and its hint in the format that the command line
// expects, and returns the exit code.
func printError(w io.Writer, err error, code int) int {
	if err == nil {
		return 0
	}
	fmt.Fprintf(w, "agentlabd: %v\n", err)
	if hint := agentlab.HintOf(err); hint != "" {
		fmt.Fprintf(w, "  %s\n", hint)
	}
	return code
}

type runOptions struct {
	home     string
	system   bool
	backends registry.List
}

func parseRun(args []string) (o runOptions, err error) {
	for len(args) > 0 {
		name, value, has := strings.Cut(args[0], "=")
		args = args[1:]
		switch {
		case name == "--system" && !has:
			o.system = true
		case name == "--home":
			if !has && len(args) > 0 {
				value, args = args[0], args[1:]
			}
			if value == "" {
				return o, agentlab.Errorf(agentlab.CodeInvalid, "--home needs a directory")
			}
			o.home = value
		default:
			return o, agentlab.Errorf(agentlab.CodeInvalid, "unknown argument %q", name).WithHint("see agentlabd --help")
		}
	}
	if o.system && o.home != "" {
		return o, agentlab.Errorf(agentlab.CodeInvalid, "--home and --system exclude each other")
	}
	return o, nil
}

// getenv returns the environment, overridden by the options.
func (o runOptions) getenv() func(string) string {
	if o.home == "" && !o.system {
		return os.Getenv
	}
	return func(key string) string {
		if key == "AGENTLAB_HOME" {
			return o.home
		}
		return os.Getenv(key)
	}
}

func (o runOptions) run() error {
	getenv := o.getenv()
	paths, err := config.ResolvePaths(getenv, o.system)
	if err != nil {
		return err
	}
	cfg := Config{Paths: paths, Getenv: getenv, Backends: o.backends}
	// In the background standard error is a file without a size limit;
	// everything is in the log.
	if o.system || term.IsTerminal(int(os.Stderr.Fd())) { //nolint:gosec // a file descriptor fits an int
		cfg.Stderr = os.Stderr
	}
	return untilSignal(func(ctx context.Context) error {
		d, err := New(ctx, cfg)
		if err != nil {
			return err
		}
		return errors.Join(d.Run(ctx), d.Close())
	})
}

// untilSignal runs f with a context that ends at the first SIGTERM or SIGINT.
// The second signal kills the process.
func untilSignal(f func(ctx context.Context) error) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	context.AfterFunc(ctx, stop)
	return f(ctx)
}

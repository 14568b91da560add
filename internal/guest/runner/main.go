package runner

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

const usage = `agent-runner run does the job of this sandbox.

Usage: agent-runner run [--bootstrap FILE] [--run-dir DIR]

The defaults are $AGENTLAB_BOOTSTRAP or /etc/agentlab/bootstrap.json, and
/run/agentlab/secrets, which must be on a tmpfs. It exits 0 when nothing is
left to do. After any other exit code, start it again: it continues.
`

func parse(args []string) (Config, bool) {
	var cfg Config
	f := flag.NewFlagSet("agent-runner run", flag.ContinueOnError)
	f.Usage = func() { fmt.Fprint(os.Stderr, usage) }
	f.StringVar(&cfg.Bootstrap, "bootstrap", "", "")
	f.StringVar(&cfg.RunDir, "run-dir", "", "")
	ok := f.Parse(args) == nil && f.NArg() == 0
	if !ok {
		f.Usage()
	}
	return cfg, ok
}

// Main runs the command `agent-runner run`; args are the arguments after "run".
// staged is called when programs of the agent's user can use the secrets.
func Main(args []string, staged func()) int {
	cfg, ok := parse(args)
	if !ok {
		return 2
	}
	cfg.Staged = staged
	return run(cfg)
}

func run(cfg Config) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	r, err := New(cfg)
	if err == nil {
		err = r.Run(ctx)
	}
	if err != nil {
		msg := err.Error()
		if r != nil {
			msg = r.redactor().String(msg)
		}
		fmt.Fprintln(os.Stderr, "agent-runner:", msg)
		return 1
	}
	return 0
}

// WipeStaged removes what a runner of this user has staged, with the default
// configuration.
func WipeStaged() error {
	cfg, err := Config{}.withDefaults()
	if err != nil {
		return err
	}
	return Wipe(cfg.RunDir, cfg.Home)
}

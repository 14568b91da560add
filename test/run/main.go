// Command run runs the tests of this module. The Makefile calls it.
//
// A run has two parts. The units, 'go test -short' of all packages, need no virtual machine;
// a third of them runs under the race detector. Tests that -short skips (sample.Long) are the
// second part, each in a process of its own: first the core paths through real virtual
// machines, then the others, in an order that the seed selects, until the budget of
// wall-clock time is used. A slow machine runs fewer of them, it does not fail.
//
// A test that fails runs again, alone. If it passes twice, it is reported as flaky at the end,
// and does not fail the run. See verdict.go.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"syscall"
	"time"
)

// Environment of the tests. Package test/sample reads the first two, package test/guard the
// last one.
const (
	envFull   = "AGENTLAB_TEST_FULL"   // "1": every case of every table
	envSeed   = "AGENTLAB_TEST_SEED"   // selects the cases of a run that is not full
	envShared = "AGENTLAB_TEST_SHARED" // directory of what the processes of a run make once
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	ok, err := command(ctx, os.Args[1:])
	if err != nil {
		fmt.Fprintln(os.Stderr, "run:", err)
	}
	if err != nil || !ok {
		stop()
		os.Exit(1)
	}
}

func command(ctx context.Context, args []string) (bool, error) {
	flags := flag.NewFlagSet("run", flag.ExitOnError)
	mode := flags.String("mode", "test", "`tier`: check (units without the race detector), race (units under it), test, or full (everything)")
	budget := flags.Duration("budget", 12*time.Minute, "wall-clock time of the tests in virtual machines; no test begins after it")
	workers := flags.Int("workers", 3, "tests in virtual machines that run at once")
	flags.Usage = func() {
		fmt.Fprintln(flags.Output(), "usage: go run ./test/run [flags] [packages]")
		flags.PrintDefaults()
	}
	_ = flags.Parse(args)
	dir, err := os.Getwd()
	if err != nil {
		return false, err
	}
	seed, err := seedOf(os.Getenv(envSeed))
	if err != nil {
		return false, err
	}
	s := &suite{
		dir: dir, seed: seed, budget: *budget, workers: *workers, core: core, grace: 12 * time.Minute, inMemory: "scripts/in-memory.sh", logs: filepath.Join(dir, ".cache", "test", "logs"), out: os.Stdout,
		packages: flags.Args(), env: []string{envSeed + "=" + strconv.FormatUint(seed, 10)},
	}
	if len(s.packages) > 0 {
		s.core = nil // of other packages
	} else {
		s.packages = []string{"./..."}
	}
	switch *mode {
	case "check":
		s.units = plainUnits
	case "race":
		s.units = racedUnits
	case "test":
		s.units, s.machines = sampledUnits, true
	case "full":
		s.units, s.machines, s.full = racedUnits, true, true
		s.env = append(s.env, envFull+"=1")
	default:
		return false, fmt.Errorf("unknown mode %q (check, race, test, full)", *mode)
	}
	return s.run(ctx)
}

// seedOf parses a seed. The Makefile derives it from the commit, so that a second run of a
// commit selects the same tests, and the next commit selects others.
func seedOf(text string) (uint64, error) {
	if text == "" {
		return 0, fmt.Errorf("%s is not set; 'make test' sets it", envSeed)
	}
	seed, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", envSeed, err)
	}
	return seed, nil
}

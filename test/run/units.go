package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"
)

const module = "github.com/agentlab-vm/agentlab"

// hangLimit ends a package or a test that does not come to its end: a hang, not a slow
// machine. CI kills a run after 90 minutes.
const hangLimit = 60 * time.Minute

// archtest reads the sources of the module, which 'make lint' tests once.
const archtest = module + "/internal/archtest"

var (
	// first are the packages that take longest, most of it waiting: they start first.
	first = []string{"internal/egress/nft", "internal/backend/proxmox", "internal/job", "internal/sandbox", "internal/cli"}

	// costly packages take more than half of the CPU seconds of all packages under the race
	// detector. A sampled run has one of them there.
	costly = []string{"internal/cli", "internal/job", "internal/backend/proxmox", "internal/sandbox", "internal/guest/runner"}

	// unraced code is C that was translated to Go (SQLite), with memory of its own: the race
	// detector finds nothing in it, and its checks would take most of the time.
	unraced = []string{"modernc.org/sqlite/lib", "modernc.org/libc/...", "modernc.org/memory"}
)

// group is a set of packages that one 'go test' runs.
type group struct {
	title    string
	packages []string // import paths
	race     bool
}

// flags returns the arguments of 'go test' for one or several packages of the group.
func (g *group) flags() []string {
	// 'make lint' runs vet. Without symbols for debuggers, programs are linked faster. Parallel
	// tests mostly wait for processes.
	out := []string{"-vet=off", "-ldflags=-s -w", "-short", "-parallel", "4", "-timeout", hangLimit.String()}
	if g.race {
		out = append(out, "-race")
		for _, p := range unraced {
			out = append(out, "-gcflags="+p+"=-race=false -d=checkptr=0")
		}
	}
	return out
}

func plainUnits(all []string, _ uint64) []group { return []group{{title: "units", packages: all}} }

func racedUnits(all []string, _ uint64) []group {
	return []group{{title: "units, race detector", packages: all, race: true}}
}

// racedPart is the part of the packages that a sampled run has under the race detector, where
// tests take three times as long and every dependency is compiled once more: one in racedPart.
const racedPart = 3

// sampledUnits has one of the costly packages and a third of the others, which the seed
// selects, under the race detector, and the rest without it.
func sampledUnits(all []string, seed uint64) []group {
	selected := module + "/" + costly[seed%uint64(len(costly))]
	var plain, raced []string
	for _, p := range all {
		in := p == selected
		if !slices.Contains(costly, strings.TrimPrefix(p, module+"/")) {
			h := fnv.New64a()
			_, _ = fmt.Fprint(h, seed, p)
			in = h.Sum64()%racedPart == 0
		}
		if in {
			raced = append(raced, p)
		} else {
			plain = append(plain, p)
		}
	}
	return []group{{title: "units", packages: plain}, {title: "units, race detector", packages: raced, race: true}}
}

// runUnits runs one group.
func (s *suite) runUnits(ctx context.Context, g group) error {
	if len(g.packages) == 0 {
		return nil
	}
	began := time.Now()
	s.say("=== %s: %d packages", g.title, len(g.packages))
	args := append([]string{"test", "-json", "-p", "6"}, g.flags()...)
	err := s.goTest(ctx, append(args, g.packages...), func(o outcome) { s.record(o, s.againUnit(g, o.name)) })
	s.say("=== %s: %d s", g.title, int(time.Since(began).Seconds()))
	return err
}

// goTest runs 'go test -json' and passes on each outcome. That a test fails is no error.
func (s *suite) goTest(ctx context.Context, args []string, done func(outcome)) error {
	argv := append([]string{"go"}, args...)
	if s.inMemory != "" {
		argv = append([]string{s.inMemory}, argv...)
	}
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...) //nolint:gosec // arguments of this program
	cmd.Dir = s.dir
	// A process under the race detector waits a second at its end for other goroutines;
	// tests start hundreds of processes.
	cmd.Env = append(append(os.Environ(), "GORACE=atexit_sleep_ms=20 "+os.Getenv("GORACE")), s.env...)
	var stderr bytes.Buffer
	cmd.Stderr = io.MultiWriter(&stderr, os.Stderr)
	gently(cmd)
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	ended := 0
	st := newStream(func(o outcome) {
		if o.Test == "" {
			ended++
		}
		done(o)
	})
	readErr := st.read(out, "")
	waitErr := cmd.Wait()
	if err := ctx.Err(); err != nil {
		return err
	}
	if readErr != nil {
		return readErr
	}
	// Failed tests and builds are events. Another end, such as a signal, leaves packages out.
	if exit := (*exec.ExitError)(nil); waitErr != nil && (ended == 0 || !errors.As(waitErr, &exit) || exit.ExitCode() != 1) {
		return fmt.Errorf("go test: %w: %s", waitErr, strings.TrimSpace(stderr.String()))
	}
	return nil
}

// againUnit returns a function that runs a test of a group again, alone.
func (s *suite) againUnit(g group, n name) func(context.Context) (outcome, error) {
	return func(ctx context.Context) (last outcome, err error) {
		args := append([]string{"test", "-json", "-count=1"}, g.flags()...)
		if n.Test != "" {
			args = append(args, "-run", "^"+n.Test+"$")
		}
		seen := false
		err = s.goTest(ctx, append(args, n.Package), func(o outcome) {
			if o.name == n {
				last, seen = o, true
			}
		})
		if err == nil && !seen {
			err = fmt.Errorf("%s did not run", n)
		}
		return last, err
	}
}

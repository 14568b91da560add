package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
)

// core are the paths that each run takes through real virtual machines, the longest first.
var core = []name{
	{module + "/test/e2e", "TestProxmoxShell"},
	{module + "/test/e2e", "TestProxmoxREST"},
	{module + "/test/e2e", "TestWorkflow"}, // a real agent on a terminal, from start to sync
	{module + "/test/e2e", "TestKill"},
	{module + "/test/e2e", "TestProbeTable"},
	{module + "/test/e2e", "TestJobByURL"},
	{module + "/test/e2e", "TestJobLocalRepository"},
}

// runMachines runs the core paths, then the other long tests until the budget is used.
func (s *suite) runMachines(ctx context.Context) error {
	queue := slices.Clone(s.core)
	rest := s.shuffled()
	s.say("=== virtual machines: %d core tests, then a sample of %d other long tests for %s", len(queue), len(rest), s.budget)
	if len(queue) == 0 && len(rest) == 0 {
		return nil
	}
	if err := s.build(ctx, slices.Concat(queue, rest)); err != nil {
		return err
	}
	shared, err := os.MkdirTemp("", "agentlab-test-*")
	if err != nil {
		return err
	}
	s.cleanup = append(s.cleanup, func() { _ = os.RemoveAll(shared) }) // failed tests run again
	s.env = append(s.env, envShared+"="+shared)

	began := time.Now()
	over := began.Add(s.budget)
	bounded, cancel := context.WithDeadline(ctx, over.Add(max(s.budget, s.grace)))
	defer cancel()
	if s.full {
		bounded = ctx
	}
	var mu sync.Mutex
	take := func() (n name, isCore, ok bool) {
		mu.Lock()
		defer mu.Unlock()
		switch {
		case ctx.Err() != nil:
		case len(queue) > 0:
			n, queue = queue[0], queue[1:]
			return n, true, true
		case len(rest) > 0 && (s.full || time.Now().Before(over)):
			n, rest = rest[0], rest[1:]
			return n, false, true
		}
		return n, false, false
	}
	var workers sync.WaitGroup
	for range s.workers {
		workers.Go(func() {
			for n, isCore, ok := take(); ok; n, isCore, ok = take() {
				s.runMachine(ctx, bounded, n, isCore)
			}
		})
	}
	workers.Wait()
	s.say("=== virtual machines: %d s", int(time.Since(began).Seconds()))
	s.left = append(s.left, rest...)
	return ctx.Err()
}

// shuffled returns the long tests that are not core, in the order of this seed.
func (s *suite) shuffled() []name {
	var out []name
	for n := range s.long {
		if !slices.Contains(s.core, n) {
			out = append(out, n)
		}
	}
	slices.SortFunc(out, func(a, b name) int { return strings.Compare(a.String(), b.String()) })
	rng := rand.New(rand.NewPCG(s.seed, 0))
	rng.Shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
	return out
}

// build links the test programs of the packages of tests.
func (s *suite) build(ctx context.Context, tests []name) error {
	began := time.Now()
	bin, err := os.MkdirTemp("", "agentlab-test-bin-*")
	if err != nil {
		return err
	}
	s.cleanup = append(s.cleanup, func() { _ = os.RemoveAll(bin) })
	packages := map[string]bool{}
	for _, n := range tests {
		packages[n.Package] = true
	}
	for p := range packages {
		to := filepath.Join(bin, strings.ReplaceAll(p, "/", "_")+".test")
		cmd := exec.CommandContext(ctx, "go", "test", "-c", "-vet=off", "-ldflags=-s -w", "-o", to, p)
		cmd.Dir = s.dir
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("go test -c %s: %w\n%s", p, err, out)
		}
		s.programs[p] = to
	}
	s.say("=== virtual machines: the test programs of %d packages: %d s", len(packages), int(time.Since(began).Seconds()))
	return nil
}

// runMachine runs one test. One of the sample that has not come to its end long after the
// end of the budget is ended, and has no result.
func (s *suite) runMachine(ctx, bounded context.Context, n name, isCore bool) {
	limit := bounded
	if isCore {
		limit = ctx
	}
	o := s.process(limit, n)
	switch {
	case ctx.Err() != nil:
		return
	case limit.Err() != nil:
		s.mu.Lock()
		s.cut = append(s.cut, n)
		s.mu.Unlock()
		return
	case isCore && o.Action == "skip":
		o.Action, o.Final = "fail", true
		o.Output = append([]byte("a core test may not be skipped\n"), o.Output...)
	}
	s.record(o, func(ctx context.Context) (outcome, error) {
		o := s.process(ctx, n)
		return o, ctx.Err()
	})
}

// process runs a test in a process of its own.
func (s *suite) process(ctx context.Context, n name) outcome {
	began := time.Now()
	cmd := exec.CommandContext(ctx, s.programs[n.Package], "-test.v", "-test.run", "^"+n.Test+"$", "-test.timeout", hangLimit.String())
	cmd.Dir = s.dirs[n.Package]
	cmd.Env = append(os.Environ(), s.env...)
	if s.full {
		cmd.Args[len(cmd.Args)-1] = "0"
	}
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	gently(cmd)
	err := cmd.Run()
	o := outcome{name: n, Action: "pass", Took: time.Since(began), Output: out.Bytes()}
	ran := bytes.Contains(o.Output, []byte("=== RUN   "+n.Test+"\n"))
	switch {
	case errors.Is(err, exec.ErrWaitDelay), err != nil:
		o.Action = "fail"
		o.Output = fmt.Appendf(o.Output, "%v\n", err)
	case !ran:
		o.Action = "fail"
		o.Output = fmt.Appendf(o.Output, "%s has no test %s\n", n.Package, n.Test)
	case bytes.Contains(o.Output, []byte("\n--- SKIP: "+n.Test+" (")):
		o.Action = "skip"
	}
	return o
}

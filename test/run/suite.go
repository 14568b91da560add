package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

// suite is one run.
type suite struct {
	dir      string   // of the module
	packages []string // patterns
	units    func(all []string, seed uint64) []group
	machines bool   // the long tests, too
	full     bool   // all of them, without a budget
	core     []name // long tests that must run
	budget   time.Duration
	grace    time.Duration // for tests that run when the budget is used, if it is longer than the budget
	workers  int
	seed     uint64
	env      []string
	inMemory string // program that runs the units with their temporary files in memory
	logs     string // directory of the outputs of failed tests
	out      io.Writer

	dirs     map[string]string // of packages
	programs map[string]string // test programs of packages
	cleanup  []func()

	mu     sync.Mutex
	long   map[name]bool // tests of which -short left out a part
	passed int
	skips  int
	fails  []failure
	ran    int // long tests that passed or failed
	left   []name
	cut    []name
}

// failure is a test that failed, and how it runs again.
type failure struct {
	outcome
	again func(context.Context) (outcome, error)
}

func (s *suite) say(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	fmt.Fprintf(s.out, format+"\n", args...)
}

// run runs the tests and reports whether the run has passed.
func (s *suite) run(ctx context.Context) (bool, error) {
	s.long, s.programs = map[name]bool{}, map[string]string{}
	defer func() {
		for _, f := range s.cleanup {
			f()
		}
	}()
	if err := os.RemoveAll(s.logs); err != nil {
		return false, err
	}
	all, err := s.list(ctx)
	if err != nil {
		return false, err
	}
	began := time.Now()
	for _, g := range s.units(all, s.seed) {
		if err := s.runUnits(ctx, g); err != nil {
			return false, err
		}
	}
	if s.machines {
		if err := s.runMachines(ctx); err != nil {
			return false, err
		}
	}
	ok, err := s.verdict(ctx)
	if err != nil {
		return false, err
	}
	s.say("%s: seed %d, %d s", map[bool]string{true: "ok", false: "FAILED"}[ok], s.seed, int(time.Since(began).Seconds()))
	return ok, nil
}

// list returns the import paths of the packages, those first that take longest.
func (s *suite) list(ctx context.Context) ([]string, error) {
	cmd := exec.CommandContext(ctx, "go", append([]string{"list", "-f", "{{.ImportPath}}\t{{.Dir}}"}, s.packages...)...)
	cmd.Dir = s.dir
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w", err)
	}
	s.dirs = map[string]string{}
	var all []string
	for lines := bufio.NewScanner(bytes.NewReader(out)); lines.Scan(); {
		path, dir, _ := strings.Cut(lines.Text(), "\t")
		s.dirs[path] = dir
		if path != archtest {
			all = append(all, path)
		}
	}
	place := func(path string) int {
		if i := slices.Index(first, strings.TrimPrefix(path, module+"/")); i >= 0 {
			return i
		}
		return len(first)
	}
	slices.SortStableFunc(all, func(a, b string) int { return place(a) - place(b) })
	return all, nil
}

// record takes an outcome into the result, and prints it unless it is that of a unit test
// that did not fail.
func (s *suite) record(o outcome, again func(context.Context) (outcome, error)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if o.Long {
		s.long[o.name] = true
	}
	isLong := s.programs[o.Package] != ""
	if isLong && o.Action != "skip" {
		s.ran++
	}
	short := strings.TrimPrefix(o.String(), module+"/")
	switch {
	case o.Test == "" && o.Action == "fail" && !o.Whole && !o.Build: // its tests say why
	case o.Action == "fail":
		if o.Whole { // it runs again with all its tests
			s.fails = slices.DeleteFunc(s.fails, func(f failure) bool { return f.Package == o.Package })
		}
		s.fails = append(s.fails, failure{o, again})
		fmt.Fprintf(s.out, "FAIL    %-60s %6.1fs  %s\n", short, o.Took.Seconds(), s.log(o, "1"))
	case o.Test == "" && !o.NoTests:
		fmt.Fprintf(s.out, "ok      %-60s %6.1fs%s\n", short, o.Took.Seconds(), map[bool]string{true: "  (cached)"}[o.Cached])
	case o.Test == "":
	case o.Action == "skip":
		s.skips++
		if isLong {
			fmt.Fprintf(s.out, "skip    %-60s %6.1fs\n", short, o.Took.Seconds())
		}
	default:
		s.passed++
		if isLong {
			fmt.Fprintf(s.out, "ok      %-60s %6.1fs\n", short, o.Took.Seconds())
		}
	}
}

// log writes the output of a failed test to a file, and returns its path.
func (s *suite) log(o outcome, attempt string) string {
	file := strings.NewReplacer(module+"/", "", "/", "-").Replace(o.String()) + "." + attempt + ".log"
	path := filepath.Join(s.logs, file)
	err := os.MkdirAll(s.logs, 0o755)
	if err == nil {
		err = os.WriteFile(path, o.Output, 0o600)
	}
	if err != nil {
		return "no log: " + err.Error()
	}
	return path
}

// gently makes a command in a process group of its own end by SIGTERM, at which package
// test/guard kills the processes that tests have started.
func gently(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	cmd.WaitDelay = 2 * time.Minute
}
